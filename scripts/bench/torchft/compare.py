"""ftrain and torchft side by side. See docs/torchft.md; `run` sets up what it needs.

    scripts/bench/torchft/run                          everything, about half an hour
    scripts/bench/torchft/run --part kills --kills 5   one part, added to what is there
    scripts/bench/torchft/run --part none              the table of what is there

Each part takes the sides in turns, every second round in the other order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import measure
import numpy as np
from injector import Injector
from sides import SETTINGS, SIZES, Ftrain, Size, ftrain, torch_plain, torchft
from tables import print_tables

PARTS = ("overhead", "kills", "throughput")


class Bench:
    """One set of results, and where its runs are."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.folder, self.venv = arguments, arguments.folder, arguments.venv
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = self.folder / "digits.npz"
        self.file = self.folder / "results.json"
        self.results: dict[str, list] = {part: [] for part in PARTS}
        if self.file.exists():
            self.results |= json.loads(self.file.read_text())
        self.runs = 0

    def add(self, part: str, **row) -> None:
        self.results[part].append(row)
        self.file.write_text(json.dumps(self.results, indent=1))
        print(part, {k: v for k, v in row.items() if k != "kills"}, flush=True)

    def run_dir(self) -> Path:
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def sides(self, size: Size) -> dict[str, Callable[[], contextlib.AbstractContextManager]]:
        """How each side is started, by name."""

        def with_torchft(name: str) -> Callable[[], contextlib.AbstractContextManager]:
            return lambda: torchft(self.run_dir(), size, self.venv, self.data, SETTINGS[name])

        return {"ftrain": lambda: ftrain(self.run_dir(), size)} | {
            f"torchft {name}": with_torchft(name) for name in SETTINGS
        }

    # The parts.

    def overhead(self, round_: int) -> None:
        """Step times, each side's beside its own plain loop's."""
        steps, size_name = self.arguments.steps, self.arguments.size
        size = SIZES[size_name]

        def of_side(start) -> float:
            with start() as side:
                measure.wait_all(side, steps + measure.WARM_UP)
                return measure.median_ms(side, steps)

        def of_torch(mode: str) -> float:
            total = steps + measure.WARM_UP
            with torch_plain(self.run_dir(), size, self.venv, self.data, mode, total) as side:
                side.wait_end()
                return measure.median_ms(side, steps)

        kinds: dict[str, Callable[[], float]] = {
            "jax plain": lambda: measure.plain_jax_ms(size, steps),
            "ftrain": lambda: of_side(self.sides(size)["ftrain"]),
            # One shard a worker, as in the plain loop; the recipe cuts three for when one dies.
            "ftrain, 4 shards": lambda: of_side(
                lambda: ftrain(self.run_dir(), size, sets=["batch_shards=4"])
            ),
            "torch plain": lambda: of_torch("plain"),
            "torch ddp": lambda: of_torch("ddp"),
            "torchft as documented": lambda: of_side(self.sides(size)["torchft as documented"]),
        }
        row = {name: kinds[name]() for name in in_turns(list(kinds), round_)}
        self.add("overhead", size=size_name, ms=row)

    def kills(self, round_: int) -> None:
        """One worker after the other dies."""
        sides = self.sides(SIZES["small"])
        for name in in_turns(list(sides), round_):
            injector = Injector(self.seed(round_))
            with sides[name]() as side:
                rows = measure.kills(side, injector, self.arguments.kills)
            self.add("kills", side=name, kills=rows)

    def throughput(self, round_: int) -> None:
        """Samples per second, undisturbed and with kills, in turns."""
        sides = self.sides(SIZES["small"])
        for name in in_turns(list(sides), round_):
            if self.arguments.side not in (None, name):
                continue
            injector = Injector(self.seed(round_))
            cycles, *seconds = self.arguments.cycles
            with sides[name]() as side:
                found = measure.throughput(side, injector, int(cycles), *seconds)
            if isinstance(side, Ftrain):  # after its end: what its records say of it
                found |= measure.verdict(side, side.run.run_dir)
            self.add("throughput", side=name, **found)

    def seed(self, round_: int) -> int:
        return random.Random(f"{self.arguments.seed} {round_}").randrange(2**32)


def in_turns(names: list[str], round_: int) -> list[str]:
    return names[:: 1 if round_ % 2 == 0 else -1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, required=True, help="the environment with torchft")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-torchft"))
    parser.add_argument("--part", choices=[*PARTS, "all", "none"], default="all")
    parser.add_argument("--size", choices=[*SIZES], default="small", help="of `overhead`")
    parser.add_argument("--side", help="of `throughput`, this one alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5, help="of each side in a round")
    parser.add_argument(
        "--cycles",
        type=float,
        nargs=4,
        default=[3, 20, 40, 10],
        metavar=("CYCLES", "CALM_S", "KILLED_S", "EVERY_S"),
        help="of `throughput`: seconds undisturbed, then with a kill every so often, so many times",
    )
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    from recipes.digits import DigitsTrainer

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and ends what it has started
    bench = Bench(arguments)
    np.savez(bench.data, **DigitsTrainer().dataset())
    rounds = range(arguments.first_round, arguments.first_round + arguments.rounds)
    if arguments.part == "all":
        for size in SIZES:
            arguments.size = size
            for round_ in rounds:
                bench.overhead(round_)
        for round_ in rounds:
            bench.kills(round_)
        bench.throughput(0)
    elif arguments.part != "none":
        for round_ in rounds:
            getattr(bench, arguments.part)(round_)
    print_tables(bench.results)


if __name__ == "__main__":
    main()
