"""What saving costs, and whether anything is lost. Usage:

durability.py cost [--largest-mb 2048] [--json FILE]
durability.py moments [--times 20] [--seed 0] [--json FILE]

`cost`: the pause per save and the time to restore against the size of the state, in this process.
`moments`: so many runs are stopped with SIGTERM or killed with everything they started, in turn, at
random moments, half of them drawn from the seconds since the start and half from the steps, and
continued by the same command; each must end with the metrics and the state, to the bit, of the run
that nobody disturbed, and with each sample used as often.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

MB = 1 << 20
SIZES_MB = (1, 16, 128, 512, 2048)
LEAVES = 16  # of a state
FIELDS = ("step", "loss", "samples", "digest")
SETS = ["reduction=reproducible", "epochs=6", "cluster.workers=3", "digest_every_steps=10"]
SETS += ["checkpoint={every_steps: 30, memory_every_s: 0.3}", "grace_s=15"]


class Nobody:
    """No supervisor."""

    def durable(self) -> None:
        return None

    def save_failed(self) -> None:
        return None


def cost(size_mb: int, top: Path) -> dict[str, float]:
    """Seconds that one state of that size takes, for each thing that is done with it."""
    import jax.numpy as jnp
    import numpy as np

    from ftrain.config import Checkpoint
    from ftrain.digests import Digests
    from ftrain.memory_tier import memory_folder
    from ftrain.restore import restore_newest
    from ftrain.retention import Place
    from ftrain.saver import DiskWriter
    from ftrain.saving import Saving
    from ftrain.state import Committed, spec_of, to_host

    run_dir = top / str(size_mb)
    run_dir.mkdir()
    rng = np.random.default_rng(size_mb)
    leaf = rng.integers(0, 2**32, size_mb * MB // LEAVES // 4, np.uint32).view(np.float32)
    params = {f"w{i:02d}": jnp.asarray(leaf) + 0 for i in range(LEAVES)}
    spec = spec_of(params, (), None)
    digests = Digests(spec)
    digests.lower()
    digests.compile(lambda lowered: lowered.compile())
    state = Committed(1, 48, list(params.values()))
    digests(state)
    reports: list[dict[str, Any]] = []
    memory = memory_folder(str(run_dir), "auto")
    saving = Saving(
        spec,
        digests,
        Checkpoint(every_steps=1),
        folder=memory,
        fallback=run_dir / "snapshots",
        run_dir=str(run_dir),
        dataset_length=960,
        patience_s=1.0,
        report=lambda record, **fields: reports.append({"record": record, **fields}),
        news=Nobody(),
    )
    row: dict[str, float] = {"state_mb": size_mb}

    def timed(name: str, call: Any) -> Any:
        started = time.perf_counter()
        result = call()
        row[name] = time.perf_counter() - started
        return result

    timed("copy_s", lambda: [np.array(a) for a in to_host(state.leaves)])
    timed("pause_s", lambda: saving.after_commit(state, 0))
    timed("snapshot_s", lambda: saving._thread and saving._thread.join())
    [asked] = reports
    assert asked["record"] == "snapshot", asked
    writer = DiskWriter(str(run_dir), Place.of(str(run_dir)), keep=3)
    timed("disk_s", lambda: writer.save(Path(asked["path"]), asked["digest"]))
    Path(asked["path"]).unlink()
    for tier, folders in (("memory", [memory]), ("disk", [])):
        restored = timed(
            f"restore_{tier}_s",
            lambda folders=folders: restore_newest(
                str(run_dir),
                spec,
                dataset_length=960,
                report=lambda record, **fields: None,
                memory=folders,
                digest=digests,
            ),
        )
        assert restored.tier == tier
    shutil.rmtree(memory)
    shutil.rmtree(run_dir)
    return row


def costs(largest_mb: int) -> list[dict[str, float]]:
    """The table of `cost`."""
    import orbax.checkpoint  # noqa: F401  its import is no part of a save

    rows = []
    with tempfile.TemporaryDirectory() as top:
        cost(1, Path(top))  # warm
        for size_mb in (s for s in SIZES_MB if s <= largest_mb):
            rows.append(cost(size_mb, Path(top)))
            names = list(rows[0])
            if len(rows) == 1:
                print("  ".join(f"{name:>16}" for name in names))
            print("  ".join(f"{rows[-1][name]:16.4g}" for name in names), flush=True)
    return rows


# Random moments.


def kill_everything(run: Any) -> None:
    """The whole tree at once."""
    for pid in (run.process.pid, *run.processes()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    run.wait_gone(20)


def outcome(run: Any) -> dict[str, Any]:
    """What a run has come to: of each step the last line, and the state."""
    import numpy as np

    import ftrain

    state = ftrain.load_state(str(run.run_dir))
    uses = np.asarray(state.params["uses"])
    return {
        "rows": [
            [m.get(f) for f in FIELDS] for m in {m["step"]: m for m in run.metrics()}.values()
        ],
        "uses": uses.tobytes().hex(),
        "least_most": (float(uses.min()), float(uses.max())),
        "cursor": int(state.cursor),
    }


def moments(times: int, seed: int) -> dict[str, Any]:
    """Disturbs so many runs and holds each against the undisturbed one."""
    from tests.runs import REPOSITORY, running

    config = REPOSITORY / "tests" / "ledger.yaml"
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as top:
        started = time.monotonic()
        with running(config, Path(top) / "whole", *SETS) as run:
            assert run.finish(600) == 0, run.output
            wanted = outcome(run)
        seconds = time.monotonic() - started
        print(f"undisturbed: {seconds:.1f} s, every sample used {wanted['least_most']} times")
        trials = []
        for i in range(times):
            how = "SIGTERM" if i % 2 == 0 else "kill all"
            after_s = chance.uniform(0, seconds) if i % 4 < 2 else None
            at_step = chance.randrange(1, len(wanted["rows"]))
            trials.append(trial(config, Path(top) / f"run{i}", how, after_s, at_step, wanted))
            print(f"{i + 1:2d} {trials[-1]}", flush=True)
    good = sum(t["equal"] for t in trials)
    print(f"{good} of {times} ended with the metrics and the state of the undisturbed run")
    return {"seconds": seconds, "trials": trials}


def trial(
    config: Path,
    run_dir: Path,
    how: str,
    after_s: float | None,
    at_step: int,
    wanted: dict[str, Any],
) -> dict[str, Any]:
    """One run that is disturbed once, after some seconds or at a step, and continued."""
    from tests.runs import running

    with running(config, run_dir, *SETS) as run:
        if after_s is None:
            run.wait_for_step(at_step)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(after_s)
        reached = run.metrics()[-1]["step"] if run.metrics() else 0
        if how == "SIGTERM":
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.process.pid, signal.SIGTERM)
            code = run.finish(120)
        else:
            kill_everything(run)
            code = run.process.returncode
    with running(config, run_dir, *SETS) as run:
        again = run.finish(600)
        restored = [(e["step"], e["tier"]) for e in run.events("checkpoint_restored")]
        equal = again == 0 and outcome(run) == wanted
        rewound = sum(m.get("rewound", False) for m in run.metrics())
    return {
        "how": how,
        "after_s": after_s and round(after_s, 2),
        "step": reached,
        "exit_code": code,
        "restored": restored,
        "done_again": rewound,
        "equal": equal,
    }


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["cost", "moments"])
    parser.add_argument("--largest-mb", type=int, default=SIZES_MB[-1])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.part == "cost":
        result: Any = costs(options.largest_mb)
    else:
        result = moments(options.times, options.seed)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
