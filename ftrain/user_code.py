"""Finding and loading the user's trainer. No jax here: the supervisor looks for the file first."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftrain.errors import ConfigError, TrainerError

JAX_NOTE = (
    "--------------------\nFor simplicity, JAX has removed"  # ends every traceback through jit
)
NOT_USERS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.__file__),
    "<frozen",
)


def find_base(trainer: str, config_path: str) -> str:
    """The folder that `trainer` is relative to: the current one, the config's, or one above it.

    Raises:
      ConfigError: the file is in none of them (for `path.py:Class`).
    """
    name, _ = trainer.rsplit(":", 1)
    is_file = name.endswith(".py")
    parts = (
        [name]
        if is_file
        else [name.replace(".", "/") + ".py", name.replace(".", "/") + "/__init__.py"]
    )
    places = list(_places(config_path))
    for folder in places:
        if any((folder / part).is_file() for part in parts):
            return str(folder)
    if is_file:
        raise ConfigError(
            f"trainer: {trainer}: no file {name} in "
            f"{', '.join(map(str, places[:3]))} or above; correct the path"
        )
    return str(places[0])  # an installed module


def _places(config_path: str) -> Iterator[Path]:
    here, config = Path.cwd(), Path(config_path).absolute().parent
    yield from dict.fromkeys([here, config, *config.parents])


def load_trainer(trainer: str, base: str, trainer_args: dict[str, Any], config: Any) -> Any:
    """The user's trainer object, constructed.

    Raises:
      TrainerError: no such class, not a Trainer, or wrong constructor arguments. Whatever the
      user's
        file or constructor raises passes on, for its traceback.
    """
    from ftrain.trainer import Trainer

    name, class_name = trainer.rsplit(":", 1)
    module = load_module(trainer, base)
    cls = getattr(module, class_name, None)
    if cls is None:
        has = sorted(
            n
            for n, v in vars(module).items()
            if inspect.isclass(v) and issubclass(v, Trainer) and v is not Trainer
        )
        raise TrainerError(
            f"trainer: {trainer}: {name} has no class {class_name}; trainers in it: "
            f"{', '.join(has) or 'none'}"
        )
    if not (inspect.isclass(cls) and issubclass(cls, Trainer)):
        raise TrainerError(f"trainer: {trainer}: {class_name} is no subclass of ftrain.Trainer")
    try:
        if cls.__init__ is object.__init__:
            inspect.signature(lambda: None).bind(**trainer_args)  # it takes none
        inspect.signature(cls.__init__).bind(None, **trainer_args)
    except TypeError as error:
        raise TrainerError(
            f"trainer_args: {error}; {class_name} takes {inspect.signature(cls)}"
        ) from None
    made = cls.__new__(cls)
    made.config = config  # before __init__, which need not call super().__init__()
    made.__init__(**trainer_args)
    return made


def load_module(trainer: str, base: str) -> Any:
    """The module that `trainer` names; imported once a process.

    Raises:
      TrainerError: there is no such module. What the file itself raises passes on.
    """
    if base in sys.path:
        sys.path.remove(base)
    sys.path.insert(0, base)  # first, so that `from recipes import ...` finds the project's own
    name = trainer.rsplit(":", 1)[0]
    if not name.endswith(".py"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(error.name + ".")):
                raise TrainerError(
                    f"trainer: no module {name} from {base} or among the installed "
                    "ones; correct the name"
                ) from None
            raise
    path = Path(base) / name
    # The name that `import` would give it, so that pickles and a second import find the same
    # module.
    inside = Path(name).with_suffix("")
    dotted = inside.name if inside.is_absolute() else ".".join(inside.parts)
    loaded = sys.modules.get(dotted)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded  # by the template that this process was forked from
    spec = importlib.util.spec_from_file_location(dotted, path)
    if spec is None or spec.loader is None:
        raise TrainerError(f"trainer: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[dotted] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[dotted]
        raise
    return module


def user_traceback(error: BaseException) -> str:
    """The traceback as the user wants it: from the first frame in the user's own files on.

    The whole of it if no frame is the user's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, f in enumerate(frames) if is_users(f.filename)), 0)
    ending = "".join(traceback.format_exception_only(error)).split(JAX_NOTE)[0]
    text = "".join(
        ["Traceback (most recent call last):\n", *traceback.format_list(frames[first:]), ending]
    ).rstrip()
    if error.__cause__ is None or type(error.__cause__).__module__.startswith("jax"):
        return text
    return (
        f"{user_traceback(error.__cause__)}\n\nThe above exception was the direct cause of the "
        f"following exception:\n\n{text}"
    )


def is_users(filename: str) -> bool:
    """Whether a frame is neither ftrain's, nor Python's, nor an installed package's."""
    return not filename.startswith(NOT_USERS) and "site-packages" not in filename
