"""ftrain on the GPUs of this machine: starts, deaths, failed attempts, hangs, and a large model.

    python scripts/bench/gpu.py --out runs/gpu [PART ...]

Two workers, a GPU each; with CUDA_VISIBLE_DEVICES=0,0 they share one. Each part is a process of its
own with a time limit, and fails alone. Writes results.json, table.txt and the parts' records and
logs to the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from scripts.bench.cycles import held_by
from scripts.bench.recovery import measure
from tests.checks import check_each_step_once, check_nothing_left, check_replicas_agree
from tests.faults.test_attempt_failed import PLACES, failing, failures
from tests.runs import REPOSITORY, Run, running

WORK = Path(os.environ.get("FTRAIN_BENCH_DIR", "/tmp/ftrain-gpu"))
ON_TWO = ["cluster.workers=2", f"cluster.platform={os.environ.get('FTRAIN_BENCH_ON', 'gpu')}"]
LOG_BYTES = 300_000  # of each log that is kept
LARGE = "configs/chars-100m.yaml"
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
SHARED = len(GPUS) != len(set(GPUS))  # two workers on one GPU: slow sums, no timing of steps

PARTS: dict[str, tuple[float, Callable[[], dict]]] = {}


def part(limit_s: float):
    def add(function):
        PARTS[function.__name__] = (limit_s, function)
        return function

    return add


@contextlib.contextmanager
def run_of(name: str, config: str, *sets: str, on: list[str] = ON_TWO) -> Iterator[Run]:
    folder = WORK / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with running(config, folder, *on, f"compile_cache={WORK}/cache", *sets) as run:
        yield run


def started(run: Run) -> dict:
    ready = run.events("worker_ready")
    times = [m["step_time_s"] for m in run.metrics()[20:]]
    return {
        "ready_s": [e["seconds"] for e in ready],
        "ready_cpu_s": [e["cpu_s"] for e in ready],
        "first_commit_s": run.metrics()[0]["t"] - run.events("run_started")[0]["t"],
        "step_ms": 1000 * statistics.median(times) if times else None,
    }


def stop(run: Run) -> int:
    os.kill(run.process.pid, signal.SIGTERM)
    return run.finish(60)


def check(run: Run) -> None:
    check_each_step_once(run, run.metrics()[-1]["step"])
    check_replicas_agree(run)
    check_nothing_left(run)


def spread(rows: list[dict], name: str) -> dict:
    values = sorted(row[name] for row in rows)
    return {"median": statistics.median(values), "min": values[0], "max": values[-1]}


def memory_mib() -> list[int]:
    ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(row) for row in subprocess.check_output(ask, text=True).split()]


def whole_run(name: str, config: str, *sets: str) -> dict:
    with run_of(name, config, *sets) as run:
        code = run.finish(100)
        assert code == 0, run.output
        check_each_step_once(run, run.metrics()[-1]["step"])
        check_nothing_left(run)
        last = run.metrics()[-1]
        evals = {k: v for k, v in last.items() if k.startswith("eval_")}
        return {**started(run), "exit": code, "loss": last["loss"], **evals}


@part(120)
def linear() -> dict:
    return whole_run("linear", "configs/linear.yaml")


@part(150)
def digits() -> dict:
    return whole_run("digits", "configs/digits.yaml")


@part(100)
def digits_warm() -> dict:
    return whole_run("digits-warm", "configs/digits.yaml", "steps=150")


@part(100)
def digits_preallocated() -> dict:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    with run_of("digits-preallocated", "configs/digits.yaml", "steps=1000000") as run:
        run.wait_for_step(50)
        used = memory_mib()
        row = measure(run, 1)
        return {**started(run), "memory_mib": used, **row, "exit": stop(run)}


@part(90)
def kills() -> dict:
    """Worker 1 and worker 0 in turn."""
    rows = []
    with run_of("kills", "tests/paced.yaml", "steps=1000000", "cluster.hang_timeout_s=15") as run:
        run.wait_for_step(40)
        for worker in (1, 0, 1, 0, 1, 0):
            rows.append(measure(run, worker))
            run.wait_for_step(run.metrics()[-1]["step"] + 30)
        code = stop(run)
        check(run)
        assert run.events("checkpoint_restored") == []
        return {
            "exit": code,
            **{name: spread(rows, name) for name in rows[0] if name != "worker"},
            "digests_agreed": len(run.events("digest_agreed")),
            "aborted": len(run.events("step_aborted")),
            "screen_lines": len(run.output.splitlines()),
            "log_bytes": {p.name: p.stat().st_size for p in run.run_dir.glob("logs/worker-*.log")},
            "rows": rows,
        }


def after_restore(run: Run, t: float) -> dict:
    restored = run.wait_for_event("checkpoint_restored")
    commit = run.wait_until(
        "a commit after it",
        lambda: next((m for m in run.metrics() if m["t"] > restored["t"]), None),
    )
    run.wait_for_step(restored["step"] + 60)
    code = stop(run)
    check_nothing_left(run)
    return {"exit": code, "kill_to_commit_s": commit["t"] - t, "restored_step": restored["step"]}


@part(100)
def kill_both() -> dict:
    with run_of("both", "tests/paced.yaml", "steps=100000", "checkpoint.every_steps=25") as run:
        run.wait_for_event("checkpoint_saved", step=50)
        return after_restore(run, run.kill(0, 1))


@part(100)
def kill_coordinator() -> dict:
    every = "checkpoint.every_steps=25"
    with run_of("coordinator", "tests/paced.yaml", "steps=100000", every) as run:
        run.wait_for_event("checkpoint_saved", step=50)
        t = time.time()
        os.kill(run.events("coordinator_started")[-1]["pid"], signal.SIGKILL)
        return after_restore(run, t)


def attempts(where: str, worker: int) -> dict:
    name = f"attempts-{where}-{worker}"
    sets = ["steps=100000", "cluster.hang_timeout_s=15", *failing(PLACES[where], worker)]
    with run_of(name, "tests/paced.yaml", *sets) as run:
        # The last failures may fall together with others' aborts: fewer aborts than failures.
        pids = [run.wait_for_event("worker_started", worker=w)["pid"] for w in (0, 1)]
        held, count = [], {"in_a_step": (3, 10)}.get(where, (2, 5))
        for n in count:
            run.wait_until(f"{n} aborts", lambda n=n: len(failures(run)) >= n)
            run.wait_for_step(run.metrics()[-1]["step"] + 10)
            held.append([held_by(pid) for pid in pids])
        code = stop(run)
        check(run)
        assert all(e["incarnation"] == 0 for e in run.events("worker_started"))
        rows = [
            {"next_commit_s": next(m["t"] for m in run.metrics() if m["t"] > e["t"]) - e["t"]}
            for e in failures(run)
        ]
        return {"exit": code, "aborts": len(rows), **spread_of(rows), "held": held}


def spread_of(rows: list[dict]) -> dict:
    return {name: spread(rows, name) for name in rows[0]}


@part(70)
def attempts_in_a_step() -> dict:
    return {str(w): attempts("in_a_step", w) for w in (0, 1)}


@part(70)
def attempts_in_the_sync() -> dict:
    return {"0": attempts("in_the_sync", 0), "1": attempts("at_its_check", 1)}


@part(70)
def attempts_in_the_settle() -> dict:
    return {str(w): attempts("in_the_settle", w) for w in (0, 1)}


@part(100)
def stopped() -> dict:
    """SIGSTOP of each worker; hang_timeout_s=3."""
    rows = []
    with run_of("stopped", "tests/paced.yaml", "steps=100000", "cluster.hang_timeout_s=3") as run:
        for worker in (1, 0):
            run.wait_for_step((run.metrics() or [{"step": 0}])[-1]["step"] + 30)
            seen = len(run.events())
            t = run.kill(worker, number=signal.SIGSTOP)
            hang = run.wait_for_event("hang_detected", after=seen)
            run.wait_back(worker, seen)
            rows.append({"worker": hang["worker"], "detected_s": hang["t"] - t, **hang})
            assert hang["worker"] == worker
        code = stop(run)
        check(run)
        return {"exit": code, "rows": rows}


@part(120)
def device_hang() -> dict:
    """The device of one worker computes for ever; hang_timeout_s=3."""
    out = {}
    for worker in (0, 1):
        sets = [
            "trainer=tests/trainers.py:SpinsOnDevice",
            f"trainer_args={{worker: {worker}, pause_s: 0.006}}",
            "cluster.hang_timeout_s=3",
            "steps=100000",
        ]
        with run_of(f"device-hang-{worker}", "tests/paced.yaml", *sets) as run:
            hang = run.wait_for_event("hang_detected")
            back = run.wait_back(worker, 0)
            run.wait_for_step(back["step"] + 20)
            stuck_at = next(m for m in reversed(run.metrics()) if m["t"] < hang["t"])
            code = stop(run)
            check(run)
            out[worker] = {
                "exit": code,
                "phase": hang["phase"],
                "named": hang["worker"],
                "last_commit_to_detected_s": hang["t"] - stuck_at["t"],
                "hangs": len(run.events("hang_detected")),
            }
            assert hang["worker"] == worker, out
    return out


@part(420)
def large() -> dict:
    """Ten kills of uniformly drawn workers; what a step takes, and the plain loop before and after.

    The records are judged by `ftrain verify` where they are.
    """
    draw, rows = random.Random(7), []
    before = plain()
    with run_of("large", LARGE, "steps=1000000", "checkpoint.every_steps=0") as run:
        run.wait_for_step(25 if SHARED else 150)
        first = started(run)
        used = memory_mib()
        for _ in range(2 if SHARED else 10):
            rows.append(measure(run, draw.randrange(2)))
            run.wait_for_step(run.metrics()[-1]["step"] + (5 if SHARED else 30))
        code = stop(run)
        check_each_step_once(run, run.metrics()[-1]["step"])
        check_nothing_left(run)
        synced = [e for e in run.events("state_synced") if e["step"] > 0]
        spent = run.events("time_spent")
        views = [e for e in run.events("view_changed") if e["step"] > 0 and len(e["workers"]) > 1]
        names = ("seconds", "sync_s", "connect_s")
        return {
            "exit": code,
            **first,
            "plain": [before, plain()],
            "phases_ms": per_step_ms(spent[len(spent) // 2]) if spent else {},
            "views_of_two": {name: spread(views, name) for name in names},
            "memory_mib": used,
            "sync_gb_per_s": [e["bytes"] / e["seconds"] / 1e9 for e in synced],
            "state_bytes": synced[0]["bytes"],
            **spread_of([{k: v for k, v in row.items() if k != "worker"} for row in rows]),
            "rows": rows,
            "save_s": [e["seconds"] for e in run.events("checkpoint_saved")],
            "verify": verdict(run),
        }


def verdict(run: Run) -> list[str]:
    argv = [sys.executable, "-m", "ftrain", "verify", str(run.run_dir)]
    done = subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    return [f"exit {done.returncode}", *done.stdout.splitlines()]


def per_step_ms(spent: dict) -> dict:
    """Where a step's time goes, in the lowest worker."""
    return {phase: 1000 * s / spent["steps"] for phase, s in spent["seconds"].items()}


@part(200)
def large_reproducible() -> dict:
    """One GPU undisturbed, and two with a kill: equal bits, and what a step costs."""
    steps, sets = (
        60,
        ["reduction=reproducible", "checkpoint.every_steps=0", "digest_every_steps=10"],
    )
    digests, out = {}, {}
    for workers in (1, 2):
        on = [f"cluster.workers={workers}", ON_TWO[1]]
        with run_of(f"reproducible-{workers}", LARGE, f"steps={steps}", *sets, on=on) as run:
            if workers == 2:
                run.wait_for_step(20)
                seen = len(run.events())
                run.kill(1)
                run.wait_back(1, seen)
            assert run.finish(150) == 0, run.output
            digests[workers] = {m["step"]: m.get("digest") for m in run.metrics()}
            out[f"{workers}.step_ms"] = started(run)["step_ms"]
            out[f"{workers}.losses"] = [m["loss"] for m in run.metrics()][-3:]
            members = {tuple(m["workers"]) for m in run.metrics()}
            out[f"{workers}.views"] = sorted(members)
    return {**out, "equal": digests[1] == digests[2], "digest": digests[1][steps]}


@part(330)
def large_memory() -> dict:
    """What each way to commit, and to compute shards, takes of a GPU, and of a step's time."""
    ways = {
        "ahead": ["commit=ahead"],
        "lean": ["commit=lean"],
        "lean_one_by_one": ["commit=lean", "shards_at_once=1"],
    }
    out = {}
    for name, sets in ways.items():
        more = ["steps=100000", "checkpoint.every_steps=0", "checkpoint.memory_every_s=0"]
        with run_of(f"memory-{name}", LARGE, *sets, *more) as run:
            run.wait_for_step(100)
            out[name] = {"memory_mib": memory_mib(), **started(run), "exit": stop(run)}
            state = run.events("state_synced")[0]["bytes"]
    return {**out, "state_mib": state / 2**20}


@part(100)
def large_alone() -> dict:
    """One worker: what ftrain itself costs a step."""
    sets = ["steps=100000", "checkpoint.every_steps=0"]
    with run_of("large-alone", LARGE, *sets, on=["cluster.workers=1", ON_TWO[1]]) as run:
        run.wait_for_step(180)
        used = memory_mib()
        code = stop(run)
        times = [m["step_time_s"] for m in run.metrics()[20:]]
        long = sorted(times)[-4:]
        return {**started(run), "exit": code, "memory_mib": used, "longest_steps_s": long}


@part(100)
def large_alone_plain() -> dict:
    return plain("--set", "cluster.workers=1")


@part(200)
def large_plain() -> dict:
    return plain()


def plain(*more: str) -> dict:
    script = str(REPOSITORY / "scripts" / "bench" / "plain_loop.py")
    argv = [sys.executable, script, LARGE, "--platform", ON_TWO[1].split("=")[1], *more]
    done = subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def versions() -> dict:
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {"python": sys.version.split()[0]}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(FileNotFoundError):
        ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpus"] = subprocess.check_output(ask, text=True).splitlines()
    return found


def do_part(name: str) -> None:
    """In the part's own process: its result on standard output."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs are ended
    try:
        result = {"ok": True, **PARTS[name][1]()}
    except (Exception, SystemExit):  # noqa: BLE001  told in the table
        result = {"ok": False, "error": traceback.format_exc()[-6000:]}
    print(json.dumps(result))


def launch_part(name: str) -> dict:
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, __file__, "--part", name],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        out, _ = child.communicate(timeout=PARTS[name][0])
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            out, _ = child.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            out, _ = child.communicate()
    lines = out.strip().splitlines()
    result = json.loads(lines[-1]) if lines else {"ok": False, "error": "no result"}
    return {**result, "part_s": round(time.monotonic() - began, 1)}


def flat(value, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from flat(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, float):
        yield name, f"{value:.3f}"
    elif isinstance(value, list) and value and isinstance(value[0], float):
        yield name, " ".join(f"{x:.3f}" for x in value)
    else:
        yield name, str(value)


def keep_logs(out: Path) -> None:
    """Records and logs of all runs, the beginning and the end of long ones."""
    with tarfile.open(out / "logs.tar.gz", "w:gz") as tar:
        for path in sorted(WORK.rglob("*")):
            kept = path.suffix in (".jsonl", ".log", ".out", ".yaml")
            if not path.is_file() or not kept or "cache" in path.parts:
                continue
            data = path.read_bytes()
            if len(data) > LOG_BYTES and path.suffix != ".jsonl":
                data = data[: LOG_BYTES // 2] + b"\n...\n" + data[-LOG_BYTES // 2 :]
            info = tarfile.TarInfo(str(path.relative_to(WORK)))
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        do_part(arguments.part)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {"versions": versions()}
    print(json.dumps(results["versions"]), flush=True)
    for name in arguments.parts or PARTS:
        results[name] = launch_part(name)
        rows = [f"{name:22} {key:34} {value}" for key, value in flat(results[name])]
        print("\n".join(rows), flush=True)
        with open(arguments.out / "table.txt", "a") as table:
            table.write("\n".join(rows) + "\n")
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
        keep_logs(arguments.out)


if __name__ == "__main__":
    main()
