"""`python -m tests.protocol SEED [rule=off ...]` or `--sweep N`: see the package's docstring."""

import argparse
from dataclasses import fields

from .rules import Rules, Setting
from .variants import AS_DESIGNED, LEFT_OUT, Sweep, sweep
from .world import World

COUNTED = ("commits", "aborts", "kills", "reregistrations", "ghosts", "settle_failures", "hangs")


def rule_named(text: str) -> str:
    """The rule meant by `r1_commit=off`: any part of a name that only one rule has."""
    part, _, value = text.partition("=")
    names = [field.name for field in fields(Rules)]
    meant = [name for name in names if part == name] or [name for name in names if part in name]
    if len(meant) != 1 or value != "off":
        raise SystemExit(f"{text}: want RULE=off with one of: {' '.join(meant or names)}")
    return meant[0]


def print_transcript(seed: int, without: list[str], setting: Setting) -> int:
    world = World(seed, Rules(**dict.fromkeys(without, False)), setting, trace=True)
    verdict = world.run()
    print(
        f"seed {seed}: {world.workers} workers, {world.style}, min_workers {world.min_workers}, "
        f"settle deadline {world.settle_deadline}, speeds {world.speed}; "
        f"without: {', '.join(without) or 'nothing'}"
    )
    print("\n".join(world.transcript))
    print(verdict.caught or "no violation, no stall", "|", verdict.violation or "")
    print(" ".join(f"{key}={value}" for key, value in sorted(verdict.count.items())))
    return 1 if verdict.caught else 0


def print_row(label: str, result: Sweep) -> None:
    caught = sum(result.caught.values()) - result.caught["STALL"] - result.caught["DEADLOCK"]
    kinds = ", ".join(f"{kind} {n}" for kind, n in result.caught.most_common())
    first = min(result.first.values(), default="-")
    print(
        f"{label:52} {result.schedules:5} {caught:5} {result.caught['STALL']:5} "
        f"{result.caught['DEADLOCK']:5} {first:>5}  {kinds}",
        flush=True,
    )


def print_table(n: int) -> None:
    print(f"{'':52} {'runs':>5} {'viol.':>5} {'stall':>5} {'dead.':>5} {'first':>5}  kinds")
    for label, setting in AS_DESIGNED.items():
        result = sweep(range(n), setting)
        print_row(label, result)
        print(" " * 4 + " ".join(f"{key}={result.count[key]}" for key in COUNTED))
    for variant in LEFT_OUT:
        print_row("- " + " - ".join(variant.without), sweep(range(n), *variant[2:0:-1]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol")
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("rules", nargs="*", metavar="RULE=off")
    parser.add_argument("--sweep", type=int, metavar="N", help="N seeds of every variant")
    parser.add_argument("--steps", type=int, help="the run ends there")
    parser.add_argument("--stop", action="store_true", help="SIGTERM some time")
    parser.add_argument("--style", choices=["cpu", "gpu"])
    parser.add_argument("--min-workers", type=int)
    args = parser.parse_args()
    if args.sweep is not None:
        print_table(args.sweep)
        return 0
    if args.seed is None:
        parser.error("want SEED or --sweep N")
    setting = Setting(
        steps=args.steps,
        stop_request=args.stop,
        style=args.style,
        min_workers=args.min_workers,
    )
    return print_transcript(args.seed, [rule_named(text) for text in args.rules], setting)


if __name__ == "__main__":
    raise SystemExit(main())
