"""The results as tables: median, smallest and largest of what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

# A side's own plain loop.
BASELINES = (
    ("ftrain", "jax plain"),
    ("ftrain, 4 shards", "jax plain"),
    ("torchft as documented", "torch ddp"),
    ("torchft as documented", "torch plain"),
)
KILL_ROWS = {
    "kill_to_commit_s": "SIGKILL to the survivors' next commit, s",
    "kill_to_back_s": "SIGKILL to the worker's first commit after it, s",
    "restart_to_commit_s": "restart of its process to that commit, s",
    "longest_step_at_join_s": "survivors' longest step about its return, s",
    "restart_cpu_s": "CPU-seconds of its restart",
}


def spread(values: Iterable[float], digits: int = 2) -> str:
    found = sorted(values)
    middle, least, most = statistics.median(found), found[0], found[-1]
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def print_tables(results: dict[str, list]) -> None:
    for part in (overhead, kills, throughput):
        if text := part(results[part.__name__]):
            print(text)


def overhead(rounds: list[dict]) -> str:
    """Of each size: the steps, and what a side costs beside its own baseline, round by round."""
    rows = []
    for size in dict.fromkeys(r["size"] for r in rounds):
        found = [r["ms"] for r in rounds if r["size"] == size]
        for name in dict.fromkeys(name for r in found for name in r):
            steps = [r[name] for r in found if name in r]
            rows.append([size, name, str(len(steps)), spread(steps, 1), "", ""])
        for side, baseline in BASELINES:
            pairs = [(r[side], r[baseline]) for r in found if side in r and baseline in r]
            if not pairs:
                continue
            rows.append(
                [
                    size,
                    f"{side} over {baseline}",
                    str(len(pairs)),
                    "",
                    spread((ours - plain for ours, plain in pairs), 1),
                    spread((100 * (ours / plain - 1) for ours, plain in pairs), 0),
                ]
            )
    return table(["size", "", "rounds", "step, ms", "more, ms", "more, %"], rows) if rows else ""


def kills(rounds: list[dict]) -> str:
    found: dict[str, list[dict]] = {}
    for r in rounds:
        found.setdefault(r["side"], []).extend(r["kills"])
    if not found:
        return ""
    rows = [["kills", *(str(len(k)) for k in found.values())]]
    for key, what in KILL_ROWS.items():
        rows.append([what, *(spread(k[key] for k in one) for one in found.values())])
    return table(["", *found], rows)


def throughput(rounds: list[dict]) -> str:
    sides: dict[str, list[dict]] = {}
    for r in rounds:
        sides.setdefault(r["side"], []).append(r)
    if not sides:
        return ""

    def row(what: str, cell: Callable[[list[dict]], str]) -> list[str]:
        return [what, *map(cell, sides.values())]

    def of_all(name: str) -> Callable[[list[dict]], str]:
        return lambda runs: spread((value for r in runs for value in r[name]), 0)

    def of_runs(name: str) -> Callable[[list[dict]], str]:
        return lambda runs: ", ".join(f"{r.get(name, 0):,.0f}" for r in runs)

    rows = [
        row("samples/s undisturbed", of_all("calm")),
        row("samples/s with kills", of_all("killed")),
        row("kept, %", kept),
        row("deaths", of_runs("deaths")),
        row("a sample was used", lambda runs: ", ".join(map(uses, runs))),
        row("samples read and not used", of_runs("read_and_dropped")),
        row("peak memory of a worker, MB", of_runs("peak_mb")),
        row("memory of all processes, MB", of_runs("total_mb")),
    ]
    return table(["", *sides], rows)


def kept(runs: list[dict]) -> str:
    pairs = [pair for r in runs for pair in zip(r["calm"], r["killed"], strict=True)]
    return spread((100 * killed / calm for calm, killed in pairs), 0)


def uses(run: dict) -> str:
    if "verified" in run:
        return "once an epoch" if run["verified"] else "see `ftrain verify`"
    return f"{run['uses_least']} to {run['uses_most']} times"
