"""Finding, loading and blaming the user's trainer."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import ftrain
import ftrain.trainer  # so that no test's clean-up unloads it
from ftrain.errors import ConfigError, TrainerError
from ftrain.user_code import find_base, load_trainer, user_traceback

TRAINER = """
import ftrain

class Mine(ftrain.Trainer):
    def __init__(self, *, rate: float = 0.1, name="x"):
        self.rate, self.seen = rate, self.config

class Bare(ftrain.Trainer):
    pass

class NoTrainer:
    pass

number = 3
"""


@pytest.fixture(autouse=True)
def _clean_imports(monkeypatch, tmp_path):
    """A test runs in a folder of its own; the modules it loaded from there are gone after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("t", "pack")]:
        del sys.modules[name]


def write(path: Path, text: str = TRAINER) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(trainer: str, base: Path, config: Any = None, **arguments: Any) -> Any:
    return load_trainer(trainer, str(base), arguments, config)


def refusal(trainer: str, base: Path, **arguments: Any) -> str:
    with pytest.raises(TrainerError) as caught:
        load(trainer, base, **arguments)
    return str(caught.value)


# Where it is.


def test_the_current_folder_comes_first(tmp_path):
    """Before the config's own."""
    write(tmp_path / "here" / "t.py")
    write(tmp_path / "configs" / "t.py")
    config = str(tmp_path / "configs" / "c.yaml")
    assert find_base("t.py:Mine", config) == str(tmp_path / "here")


def test_then_the_config_s_folder(tmp_path):
    """The command may be run from anywhere."""
    write(tmp_path / "a" / "configs" / "t.py")
    write(tmp_path / "a" / "t.py")
    config = str(tmp_path / "a" / "configs" / "c.yaml")
    assert find_base("t.py:Mine", config) == str(tmp_path / "a" / "configs")


def test_then_the_folders_above_it(tmp_path):
    """configs/ and recipes/ side by side in a project."""
    write(tmp_path / "a" / "recipes" / "t.py")
    config = str(tmp_path / "a" / "configs" / "deep" / "c.yaml")
    assert find_base("recipes/t.py:Mine", config) == str(tmp_path / "a")


def test_a_file_that_is_nowhere_names_the_places(tmp_path):
    """Before anything starts."""
    with pytest.raises(ConfigError) as caught:
        find_base("nowhere/t.py:Mine", "c.yaml")
    message = str(caught.value)
    assert message.startswith("trainer: nowhere/t.py:Mine: no file nowhere/t.py in ")
    assert str(tmp_path / "here") in message and message.endswith("correct the path")


@pytest.mark.parametrize("file", ["pack/t.py", "pack/t/__init__.py"])
def test_a_module_is_looked_for_in_the_same_places(tmp_path, file):
    """`pack.t:Mine` of a project that is not installed."""
    write(tmp_path / "a" / file)
    config = str(tmp_path / "a" / "configs" / "c.yaml")
    assert find_base("pack.t:Mine", config) == str(tmp_path / "a")


def test_an_installed_module_is_relative_to_the_current_folder(tmp_path):
    """It is nowhere above; importing it decides."""
    assert find_base("json.decoder:JSONDecoder", "c.yaml") == str(tmp_path / "here")


# Loading.


def test_a_trainer_is_made_with_its_arguments_and_sees_its_config(tmp_path):
    """`self.config` is there in `__init__`, without super().__init__()."""
    write(tmp_path / "t.py")
    config = object()
    trainer = load("t.py:Mine", tmp_path, config, rate=0.5)
    assert (trainer.rate, trainer.seen) == (0.5, config)
    assert isinstance(trainer, ftrain.Trainer)


def test_a_trainer_may_import_its_neighbours(tmp_path):
    """The base folder is on sys.path: `from pack.part import ...` works."""
    write(tmp_path / "pack" / "part.py", "VALUE = 3\n")
    write(tmp_path / "pack" / "t.py", "from pack.part import VALUE\n" + TRAINER)
    load("pack/t.py:Mine", tmp_path)
    assert sys.modules["pack.t"].VALUE == 3


def test_the_base_folder_goes_first_on_the_path(tmp_path):
    """A package of the same name elsewhere on PYTHONPATH does not hide the project's own."""
    write(tmp_path / "other" / "pack" / "part.py", "VALUE = 'wrong'\n")
    write(tmp_path / "base" / "pack" / "part.py", "VALUE = 'right'\n")
    write(tmp_path / "base" / "t.py", "from pack.part import VALUE\n" + TRAINER)
    sys.path[:0] = [str(tmp_path / "other"), str(tmp_path / "base")]
    load("t.py:Mine", tmp_path / "base")
    assert sys.modules["t"].VALUE == "right"


def test_a_file_s_module_has_the_name_that_import_gives_it(tmp_path):
    """So that a second import finds the same classes."""
    write(tmp_path / "pack" / "t.py")
    trainer = load("pack/t.py:Mine", tmp_path)
    from pack.t import Mine  # type: ignore[import-not-found]

    assert type(trainer) is Mine


def test_a_file_is_run_once_a_process(tmp_path):
    """A worker forked from the template finds it imported, with the classes it had there."""
    write(tmp_path / "t.py")
    assert type(load("t.py:Mine", tmp_path)) is type(load("t.py:Mine", tmp_path))


def test_a_file_that_failed_is_run_again(tmp_path):
    """Half a module must not be taken for it: the second attempt fails with the same error."""
    write(tmp_path / "t.py", "class Mine: pass\n1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load("t.py:Mine", tmp_path)


def test_a_file_of_the_same_name_elsewhere_is_another(tmp_path):
    """`t.py` of two folders."""
    for folder in ("a", "b"):
        write(tmp_path / folder / "t.py", TRAINER + f"PLACE = '{folder}'\n")
        load("t.py:Mine", tmp_path / folder)
        assert sys.modules["t"].PLACE == folder


def test_a_dotted_module_is_loaded(tmp_path):
    """`package.module:Class`."""
    write(tmp_path / "pack" / "t.py")
    assert type(load("pack.t:Mine", tmp_path)).__name__ == "Mine"


def test_a_class_that_is_not_there_names_the_trainers_that_are(tmp_path):
    """Not the imported base class, nor what is no trainer."""
    write(tmp_path / "t.py", TRAINER + "from ftrain import Trainer\n")
    assert refusal("t.py:Min", tmp_path) == (
        "trainer: t.py:Min: t.py has no class Min; trainers in it: Bare, Mine"
    )


@pytest.mark.parametrize("name", ["NoTrainer", "number"])
def test_what_is_no_trainer_is_refused(tmp_path, name):
    """A class of another kind, or no class at all."""
    write(tmp_path / "t.py")
    assert refusal(f"t.py:{name}", tmp_path) == (
        f"trainer: t.py:{name}: {name} is no subclass of ftrain.Trainer"
    )


def test_a_module_that_is_not_there_is_refused(tmp_path):
    """In one line, without a traceback."""
    message = refusal("no_such_package.t:Mine", tmp_path)
    assert message.startswith("trainer: no module no_such_package.t from ")


def test_a_module_that_the_trainer_misses_is_its_own_error(tmp_path):
    """`import pandas` in the user's file fails: with its traceback, not as a wrong name."""
    write(tmp_path / "pack" / "t.py", "import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        load("pack.t:Mine", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"rat": 1}, "got an unexpected keyword argument 'rat'"), ({"self": 1}, "'self'")],
)
def test_wrong_trainer_args_are_refused_with_the_signature(tmp_path, arguments, problem):
    """Checked before the constructor runs."""
    write(tmp_path / "t.py")
    with pytest.raises(TrainerError) as caught:
        load_trainer("t.py:Mine", str(tmp_path), arguments, None)
    message = str(caught.value)
    assert message.startswith("trainer_args: ") and problem in message
    assert "Mine takes (*, rate: float = 0.1, name='x')" in message


def test_trainer_args_of_a_class_without_a_constructor_are_refused(tmp_path):
    """It takes none."""
    write(tmp_path / "t.py")
    assert refusal("t.py:Bare", tmp_path, rate=1).startswith("trainer_args: ")


def test_an_error_in_the_constructor_passes_on(tmp_path):
    """A TypeError of the user's own code is not taken for wrong arguments."""
    write(tmp_path / "t.py", TRAINER + "class Bad(Mine):\n    def __init__(self): len(3)\n")
    with pytest.raises(TypeError, match="has no len"):
        load("t.py:Bad", tmp_path)


# Blaming.


def blamed(error: BaseException) -> str:
    """The traceback a user gets: as if ftrain, not this test, had made the outermost call."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return user_traceback(error.with_traceback(frames))


def traceback_of(folder: Path, constructor: str) -> str:
    """Of an error in a trainer's constructor."""
    write(folder / "t.py", f"{TRAINER}class Bad(Mine):\n    def __init__(self):\n{constructor}")
    with pytest.raises(ValueError, match="no") as caught:
        load("t.py:Bad", folder)
    return blamed(caught.value)


def test_a_traceback_begins_in_the_user_s_file(tmp_path):
    """ftrain's own frames before it say nothing to its reader."""
    text = traceback_of(tmp_path, "        raise ValueError('no')\n")
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{tmp_path / "t.py"}", line ')
    assert lines[-1] == "ValueError: no" and "user_code.py" not in text


def test_the_cause_of_an_error_is_told_before_it(tmp_path):
    """`raise ... from ...` in user code."""
    text = traceback_of(
        tmp_path,
        """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise ValueError('no') from error
""",
    )
    assert (
        text.index("ZeroDivisionError: division by zero")
        < text.index("The above exception was the direct cause")
        < text.index("ValueError: no")
    )


def test_a_traceback_without_user_frames_is_told_whole():
    """An error of ftrain's own on the way."""
    with pytest.raises(TrainerError) as caught:
        load_trainer("json:nothing", ".", {}, None)
    assert "user_code.py" in blamed(caught.value)


def test_a_folder_whose_name_begins_with_ftrain_is_the_user_s():
    """A project of that name beside a clone of ftrain."""
    package = os.path.dirname(ftrain.__file__)
    space: dict[str, Any] = {}
    for file, text in (
        (f"{package}_models/t.py", "def user():\n    raise ValueError('no')\n"),
        (f"{package}/inner.py", "def own():\n    user()\n"),
    ):
        exec(compile(text, file, "exec"), space)
    with pytest.raises(ValueError, match="no") as caught:
        space["own"]()
    assert f"{package}/inner.py" not in blamed(caught.value)
