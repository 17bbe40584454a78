"""What the screen says of a death, whatever comes after it."""

from __future__ import annotations

from types import SimpleNamespace

from ftrain.config import Config
from ftrain.slots import Slot
from ftrain.story import Story


def story(lines: list[str]) -> Story:
    screen = SimpleNamespace(line=lines.append, close=lambda: None)
    config = Config.model_validate(
        {"trainer": "a.py:A", "run_dir": "r", "steps": 9, "batch_size": 4}
    )
    told = Story(screen, config)
    told.fact("commit", {"t": 1.0, "step": 1, "loss": 1.0, "samples": 4, "workers": [0, 1]})
    return told


def training(worker: int) -> Slot:
    return Slot(worker, going=True)


def synced(worker: int) -> dict:
    return {"t": 3.0, "worker": worker, "donor": 0, "step": 1, "bytes": 84, "seconds": 0.1}


def test_a_death_is_told_before_the_return_if_no_commit_came_between():
    """Nobody reads that a worker is back without having read why it was away."""
    lines: list[str] = []
    told = story(lines)
    told.worker_died(training(1), 77, "SIGKILL", None)
    told.fact("state_synced", synced(1))
    assert lines[-2].startswith("worker 1 (pid 77) died of SIGKILL")
    assert lines[-1].startswith("worker 1 is back")


def test_a_death_is_told_once():
    """By the next commit, and not again by the return."""
    lines: list[str] = []
    told = story(lines)
    told.worker_died(training(1), 77, "SIGKILL", None)
    told.fact("commit", {"t": 2.0, "step": 2, "loss": 1.0, "workers": [0]})
    told.fact("state_synced", synced(1))
    assert sum("died of SIGKILL" in line for line in lines) == 1


def test_two_deaths_of_a_worker_before_a_commit_are_both_told():
    """The first is not lost for the second."""
    lines: list[str] = []
    told = story(lines)
    told.worker_died(training(1), 77, "SIGKILL", None)
    told.worker_died(training(1), 78, "SIGABRT", None)
    told.fact("commit", {"t": 2.0, "step": 2, "loss": 1.0, "workers": [0]})
    assert [line.split(" (in")[0] for line in lines if "died" in line] == [
        "worker 1 (pid 77) died of SIGKILL",
        "worker 1 (pid 78) died of SIGABRT",
    ]
