"""A worker's own errors: in its data, in its hook, on one, on all, and before it starts."""

from __future__ import annotations

import pytest

from ftrain.chaos.orders import order
from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.runs import ENDLESS, running

TRAINERS = "trainer=tests/trainers.py:"
BEFORE, AFTER, LATER = "gradient", "update", "hook"  # the collective, and after the commit


def test_error_on_one_worker_replaces_that_worker(tmp_path):
    """The others go on, it comes back, and its traceback is in its log."""
    with running("tests/paced.yaml", tmp_path / "run", TRAINERS + "FailsInData", ENDLESS) as run:
        died = run.wait_for_event("worker_exited", worker=1)
        run.wait_back(1, run.events().index(died))
        check_each_step_once(run, run.stop())
        assert (died["worker"], died["exit_code"]) == (1, 13)
        assert died["reason"] == "OSError: the disk of worker 1 is gone"
        assert "worker 1 is back" in run.output
        log = (run.run_dir / "logs" / "worker-1.log").read_text()
        assert "the disk of worker 1 is gone" in log and "Traceback" in log


def test_error_in_the_hook_replaces_that_worker(tmp_path):
    """Hooks come in order, at most once a step, and the next lowest goes on with them."""
    with running("tests/paced.yaml", tmp_path / "run", TRAINERS + "FailsInHook", "steps=60") as run:
        assert run.finish() == 0
        check_each_step_once(run, 60)
        hooks = [
            int(line.split("step ")[1].split(":")[0])
            for line in run.output.splitlines()
            if "hook after step" in line
        ]
        assert hooks == sorted(set(hooks)) and 5 in hooks and len(hooks) >= 59
        assert run.events("worker_exited")[0]["reason"] == "RuntimeError: the hook is broken"


def test_same_error_everywhere_stops_with_the_first_traceback_last(tmp_path):
    """A record that nobody can read: exit 3 in seconds, the user's own frames last."""
    with running("tests/paced.yaml", tmp_path / "run", TRAINERS + "FailsEverywhere") as run:
        assert run.finish(60) == 3
        assert run.output.rstrip().endswith("RuntimeError: record 50 is bad")
        assert 'raise RuntimeError("record 50 is bad")' in run.output
        check_nothing_left(run)


@pytest.mark.parametrize(
    "trainer, says",
    [
        ("RaisesInDataset", "ValueError: boom-\u00e9"),
        ("BadLoss", "KeyError: 'no such thing'"),
        ("Empty", "dataset(): has 0 samples; it needs at least 1"),
        ("TouchesDevice", "used a JAX device"),
        ("IntegerParams", "parameters are floating"),
        ("TextInState", "model_state['layers'][0]['name'] is a str, 'first'; leaves are arrays"),
        ("NotATrainer", "NotATrainer is no subclass of ftrain.Trainer"),
        ("Nobody", "has no class Nobody"),
    ],
)
def test_trainer_that_cannot_start_is_told_once(tmp_path, trainer, says):
    """Exit 2, one message for all four workers, the user's traceback where there is one."""
    with running("tests/paced.yaml", tmp_path / "run", TRAINERS + trainer) as run:
        assert run.finish(60) == 2
        assert run.output.count(says) == 1
        assert "the same on 4 of 4 workers" in run.output
        assert run.events("run_finished")[-1]["exit_code"] == 2
        assert "ftrain/worker.py" not in run.output
        check_nothing_left(run)


@pytest.mark.parametrize(
    "sets, says",
    [
        (["trainer=tests/broken_file.py:X"], "No module named 'a_module_that_is_not_there'"),
        ([TRAINERS + "Paced", "trainer_args.speed=3"], "trainer_args: got an unexpected keyword"),
    ],
)
def test_file_that_cannot_be_used_is_told_once(tmp_path, sets, says):
    """An import error and a wrong constructor argument are exit 2, in one message."""
    with running("tests/paced.yaml", tmp_path / "run", *sets, "trainer_args.pause_s=0.1") as run:
        assert run.finish(60) == 2
        assert run.output.count(says) == 1


def test_missing_file_is_refused_before_anything_starts(tmp_path):
    """No process, no run directory content; the places looked in are named."""
    with running("tests/paced.yaml", tmp_path / "run", "trainer=nowhere/nothing.py:X") as run:
        assert run.finish(20) == 2
        assert "no file nowhere/nothing.py" in run.output
        assert not (tmp_path / "run").exists()


KINDS = [
    ("memory", BEFORE, "MemoryError: cannot allocate 8 GiB"),
    ("bug", LATER, "RuntimeError: a bug of the user's"),
    ("segfault", AFTER, "SIGSEGV in string_at"),
]
MORE = [
    ("exit", "dataset", "SystemExit: 0"),
    ("leave", LATER, "exit code 0 before the end of the run"),
    ("device_memory", AFTER, "JaxRuntimeError: RESOURCE_EXHAUSTED"),
    ("exit", BEFORE, "SystemExit: 0"),
    ("interrupt", AFTER, "KeyboardInterrupt"),
    ("abort", BEFORE, "SIGABRT in "),
]
MORE += [
    (fault, at, says)
    for fault, _, says in {k[0]: k for k in KINDS + MORE}.values()
    for at in (BEFORE, AFTER, LATER)
    if (fault, at) not in [k[:2] for k in KINDS + MORE]
]


@pytest.mark.parametrize(
    "fault, at, says",
    [*KINDS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)],
)
def test_every_kind_of_error_of_one_worker_replaces_it(tmp_path, fault, at, says):
    """Before the collective, after it, after the commit: the peers try again without it."""
    run_dir = tmp_path / "run"
    worker = 0 if at == LATER else 2
    with running("tests/paced.yaml", run_dir, TRAINERS + "Ordered", ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        order(run_dir, fault, at, worker)
        died = run.wait_for_event("worker_exited", after=seen, worker=worker)
        run.wait_back(worker, seen)
        steps = run.stop()
        check_each_step_once(run, steps)
        check_replicas_agree(run)
        check_nothing_left(run)
        assert died["reason"].startswith(says)
        assert f"worker {worker} (pid {died['pid']}) died of {says}" in run.output
        failed = [e for e in run.events("worker_exited") if e["reason"] != "the end of the run"]
        assert failed == [died]


@pytest.mark.parametrize(
    "fault, says", [("memory", "MemoryError: cannot allocate 8 GiB"), ("segfault", "SIGSEGV")]
)
def test_the_same_error_on_all_at_once_stops_with_the_first_cause_last(tmp_path, fault, says):
    """No restart can help: exit 3 within seconds, one traceback, though four have died."""
    run_dir = tmp_path / "run"
    with running("tests/paced.yaml", run_dir, TRAINERS + "Ordered") as run:
        for worker in range(4):
            order(run_dir, fault, AFTER, worker, after_step=20, together=4)
        assert run.finish(60) == 3
        assert run.output.rstrip().endswith(says)
        assert "the same error came on all 4 workers; the first was" in run.output
        check_nothing_left(run)


def test_without_restarts_the_first_cause_is_told_and_the_rest_are_its_consequences(tmp_path):
    """max_failures 0: worker, exception and log are named; no peer's end is told as a failure."""
    run_dir = tmp_path / "run"
    sets = [TRAINERS + "Ordered", "restart.max_failures=0"]
    with running("tests/paced.yaml", run_dir, *sets) as run:
        run.wait_for_step(20)
        order(run_dir, "bug", BEFORE, 3)
        assert run.finish(30) == 3
        told = run.output.rstrip()
        assert told.endswith("RuntimeError: a bug of the user's")
        assert "worker 3 failed 1 times in a row, restart.max_failures=0" in told
        assert "logs/worker-3.log" in told and 'File "' in told
        others = [e for e in run.events("worker_exited") if e["worker"] != 3]
        assert {e["reason"] for e in others} == {"the end of the run"}
        check_nothing_left(run)
