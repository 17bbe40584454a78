"""What a path names, without reading it: its kind, or one line that says what is to be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftrain.errors import InitFromError
from ftrain.pretrained import Source, find_source


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Folders of every kind, in the current one."""
    monkeypatch.chdir(tmp_path)
    for folder in ("run/checkpoints/100", "run/checkpoints/90", "new run/checkpoints", "nothing"):
        Path(folder).mkdir(parents=True)
    files = ["orbax/_METADATA", "manager/5/default/_METADATA", "many/params/_METADATA"]
    files += ["many/opt/_METADATA", "tensors/a-00001.safetensors", "tensors/config.json"]
    files += ["one.safetensors", "model.bin", "run@7/checkpoints/3/_METADATA"]
    for file in files:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("x")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("run", Source("run", "run")),
        ("run/", Source("run", "run")),
        ("run@90", Source("run", "run", 90)),
        ("run@7", Source("run", "run@7")),  # a folder of that name
        ("run@7@3", Source("run", "run@7", 3)),
        ("orbax", Source("orbax", "orbax")),
        ("manager/5", Source("orbax", "manager/5/default")),
        ("many/params", Source("orbax", "many/params")),
        ("tensors", Source("safetensors", "tensors")),
        ("one.safetensors", Source("safetensors", "one.safetensors")),
    ],
)
def test_kinds_are_told_apart(here, path, source):
    """By what lies in the folder, not by its name."""
    assert find_source(path) == source


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone", "init_from: gone is not there; give a run's folder (or FOLDER@STEP), an Orbax"),
        ("gone@5", "init_from: gone@5 is not there"),
        ("run@5", "init_from: run has no checkpoint of step 5; use one of the steps 100, 90"),
        ("new run", "init_from: new run has no checkpoint; give"),
        ("nothing", "init_from: nothing holds nothing that is known; give"),
        ("model.bin", "init_from: model.bin is a file of another kind; give"),
        ("many", "init_from: many holds opt, params; give the path of one of them"),
        ("manager", "init_from: manager holds the steps 5; give one, as manager/5"),
        ("gs://bucket/model", "init_from: gs://bucket/model is a URL, and only files are read"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(here, path, message):
    """Value, rule and what to do."""
    with pytest.raises(InitFromError) as caught:
        find_source(path)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
