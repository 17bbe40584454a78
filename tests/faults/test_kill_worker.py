"""SIGKILL of workers, at training, of any of them, one or several at once."""

from __future__ import annotations

import pytest

import ftrain
from tests.checks import (
    check_deaths_explained,
    check_each_step_once,
    check_nothing_left,
    check_nothing_lost,
    check_replicas_agree,
)
from tests.runs import ENDLESS, REPOSITORY, running


def test_killed_workers_cost_no_committed_step_and_come_back(tmp_path):
    """Worker 0, then 2, then 1 and 3 at one instant: every step once, no restore."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        for workers in ([0], [2], [1, 3]):
            seen = len(run.events())
            t = run.kill(*workers)
            survivors = [w for w in range(4) if w not in workers]
            run.wait_until(
                "the survivors' next commit",
                lambda t=t, s=survivors: any(
                    m["t"] > t and m["workers"] == s for m in run.metrics()
                ),
            )
            for worker in workers:
                run.wait_back(worker, seen)
        run.wait_until(
            "all four training again", lambda: run.metrics()[-1]["workers"] == [0, 1, 2, 3]
        )
        check_nothing_lost(run, run.stop())
        assert {e["worker"] for e in run.events("state_synced") if e["step"] > 0} == {0, 1, 2, 3}
        killed = [e for e in run.events("worker_exited") if e.get("signal") == "SIGKILL"]
        assert sorted(e["worker"] for e in killed) == [0, 1, 2, 3]
        for worker in range(4):
            line = next(
                x for x in run.output.splitlines() if x.startswith(f"worker {worker} (pid ")
            )
            assert "died of SIGKILL" in line and "went on with step" in line
            assert f"worker {worker} is back after" in run.output


def test_a_survivor_leaves_a_collective_that_does_not_end(tmp_path):
    """One of gloo's stays if its last bytes are half there; only the dead one is replaced."""
    sets = [ENDLESS, "trainer=tests/trainers.py:KeptByCollective", "trainer_args.worker=2"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        run.kill(1)
        run.wait_back(1, seen)
        assert "kept" in run.log(2)
        steps = run.stop()
        check_each_step_once(run, steps)
        check_replicas_agree(run)
        check_deaths_explained(run)
        check_nothing_left(run)
        assert [e["worker"] for e in run.events("worker_exited") if e.get("signal")] == [1]
        assert run.events("hang_detected", "checkpoint_restored") == []


@pytest.mark.slow
def test_a_survivor_whose_device_is_held_ends_and_the_others_go_on(tmp_path):
    """It may not meet them again: they would wait for its device."""
    sets = [
        ENDLESS,
        "trainer=tests/trainers.py:KeptByCollective",
        "trainer_args={worker: 2, holds_device: true}",
    ]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        run.kill(1)
        ended = run.wait_for_event("worker_exited", worker=2)
        assert "did not let it go" in ended["reason"]
        assert [v["workers"] for v in run.events("view_changed")] == [[0, 1, 2, 3]]
        for worker in (1, 2):
            run.wait_back(worker, seen)
        steps = run.stop()
        check_each_step_once(run, steps)
        check_replicas_agree(run)
        assert run.events("hang_detected", "checkpoint_restored") == []
        assert "in _end_stuck" in run.log(2)  # the stacks of its threads


@pytest.mark.slow
def test_kills_do_not_change_what_is_learned(tmp_path):
    """The loss of every step equals the failure-free run's, up to rounding."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        run.kill(1)
        run.wait_until(
            "a commit of three", lambda: any(m["workers"] == [0, 2, 3] for m in run.metrics())
        )
        run.wait_back(1, seen)
        run.wait_for_steps(20)
        last = run.stop()
    with running("tests/paced.yaml", tmp_path / "calm", f"steps={last}") as calm:
        assert calm.finish() == 0
    losses = [[m["loss"] for m in r.metrics()] for r in (run, calm)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-6)


def test_all_but_one_die_at_once(tmp_path):
    """One worker is enough to go on with."""
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS) as run:
        run.wait_for_step(20)
        seen = len(run.events())
        run.kill(0, 1, 3)
        run.wait_until("worker 2 alone", lambda: any(m["workers"] == [2] for m in run.metrics()))
        for worker in (0, 1, 3):
            run.wait_back(worker, seen)
        check_each_step_once(run, run.stop())
        check_replicas_agree(run)
        assert run.events("checkpoint_restored") == []


def test_all_die_at_once_and_the_checkpoint_continues(tmp_path):
    """When nobody is left the newest checkpoint is, and the records say what was done again."""
    with running(
        "tests/paced.yaml", tmp_path / "run", "steps=300", "checkpoint.every_steps=25"
    ) as run:
        saved = run.wait_for_event("checkpoint_saved")
        run.kill(0, 1, 2, 3)
        restored = run.wait_for_event("checkpoint_restored")
        assert run.finish() == 0
        assert restored["step"] >= saved["step"]
        last = {m["step"]: m for m in run.metrics()}
        assert sorted(last) == list(range(1, 301))
        again = [m["step"] for m in run.metrics() if m.get("rewound")]
        assert again == list(range(restored["step"] + 1, restored["step"] + 1 + len(again)))
        check_nothing_left(run)


def test_fewer_than_min_workers_wait_for_the_others(tmp_path):
    """Below min_workers no step is committed; when the worker is back, training goes on."""
    with running("tests/paced.yaml", tmp_path / "run", "steps=300", "cluster.min_workers=4") as run:
        run.wait_for_step(20)
        seen = len(run.events())
        run.kill(3)
        run.wait_back(3, seen)
        assert run.finish() == 0
        check_each_step_once(run, 300)
        assert all(m["workers"] == [0, 1, 2, 3] for m in run.metrics())


def test_below_min_workers_for_too_long_saves_and_exits_75(tmp_path):
    """A worker that cannot come back in time: the state is saved, the same command continues."""
    with running(
        "tests/paced.yaml",
        tmp_path / "run",
        "steps=300",
        "cluster.min_workers=4",
        "cluster.below_min_timeout_s=0.2",
    ) as run:
        run.wait_for_step(20)
        run.kill(3)
        assert run.finish(30) == 75
        step = run.metrics()[-1]["step"]
        assert run.events("checkpoint_saved")[-1]["step"] == step
        check_nothing_left(run)


def test_a_replacement_runs_the_users_file_as_it_is_now(tmp_path):
    """The file is saved again while the run goes on: workers are forked from a new template."""
    source = (REPOSITORY / "tests" / "trainers.py").read_text()
    file = tmp_path / "edited.py"
    file.write_text(source)
    sets = [f"trainer={file}:Paced", ENDLESS]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(20)
        file.write_text(source + "\nprint('the new file')\n")
        for worker in (1, 2):
            seen = len(run.events())
            run.kill(worker)
            run.wait_back(worker, seen)
            run.wait_until("all four", lambda: run.metrics()[-1]["workers"] == [0, 1, 2, 3])
        check_each_step_once(run, run.stop())  # a new template takes as long as it takes
        assert "the new file" in (run.run_dir / "logs" / "supervisor.log").read_text()
        assert "workers are not forked" not in (run.run_dir / "logs/supervisor.log").read_text()


def test_a_checkpoint_that_another_worker_than_0_wrote_has_all_of_the_state(tmp_path):
    """While 0 is away 1 saves, and says that it has; what it saved can be read."""
    sets = ["steps=400", "cluster.workers=2", "checkpoint={every_steps: 5, keep: 100}"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_for_step(10)
        run.kill(0)
        alone = run.wait_for_event("view_changed", workers=[1])
        saved = run.wait_until(
            "a save by worker 1",
            lambda: [e for e in run.events("checkpoint_saved") if e["step"] > alone["step"] + 1],
        )[0]
        assert run.metrics()[-1]["workers"] == [1]
        state = ftrain.load_state(str(run.run_dir), step=saved["step"])
        assert int(state.step) == saved["step"]
        assert int(state.model_state["count"]) == saved["step"]
