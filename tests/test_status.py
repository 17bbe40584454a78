"""Where a run is: from the facts as they come, from the file that is written, and on 80 columns."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import time

import pytest
from rich.console import Console

from ftrain.beat import Reading
from ftrain.board import Board
from ftrain.cli import main
from ftrain.events import EventLog
from ftrain.panel import full_text, one_line, panel
from ftrain.records import read_records
from ftrain.run_now import FRESH_S, STATUS_FILE, RunNow
from ftrain.screen import Screen
from ftrain.status import read_status
from tests.written import BATCH, Written, good_run


def now_of(run: Written, tmp_path, *, after_s: float = 0.0, **options) -> RunNow:
    run_dir = str(run.write(tmp_path / "run"))
    board = Board(run_dir)
    board.read(read_records(run_dir))
    return board.now(run.t + after_s, **options)


def begun(steps: int = 6, **changes) -> Written:
    run = Written(**changes)
    run.start()
    run.view(0, 1)
    run.steps(steps)
    return run


def test_a_training_run_is_counted_up(tmp_path):
    """A step a second, of twelve samples, fourteen of twenty to go."""
    run = begun()
    run.save()
    now = now_of(run, tmp_path, after_s=2.0, pid=77)
    assert (now.state, now.step, now.target, now.samples) == ("training", 6, 20, 6 * BATCH)
    assert now.samples_per_s == pytest.approx(BATCH)
    assert now.eta_s == pytest.approx(14.0)
    assert (now.checkpoint, now.t - now.checkpoint_t, now.pid) == (6, pytest.approx(2.0), 77)
    assert [w.state for w in now.workers] == ["training"] * 2
    assert now.goodput == pytest.approx(now.parts["train"] / now.wall_s)


def test_a_death_and_the_way_back_are_seen(tmp_path):
    """Down, then starting, then training again; what it died of stays."""
    run = begun()
    run.wait(0.5)
    run.exit(1)
    down = now_of(run, tmp_path, after_s=3.0).workers[1]
    assert (down.state, down.pid, down.fault, down.deaths) == ("down", None, "SIGKILL", 1)
    run.view(0)
    run.start_worker(1)
    again = now_of(run, tmp_path).workers[1]
    assert (again.state, again.incarnation) == ("starting", 1)
    run.view(0, 1)
    back = now_of(run, tmp_path)
    assert (back.workers[1].state, back.workers[1].fault, back.deaths) == ("training", "SIGKILL", 1)


@pytest.mark.parametrize(
    "phase, state",
    [("compile", "starting"), ("sync", "syncing"), ("reduce", "training"), ("save", "saving")],
)
def test_a_beat_says_what_no_record_can(tmp_path, phase, state):
    """The phase and how long it has lasted; the state where it follows from that."""
    readings = {0: Reading(5, 5, phase, 90.0)}
    now = now_of(begun(), tmp_path, readings=readings, clock=92.5)
    assert (now.workers[0].state, now.workers[0].phase) == (state, phase)
    assert now.workers[0].phase_s == pytest.approx(2.5)
    assert (now.workers[1].state, now.workers[1].phase) == ("training", "")


def test_a_stuck_worker_is_stuck_whatever_its_beat_says(tmp_path):
    """Until it is ended."""
    run = begun()
    run.event("hang_detected", worker=1, phase="update", seconds=20.0)
    readings = {1: Reading(5, 5, "update", 0.0)}
    assert now_of(run, tmp_path, readings=readings).workers[1].state == "stuck"


def test_below_min_workers_the_run_waits(tmp_path):
    """And says so of those who wait."""
    run = begun(cluster={"workers": 2, "min_workers": 2})
    run.exit(1)
    run.view(0)
    now = now_of(run, tmp_path)
    assert (now.state, now.workers[0].state) == ("waiting", "waiting")
    run.view(0, 1)
    assert now_of(run, tmp_path).state == "training"


def test_the_speed_of_a_run_that_stands_still_is_not_that_of_before(tmp_path):
    """After ten seconds without a step there is none, and no end in sight."""
    now = now_of(begun(), tmp_path, after_s=11.0)
    assert (now.samples_per_s, now.eta_s) == (0.0, None)


def test_after_a_rewind_the_speed_is_of_the_new_history(tmp_path):
    """Not negative."""
    run = begun()
    run.lose_all(restored=0)
    run.steps(2)
    now = now_of(run, tmp_path)
    assert (now.step, now.samples_per_s) == (2, pytest.approx(BATCH))


def test_a_finished_run_shows_its_exit_code(tmp_path):
    """From the records, for ever."""
    now = read_status(str(good_run().write(tmp_path / "run")))
    assert (now.state, now.exit_code, now.reason) == ("finished", 0, "step 20 is reached and saved")
    assert (now.deaths, now.workers[0].fault) == (4, "the coordinator's death")


def test_who_listens_to_the_event_log_hears_each_event_once_it_is_written(tmp_path):
    """As the supervisor's board does."""
    log, heard = EventLog(str(tmp_path)), []
    log.listen(heard.append)
    log("worker_fenced", worker=1)
    assert [(row["event"], row["worker"]) for row in heard] == [("worker_fenced", 1)]


# The file.


def test_what_is_written_is_read_back(tmp_path):
    """All of it; what is not finite is null."""
    now = now_of(begun(), tmp_path)
    now.write()
    text = (tmp_path / "run" / STATUS_FILE).read_text()
    assert RunNow.from_json(text) == now
    assert "NaN" not in dataclasses.replace(now, loss=float("nan")).to_json()
    assert [f.name for f in (tmp_path / "run").glob("*.part")] == []


def test_a_fresh_file_is_believed_and_an_old_one_is_not(tmp_path):
    """Its supervisor has died, or is stopped: then the records say where the run was."""
    run = begun()
    now = dataclasses.replace(now_of(run, tmp_path), t=time.time(), loss=42.0)
    now.write()
    assert read_status(now.run_dir).loss == 42.0
    dataclasses.replace(now, t=time.time() - FRESH_S - 1).write()
    old = read_status(now.run_dir)
    assert (old.loss, old.state) == (pytest.approx(1 / 6), "dead")
    (tmp_path / "run" / "lock").write_text(f"{os.getpid()}\n")
    silent = read_status(now.run_dir)
    assert silent.state == "silent" and f"process {os.getpid()}" in silent.reason


@pytest.mark.parametrize("text", ["", "{}", '{"t": 1}', "[]"])
def test_a_file_of_another_version_is_no_harm(tmp_path, text):
    """The records are read."""
    run_dir = begun().write(tmp_path / "run")
    (run_dir / STATUS_FILE).write_text(text)
    assert read_status(str(run_dir)).step == 6


# The screen.


def crowd(workers: int) -> Written:
    """A run of many, with long causes of death."""
    run = Written(cluster={"workers": 2})
    run.start()
    run._config["cluster"]["workers"] = workers
    for worker in range(2, workers):
        run.event("worker_started", worker=worker, pid=500 + worker, incarnation=12)
    run.view(*range(workers))
    run.steps(6)
    run.exit(1, "not reaching worker 2 3 in reduce for 61.2 s (hang_timeout_s=60)" * 2)
    run.save()
    return run


@pytest.mark.parametrize("workers", [2, 64])
def test_the_panel_fits_eighty_columns(tmp_path, workers):
    """And about a screen, however many workers there are; those in trouble are among the shown."""
    now = now_of(crowd(workers), tmp_path, after_s=1.0)
    lines = full_text(now).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 24
    text = "\n".join(lines)
    for wanted in ("training", "step 6 / 20", "goodput", "saved 6 (1 s ago)", "1 death", "down"):
        assert wanted in text, text
    assert ("and 48 more" in text) == (workers == 64)


def test_a_line_for_a_log_says_the_same_in_short(tmp_path):
    """With those who train."""
    run = begun()
    run.exit(1)
    run.view(0)
    assert one_line(now_of(run, tmp_path)).startswith(
        "step 6/20  loss 0.1667  12 samples/s  0:14 left  workers 0"
    )


def test_without_a_terminal_a_plain_line_comes_now_and_then(tmp_path, capsys):
    """Not one a second, and none before there is anything to tell."""
    screen = Screen()
    begin = Written()
    begin.start()
    screen.status(now_of(begin, tmp_path))
    assert capsys.readouterr().out == ""
    for _ in range(3):
        screen.status(now_of(begun(), tmp_path))
    assert capsys.readouterr().out.count("step 6/20") == 1


def test_the_panel_is_drawn_on_a_terminal(tmp_path):
    """With colours, whatever the run's words are: brackets are no markup."""
    run = begun()
    run.exit(1, "ValueError: [red]not a colour[/red]")
    out = Console(file=io.StringIO(), force_terminal=True, width=100)
    out.print(panel(now_of(run, tmp_path)))
    assert "[red]not a colour[/red]" in out.file.getvalue()


# The command.


def test_the_command_shows_it_once_where_no_terminal_is(tmp_path, capsys):
    """As text or as JSON; 2 where no run is."""
    run_dir = str(good_run().write(tmp_path / "run"))
    assert main(["status", run_dir]) == 0
    assert "step 20 / 20" in capsys.readouterr().out
    assert main(["status", run_dir, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20
    assert main(["status", str(tmp_path)]) == 2
