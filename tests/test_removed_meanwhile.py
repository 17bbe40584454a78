"""Files that another process removes between the supervisor's look at them and their use."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from ftrain.forking import Template
from ftrain.keeper import Keeper


@pytest.fixture
def removed(tmp_path, monkeypatch):
    """A file that is there for whoever asks for it, and gone when its metadata is read."""
    path, stat = str(tmp_path / "file"), os.stat

    def read(file, *args, **options):
        if file == path:
            raise FileNotFoundError(path)
        return stat(file, *args, **options)

    monkeypatch.setattr(os.path, "exists", lambda file: True)
    monkeypatch.setattr(os, "stat", read)
    return path


def test_a_snapshot_that_the_saver_has_just_removed_ends_nothing(tmp_path, removed):
    """It is on disk, and the word of it on its way: seen once as a supervisor's end, exit 1."""
    config = SimpleNamespace(run_dir=str(tmp_path))
    killed: list[int] = []
    keeper = Keeper(config, {}, -1, None, ears=None, log=None, logs=None, record=None, tell=None)
    keeper._now, keeper._since = SimpleNamespace(path=removed), time.monotonic()
    keeper.child = SimpleNamespace(kill=lambda: killed.append(1))
    keeper.tick(time.monotonic())
    assert killed == []
    keeper.tick(time.monotonic() + 1000)
    assert killed == [1]


def test_a_users_file_that_an_editor_is_replacing_has_changed(removed):
    """The template imported another."""
    template = Template.__new__(Template)
    template._files = {removed: 1.0}
    assert template.is_stale()
