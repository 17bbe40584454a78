"""What thousands of small leaves cost beside one large leaf of the same size, in one process.

    JAX_PLATFORMS=cpu python scripts/bench/leaves.py --leaves 5000 --floats 100 --pairs 5

Each part of a sync and of a checkpoint on its own, for both states in turns; prints the medians in
milliseconds and the median of the pairs' ratios. The sum over the network is not among them: both
states travel in the same buckets.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from ftrain.checkpoint import read_checkpoint, write_checkpoint
from ftrain.digests import Digests
from ftrain.state import Committed, cut_bytes, from_host, join_bytes, spec_of, to_host


def parts(leaves: int, floats: int, folder: Path) -> dict[str, Callable[[], object]]:
    """What a sync and a checkpoint do with a state of so many leaves, by name."""
    draws = np.random.default_rng(0)
    tree = {
        f"{i:05d}": jnp.asarray(draws.normal(size=floats).astype(np.float32)) for i in range(leaves)
    }
    spec, state = spec_of(tree, None, None), Committed(1, 1, jax.tree.leaves(tree))
    digests, host = Digests(spec), to_host(state.leaves)
    digests.lower()
    digests.compile(lambda lowered: lowered.compile())
    sent = join_bytes(host)
    return {
        "digest": lambda: digests(state),
        "to the host and joined": lambda: join_bytes(to_host(state.leaves)),
        "cut and to the device": lambda: jax.block_until_ready(
            from_host(spec, cut_bytes(sent, spec.host_shapes))
        ),
        "checkpoint written": lambda: write_checkpoint(
            folder / "1", spec, state, host, dataset_length=1
        ),
        "checkpoint read": lambda: read_checkpoint(folder / "1"),
    }


def milliseconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=5000)
    parser.add_argument("--floats", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    size = arguments.leaves * arguments.floats
    folder = Path(tempfile.mkdtemp())
    try:
        many = parts(arguments.leaves, arguments.floats, folder / "many")
        one = parts(1, size, folder / "one")
        print(f"{'':24}{arguments.leaves:>8} leaves{1:>8} leaf   ratio")
        for name in many:
            many[name](), one[name]()  # warm
            rows = [
                (milliseconds(many[name]), milliseconds(one[name])) for _ in range(arguments.pairs)
            ]
            a, b = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(x / y for x, y in rows)
            print(f"{name:24}{a:12.1f} ms{b:10.1f} ms{ratio:8.1f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
