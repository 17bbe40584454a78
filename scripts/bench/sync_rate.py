"""How fast a state reaches a worker that has come back, beside what the link can carry.

    python scripts/bench/sync_rate.py --workers 4 --widths 1000 3000
    python scripts/bench/sync_rate.py --platform gpu --workers 2 --widths 4096 12288

The link: a jitted sum of one buffer over as many processes, waited for each time, with gloo or
NCCL; GB/s are the buffer's bytes over the time. ftrain: a run of the sized perceptron, whose last
worker is killed; the state's bytes over what `state_synced` says that it took, digests included,
and what the others waited for that part of the new view. Medians and ranges.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from scripts.bench.plain_loop import launch
from tests.runs import running

CONFIG = "scripts/bench/sized.yaml"
LINK_MB = (4, 16, 256)
REPEAT = 15


def link(arguments: argparse.Namespace) -> dict[str, float]:
    """GB/s of a sum over the workers, by the buffer's megabytes."""
    argv = ["--platform", arguments.platform, "--workers", str(arguments.workers)]
    processes = launch(
        __file__, arguments.workers, arguments.platform, argv, stdout=subprocess.PIPE, text=True
    )
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    return json.loads(outputs[0].strip().splitlines()[-1])


def link_worker(platform: str, workers: int, address: str, worker: int) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, workers, worker)
    mesh = Mesh(np.array(jax.devices()), ("worker",))
    add = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "worker"), mesh=mesh, in_specs=P("worker"), out_specs=P()
        )
    )
    rates = {}
    for megabytes in LINK_MB:
        mine = np.zeros((1, megabytes << 18), np.uint32)
        whole = jax.make_array_from_process_local_data(NamedSharding(mesh, P("worker")), mine)
        times = []
        for _ in range(REPEAT + 2):
            began = time.perf_counter()
            jax.block_until_ready(add(whole))
            times.append(time.perf_counter() - began)
        rates[f"{megabytes} MB"] = mine.nbytes / statistics.median(times[2:]) / 1e9
    if worker == 0:
        print(json.dumps(rates))


def ours(arguments: argparse.Namespace, width: int) -> dict[str, object]:
    """Kills of the last worker, one after the other."""
    folder = arguments.run_dir / f"width-{width}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    last = arguments.workers - 1
    sets = [
        f"cluster.workers={arguments.workers}",
        f"cluster.platform={arguments.platform}",
        f"trainer_args={{width: {width}, layers: {arguments.layers}}}",
        "steps=1000000",
        "checkpoint.every_steps=0",
        "checkpoint.memory_every_s=0",
        *arguments.set,
    ]
    with running(CONFIG, folder, *sets) as run:
        run.wait_for_step(10)
        for _ in range(arguments.kills):
            seen = len(run.events())
            run.kill(last)
            run.wait_back(last, seen)
            run.wait_for_step(run.metrics()[-1]["step"] + 10)
        synced = [e for e in run.events("state_synced") if e["step"] > 0]
        views = [e for e in run.events("view_changed") if e["step"] > 0 and last in e["workers"]]
        os.kill(run.process.pid, signal.SIGTERM)
        run.finish()
    return {
        "state_mb": synced[0]["bytes"] / 1e6,
        "seconds": [e["seconds"] for e in synced],
        "gb_per_s": [e["bytes"] / e["seconds"] / 1e9 for e in synced],
        "others_waited_s": [v["sync_s"] - v["connect_s"] for v in views],
    }


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[1000, 3000])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--run-dir", type=Path, default=Path("runs/bench-sync-rate"))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-sync-rate.json"))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        link_worker(arguments.platform, arguments.workers, arguments.address, arguments.worker)
        return
    results: dict[str, object] = {"link_gb_per_s": link(arguments)}
    for size, rate in results["link_gb_per_s"].items():
        print(f"link, a sum of {size:>7}: {rate:.2f} GB/s", flush=True)
    for width in arguments.widths:
        row = results[f"width {width}"] = ours(arguments, width)
        print(
            f"state of {row['state_mb']:.0f} MB: {spread(row['gb_per_s'])} GB/s, "
            f"{spread(row['seconds'])} s; the others {spread(row['others_waited_s'])} s",
            flush=True,
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
