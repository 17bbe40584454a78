"""`ftrain chaos`: plans, their drawing, each injector, and whole runs under faults."""

from __future__ import annotations

import collections
import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ftrain.chaos import disk
from ftrain.chaos.faults import Injector, refusals
from ftrain.chaos.hook import VARIABLE, FaultFeed
from ftrain.chaos.orders import flip_bit, obey, order, taken_at, withdraw
from ftrain.chaos.plan import (
    COORDINATOR,
    DEFAULT,
    DRAWN,
    Fault,
    drawn,
    read_plan,
    seconds,
    write_plan,
)
from ftrain.ears import Ears
from ftrain.errors import ConfigError
from ftrain.verify import verify
from tests.runs import ENDLESS, REPOSITORY, environment

# Plans.


@pytest.mark.parametrize(
    ("text", "value"), [("10s", 10), ("1.5m", 90), ("2h", 7200), ("300ms", 0.3), (4, 4), ("7", 7)]
)
def test_durations(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 day", True, "1e3s"])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match="is not a duration such as"):
        seconds(text)


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "plan.yaml").write_text(text)
    return str(tmp_path / "plan.yaml")


def test_a_plan_is_read_in_the_order_of_its_times(tmp_path):
    """Those at steps apart; a place that is not given is the kind's first."""
    plan = read_plan(
        written(
            tmp_path,
            "for: 1m\nfaults:\n- {at: 12s, fault: kill, worker: coordinator}\n"
            "- {at_step: 120, fault: exception, worker: 0}\n"
            "- {at: 500ms, fault: partition, worker: 1, from: 2, for: 4s}\n",
        ),
        workers=4,
    )
    assert list(plan.timed) == [
        Fault("partition", 0.5, worker=1, peer=2, for_s=4),
        Fault("kill", 12, worker=COORDINATOR),
    ]
    assert plan.stepped == [Fault("exception", at_step=120, worker=0, place="gradient")]
    assert plan.for_s == 60


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{at: 1s, fault: kil, worker: 1}", "fault: 'kil' is not one of kill, stop, slow,"),
        ("{at: 1s, fault: kill, worker: 4}", "worker: 4 is not a worker from 0 to 3 or coordin"),
        ("{at: 1s, fault: slow, worker: coordinator, for: 1s}", "is not a worker from 0 to 3"),
        ("{at: 1s, fault: supervisor, worker: 1}", "worker: supervisor hits no worker"),
        ("{at: 1s, at_step: 3, fault: kill, worker: 1}", "one of at (a duration) and at_step"),
        ("{fault: kill, worker: 1}", "one of at (a duration) and at_step"),
        ("{at_step: 0, fault: kill, worker: 1}", "at_step: 0 is not an integer >= 1"),
        ("{at: soon, fault: kill, worker: 1}", "at: 'soon' is not a duration"),
        ("{at: 1s, fault: slow, worker: 1}", "slow needs `for`"),
        ("{at: 1s, fault: kill, worker: 1, for: 1s}", "for: kill is over at once"),
        ("{at: 1s, fault: exception, worker: 1, place: sync}", "place: 'sync' is not one of grad"),
        ("{at: 1s, fault: partition, worker: 1, from: 1, for: 1s}", "from: 1 is not another"),
        ("{at: 1s, fault: kill, wroker: 1, worker: 1}", "wroker: unknown key; known are at,"),
    ],
)
def test_a_bad_line_of_a_plan_is_told_with_its_line_and_the_rule(tmp_path, row, message):
    path = written(tmp_path, f"faults:\n- {{at: 1s, fault: supervisor}}\n- {row}\n")
    with pytest.raises(ConfigError) as caught:
        read_plan(path, workers=4)
    assert message in str(caught.value) and f"{path}:" in str(caught.value)


def draw(seed: int, count: int, kinds=DEFAULT) -> list[Fault]:
    return list(itertools.islice(drawn(seed, kinds, 10.0, 4, 15.0), count))


def test_the_same_seed_draws_the_same_faults():
    assert draw(7, 500) == draw(7, 500)
    assert draw(7, 500) != draw(8, 500)


@pytest.mark.parametrize("kind", [k for k in DRAWN if k != "several"])
def test_every_victim_is_drawn_alike(kind):
    """Worker 0 as any other, and the coordinator where the kind can hit it."""
    counts = collections.Counter(f.worker for f in draw(1, 4000, [kind]))
    expected = {"kill": 5, "stop": 5}.get(kind, 4 if None not in counts else 1)
    assert len(counts) == expected
    share = 4000 / expected
    assert all(abs(n - share) < 5 * share**0.5 for n in counts.values()), counts


def test_several_at_once_hit_different_workers():
    """Two of them to all, at one time, each set of workers as likely."""
    hit = collections.Counter()
    for _, group in itertools.groupby(draw(2, 3000, ["several"]), lambda f: f.at_s):
        workers = [f.worker for f in group]
        assert len(workers) == len(set(workers))
        hit.update(workers)
    assert sorted(hit) == [0, 1, 2, 3] and max(hit.values()) < 1.1 * min(hit.values())


def test_faults_come_at_the_mean_rate_that_was_asked_for():
    times = [f.at_s for f in draw(3, 2000, ["kill"])]
    gaps = np.diff([0.0, *times])
    assert 9.5 < gaps.mean() < 10.5 and gaps.min() >= 5 and gaps.max() <= 15


def test_a_plan_that_was_written_down_is_read_back_as_it_was(tmp_path):
    """With what else is told of each fault."""
    faults = draw(5, 200)
    write_plan(tmp_path / "p.yaml", [f.fields() | {"step": 3, "pid": 4} for f in faults], seed=5)
    plan = read_plan(str(tmp_path / "p.yaml"), workers=4)
    assert list(plan.timed) == faults and plan.seed == 5


# Injectors, on processes that only wait.


class FakeRun(SimpleNamespace):
    """What injectors need of a run."""

    def __init__(self, tmp_path: Path, processes: dict, **more):
        super().__init__(run_dir=tmp_path, step=1, told=[], processes=processes, **more)

    def pid(self, victim):
        process = self.processes.get(victim)
        return None if process is None or process.poll() is not None else process.pid

    def pids(self):
        return [self.pid(w) for w in self.processes if self.pid(w)]

    def tell(self, text, **fields):
        self.told.append(fields)


@pytest.fixture
def waiting():
    processes = {w: subprocess.Popen(["sleep", "1000"]) for w in (0, 1, COORDINATOR)}
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


def state(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def tick_until(injector: Injector, condition) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        injector.tick()
        time.sleep(0.002)


@pytest.mark.parametrize("victim", [0, 1, COORDINATOR])
def test_kill_ends_its_victim_alone(tmp_path, waiting, victim):
    run = FakeRun(tmp_path, waiting)
    Injector(run).begin(Fault("kill", 0.0, worker=victim))
    assert waiting[victim].wait(10) == -signal.SIGKILL
    assert sum(p.poll() is None for p in waiting.values()) == 2
    assert run.told == [{"kind": "kill", "step": 1, "worker": victim}]


def test_a_fault_waits_for_a_victim_that_is_away(tmp_path, waiting):
    run = FakeRun(tmp_path, {0: None})
    injector = Injector(run)
    injector.begin(Fault("kill", 0.0, worker=0))
    injector.tick()
    assert "pid" not in injector.injections[0].row
    run.processes[0] = waiting[0]
    injector.tick()
    assert waiting[0].wait(10) == -signal.SIGKILL


def test_a_stopped_worker_stays_stopped_until_it_is_healed(tmp_path, waiting):
    injector = Injector(FakeRun(tmp_path, waiting))
    injector.begin(Fault("stop", 0.0, worker=1))
    tick_until(injector, lambda: state(waiting[1]) == "T")
    injector.heal()
    tick_until(injector, lambda: state(waiting[1]) == "S")


def test_a_slow_worker_is_stopped_most_of_the_time_and_runs_again_after_it(tmp_path, waiting):
    injector = Injector(FakeRun(tmp_path, waiting))
    injector.begin(Fault("slow", 0.0, worker=1, for_s=1.0))
    seen = collections.Counter()

    def over() -> bool:
        seen[state(waiting[1])] += 1
        return injector.injections[0].is_over

    tick_until(injector, over)
    assert seen["T"] > seen["S"] > 0
    tick_until(injector, lambda: state(waiting[1]) == "S")


def checkpoint(folder: Path, step: int) -> Path:
    (folder / str(step)).mkdir(parents=True)
    (folder / str(step) / "data").write_bytes(b"x" * 100)
    return folder / str(step) / "data"


def test_a_checkpoint_is_torn_only_where_an_older_one_is_whole(tmp_path, waiting):
    """Then the newest is, half of it, and nobody is left who has the state."""
    run = FakeRun(tmp_path, {w: waiting[w] for w in (0, 1)}, checkpoints=tmp_path / "c")
    injector = Injector(run)
    old = checkpoint(tmp_path / "c", 90)
    injector.begin(Fault("torn_checkpoint", 0.0))
    injector.tick()
    assert all(p.poll() is None for p in waiting.values())
    new = checkpoint(tmp_path / "c", 100)
    injector.tick()
    assert (old.stat().st_size, new.stat().st_size) == (100, 50)
    assert [run.processes[w].wait(10) for w in (0, 1)] == [-signal.SIGKILL] * 2
    injector.begin(Fault("torn_checkpoint", 1.0))
    assert old.stat().st_size == 100 and not injector.injections[-1].is_over


def test_a_full_disk_takes_nothing_more_until_it_is_healed(tmp_path):
    """What was there before and what was written is in the folder afterwards."""
    if disk.why_not():
        pytest.skip(disk.why_not())
    checkpoint(tmp_path / "checkpoints", 1)
    with disk.Disk(tmp_path) as full:
        run = FakeRun(tmp_path, {}, disk=full)
        injector = Injector(run)
        injector.begin(Fault("full_disk", 0.0, for_s=60.0))
        with pytest.raises(OSError) as caught:
            (full.folder / "more").write_bytes(b"x" * 100000)
        assert caught.value.errno == errno.ENOSPC
        injector.heal()
        checkpoint(full.folder, 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["1", "2", "more"]
    assert (tmp_path / "checkpoints" / "2" / "data").stat().st_size == 100


def test_an_order_that_nobody_takes_is_withdrawn_and_told(tmp_path):
    injector = Injector(FakeRun(tmp_path, {}))
    injector.begin(Fault("exception", 0.0, worker=1, place="update"))
    (placed,) = (tmp_path / "orders").iterdir()
    assert json.loads(placed.read_text()) == {"fault": "bug"} and placed.name == "1-update"
    injector.heal()
    assert list((tmp_path / "orders").iterdir()) == []
    assert injector.injections[0].row["outcome"].startswith("not taken")


def test_an_order_that_was_taken_is_carried_out_though_its_mark_is_gone(tmp_path, monkeypatch):
    """The injector clears it away as soon as it has seen it."""
    monkeypatch.setenv("FTRAIN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("FTRAIN_WORKER_ID", "0")
    monkeypatch.setenv("FTRAIN_INCARNATION", "0")
    path = order(tmp_path, "bug", "update")
    unlink = Path.unlink

    def seen_meanwhile(self: Path, **options: bool) -> None:
        unlink(self, **options)
        if ".claimed-" in self.name:
            withdraw(path)

    monkeypatch.setattr(Path, "unlink", seen_meanwhile)
    with pytest.raises(RuntimeError, match="a bug of the user's"):
        obey("update")
    assert list(path.parent.iterdir()) == []


def test_who_comes_second_to_an_order_still_reads_an_order(tmp_path, monkeypatch):
    """It may have opened the file before another worker took it."""
    monkeypatch.setenv("FTRAIN_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("FTRAIN_WORKER_ID", "0")
    monkeypatch.setenv("FTRAIN_INCARNATION", "0")
    path = order(tmp_path, "sleep", "update", seconds=0)
    with path.open() as second:
        obey("update")
        assert json.load(second)["fault"] == "sleep"
    assert taken_at(path) is not None
    assert [p.name for p in path.parent.iterdir()] == ["any-update.taken-0"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_flipped_bit_is_one_and_leaves_a_finite_number(dtype):
    import jax.numpy as jnp

    before = np.asarray(jnp.array([[0.0, -3.5], [1.25, 0.0]], dtype))
    after = flip_bit(before)
    a, b = (np.frombuffer(x.tobytes(), np.uint8) for x in (before, after))
    assert np.unpackbits(a ^ b).sum() == 1
    assert np.isfinite(after.astype(np.float32)).all() and before[0, 1] != after[0, 1]


# The hook.


def test_the_supervisor_records_what_it_is_told_and_stops_when_chaos_is_gone(monkeypatch):
    """Each fault once, also where a line comes in parts."""
    hears, says = os.pipe()
    monkeypatch.setenv(VARIABLE, json.dumps({"pipe": hears}))
    signals, events, said = [], [], []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    ears = Ears()
    FaultFeed(ears, lambda name, **fields: events.append((name, fields)), said.append)
    line = json.dumps({"text": "kill worker 1", "kind": "kill", "worker": 1, "step": 3}) + "\n"
    for part in (line[:10], line[10:] + line[:5]):
        os.write(says, part.encode())
        ears.wait(1)
    assert events == [("fault_injected", {"kind": "kill", "worker": 1, "step": 3})]
    assert said == ["chaos: kill worker 1"]
    os.close(says)
    ears.wait(1)
    assert signals == [(os.getpid(), signal.SIGTERM)]
    os.close(hears)


def ftrain(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftrain.cli", *arguments],
        cwd=REPOSITORY,
        env={**environment(), **env},
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_a_run_that_chaos_did_not_start_refuses_its_variable(tmp_path):
    done = ftrain(
        "run",
        "configs/linear.yaml",
        "--run-dir",
        str(tmp_path / "run"),
        FTRAIN_CHAOS='{"pipe": 999}',
    )
    assert done.returncode == 2
    assert "FTRAIN_CHAOS is set, and `ftrain chaos` did not start this run" in done.stderr


def test_a_worker_loads_nothing_of_chaos():
    code = "import ftrain.worker, ftrain.loop, ftrain.template, sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "ftrain.chaos" not in done.stdout


# Whole runs.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--faults", "kill,flood"], "--faults: flood is not one of kill, stop,"),
        (["--every", "now"], "--every: 'now' is not a duration"),
        (["--plan", "no.yaml"], "no.yaml: No such file or directory"),
    ],
)
def test_what_cannot_be_injected_is_refused_before_anything_starts(tmp_path, options, message):
    done = ftrain("chaos", "tests/paced.yaml", "--run-dir", str(tmp_path / "run"), *options)
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / "run").exists()


def injected(run_dir: Path) -> list[dict]:
    rows = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [r for r in rows if r["event"] == "fault_injected"]


def test_a_run_under_a_plan_is_judged_and_its_faults_can_be_replayed(tmp_path):
    """A kill and an exception: recorded, marked on the screen, healed, judged good."""
    run_dir = tmp_path / "run"
    plan = written(
        tmp_path,
        "for: 30s\nfaults:\n- {at_step: 10, fault: kill, worker: 0}\n"
        "- {at_step: 12, fault: exception, worker: 1, place: update}\n",
    )
    done = ftrain(
        "chaos",
        "tests/paced.yaml",
        "--run-dir",
        str(run_dir),
        "--set",
        "cluster.workers=3",
        "--set",
        ENDLESS,
        "--plan",
        plan,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chaos: the verdict is good" in done.stdout
    assert "chaos: kill worker 0" in done.stdout
    assert [(e["kind"], e["worker"]) for e in injected(run_dir)] == [("kill", 0), ("exception", 1)]
    assert verify(run_dir).ok
    exits = [json.loads(x) for x in (run_dir / "events.jsonl").read_text().splitlines()]
    died = [e["reason"] for e in exits if e["event"] == "worker_exited" and e["worker"] < 2]
    assert "SIGKILL" in died and "RuntimeError: a bug of the user's" in died
    again = read_plan(str(run_dir / "chaos-plan.yaml"), workers=3)
    assert again.stepped == read_plan(plan, workers=3).stepped and again.for_s == 30
    assert not (run_dir / "orders").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_survives_every_kind_of_fault(tmp_path):
    """One of each that this machine allows, from a plan: the verdict is good."""
    allowed = set(DEFAULT) - {"several"} - set(refusals())
    rows = [
        ("stop", "worker: 2"),
        ("bit_flip", "worker: 0"),
        ("slow", "worker: 1, for: 2s"),
        ("full_disk", "for: 3s"),
        ("coordinator", ""),
        ("memory", "worker: 3"),
        ("torn_checkpoint", ""),
        ("partition", "worker: 1, from: 2, for: 4s"),
        ("exception", "worker: 2"),
        ("supervisor", ""),
        ("kill", "worker: 1"),
    ]
    assert {kind for kind, _ in rows} >= allowed
    lines = [
        f"- {{at: {2 + 9 * i}s, fault: {kind}{', ' * bool(more)}{more}}}\n"
        for i, (kind, more) in enumerate(rows)
        if kind in allowed
    ]
    plan = written(tmp_path, "for: 110s\nfaults:\n" + "".join(lines))
    sets = [ENDLESS, "cluster.heartbeat_timeout_s=3", "cluster.hang_timeout_s=4"]
    sets += ["checkpoint.every_steps=25", "restart.backoff_max_s=1"]
    options = [part for item in sets for part in ("--set", item)]
    arguments = ["chaos", "tests/paced.yaml", "--run-dir", str(tmp_path / "run"), "--plan", plan]
    done = subprocess.run(
        [sys.executable, "-m", "ftrain.cli", *arguments, *options],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {e["kind"] for e in injected(tmp_path / "run")} == allowed
    assert "not injected" not in done.stdout and "not taken" not in done.stdout


def test_orders_are_ignored_outside_chaos(tmp_path):
    """Whatever lies in the run's folder."""
    run_dir = tmp_path / "run"
    order(run_dir, "kill", "gradient", 0)
    done = ftrain(
        "run", "configs/linear.yaml", "--run-dir", str(run_dir), "--set", "cluster.workers=1"
    )
    assert done.returncode == 0, done.stderr
    assert (run_dir / "orders" / "0-gradient").exists()
