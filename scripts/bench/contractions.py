"""The gradient of several shards in one program: what merging its contractions saves.

    python scripts/bench/contractions.py
    python scripts/bench/contractions.py --shapes 12,52,256 3,400,256 --platform gpu

For each number of shards, samples a shard and width of the perceptron of `sized.py`: the gradient
of all shards by `jax.vmap` as jax lowers it, the same with its contractions merged
(`ftrain.contractions`), one plain batch of as many samples, and one program for each shard. They
take turns; prints the medians and the least of so many rounds, in milliseconds of wall and of CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

CALLS = 20  # in a round


def programs(shards: int, samples: int, width: int) -> dict[str, Callable[[], Any]]:
    """Each way to the gradient of the same samples, compiled."""
    import jax
    import numpy as np

    from ftrain.contractions import merge_contractions
    from scripts.bench.sized import Sized

    trainer = Sized(width=width)
    params = trainer.init_params(jax.random.key(0))
    random = np.random.default_rng(0)
    x = random.standard_normal((shards, samples, trainer.sizes[0]), dtype=np.float32)
    label = random.integers(10, size=(shards, samples), dtype=np.int32)
    cut = {"x": x, "label": label}
    whole = {"x": x.reshape(-1, x.shape[-1]), "label": label.reshape(-1)}

    def loss(params: Any, batch: dict) -> Any:
        return trainer.loss(params, batch, None)

    def lowered(batch: dict, mean: Callable) -> Any:
        # A function of its own: of the same one jax would give the same module, changed or not.
        return jax.jit(jax.grad(lambda params, batch: mean(params, batch))).lower(params, batch)

    def at_once(params: Any, batch: dict) -> Any:
        return jax.vmap(loss, (None, 0))(params, batch).mean()

    by_vmap = lowered(cut, at_once).compile()
    merged = merge_contractions(lowered(cut, at_once)).compile()
    plain = lowered(whole, loss).compile()
    parts = [{name: leaf[i] for name, leaf in cut.items()} for i in range(shards)]
    one = lowered(parts[0], loss).compile()
    return {
        "vmap": lambda: by_vmap(params, cut),
        "merged": lambda: merged(params, cut),
        "plain": lambda: plain(params, whole),
        "one by one": lambda: [one(params, part) for part in parts],
    }


def measure(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple]]:
    """Wall and CPU milliseconds of a call, in each round."""
    import jax

    took: dict[str, list[tuple]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            jax.block_until_ready(call())
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(CALLS):
                jax.block_until_ready(call())
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            took[name].append((1e3 * wall / CALLS, 1e3 * cpu / CALLS))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["12,4,256", "12,52,256", "3,400,256"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--platform", choices=["cpu", "gpu"], default="cpu")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(arguments.platform, arguments.platform)
    for shape in arguments.shapes:
        took = measure(programs(*map(int, shape.split(","))), arguments.rounds)
        print(f"{shape} (shards, samples, width)")
        for name, rows in took.items():
            wall, cpu = ([row[i] for row in rows] for i in (0, 1))
            print(
                f"  {name:10}  wall {statistics.median(wall):8.2f} ({min(wall):.2f})"
                f"   cpu {statistics.median(cpu):8.2f} ({min(cpu):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
