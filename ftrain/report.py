"""`ftrain report RUN_DIR`: a run as one HTML file that opens offline. Never jax.

Here the records become the numbers that the page shows; `report.html` draws them, and asks nobody
else for anything. Times are seconds since the run's start. Series are cut to what a screen can
show, so that a run of a million steps is a file of the same size.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from ftrain.errors import ConfigError
from ftrain.goodput import PARTS, breakdown
from ftrain.lanes import lanes
from ftrain.records import Commit, Records, read_records
from ftrain.recoveries import Recovery, recoveries
from ftrain.run_lock import running_supervisor
from ftrain.verify import RULES, judge

POINTS = 600  # of a series
SPANS = 3000  # of all lanes; of more, the shortest are joined to what they interrupt
ROWS = 200  # of a table
TEMPLATE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "report.html")
DATA = "__DATA__"
TITLE = "__TITLE__"


def main(arguments: argparse.Namespace) -> int:
    """The command: writes the page and says where."""
    path = arguments.output or os.path.join(arguments.run_dir, "report.html")
    page = render(report(read_records(arguments.run_dir)))
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise ConfigError(
            f"-o {path}: {error.strerror}; give a file that can be written"
        ) from error
    sys.stdout.write(f"{path}\n")
    return 0


def render(data: dict[str, Any]) -> str:
    """The page for what `report` gave."""
    with open(TEMPLATE, encoding="utf-8") as file:
        page = file.read()
    # No text of a run may end the script that it stands in.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.replace(TITLE, html.escape(data["name"])).replace(DATA, text)


def report(records: Records) -> dict[str, Any]:
    """All that the page shows, as plain JSON."""
    live = records.sessions[-1].finished is None and running_supervisor(records.run_dir) is not None
    now = time.time() if live else None
    start = records.sessions[0].started
    found = breakdown(records, now)
    deaths = [r for session in records.sessions for r in recoveries(session)]
    return {
        "name": os.path.basename(os.path.abspath(records.run_dir)),
        "began": start,
        "facts": _facts(records, live),
        "wall_s": found.wall_s,
        "goodput": found.goodput,
        "goodput_running": found.goodput_running,
        "parts": [[part, s, PARTS[part]] for part, s in found.parts.items() if s > 0],
        "loss": _loss(records.commits, start),
        "rate": _rate(records, start),
        "evals": _evals(records, start),
        "lanes": _lanes(records, start, now),
        "sessions": [[s.started - start, s.last_t - start] for s in records.sessions],
        "faults": [_fault(r, start) for r in deaths[:POINTS]],
        "recoveries": [_recovery(r, start) for r in deaths[:ROWS]],
        "recovery_summary": _summary(deaths),
        "checkpoints": _checkpoints(records, start),
        "verdict": _verdict(records),
    }


def _facts(records: Records, live: bool) -> dict[str, Any]:
    config, last = records.config, records.sessions[-1]
    newest = records.history[-1] if records.history else None
    target = next((e for s in reversed(records.sessions) for e in s.named("target_known")), None)
    end = last.finished
    return {
        "trainer": config["trainer"],
        "workers": config["cluster"]["workers"],
        "batch_size": config["batch_size"],
        "reduction": config.get("reduction", "fast"),
        "step": newest.step if newest else 0,
        "target": target["steps"] if target else None,
        "samples": newest.samples if newest else 0,
        "loss": newest.loss if newest else None,
        "sessions": len(records.sessions),
        "live": live,
        "exit_code": end["exit_code"] if end else None,
        "reason": (end["reason"].splitlines() or [""])[0] if end else "",
    }


def _loss(commits: Sequence[Commit], start: float) -> list[list[float | None]]:
    """[t, step, mean, least, most] of each bucket of commits; None where no loss was finite."""
    points = []
    for bucket in _buckets(commits):
        losses = [c.loss for c in bucket if c.loss is not None]
        shown = [statistics.fmean(losses), min(losses), max(losses)] if losses else [None] * 3
        points.append([_s(bucket[-1].t - start), bucket[-1].step, *map(_number, shown)])
    return points


def _rate(records: Records, start: float) -> list[list[float]]:
    """[t, samples per second] over equal times; 0 where nothing was committed."""
    commits = records.commits
    if len(commits) < 2:
        return []
    first, last = commits[0].t, commits[-1].t
    width = max((last - first) / (POINTS / 2), 1.0)
    sizes = [0.0] * (math.ceil((last - first) / width) + 1)
    for before, after in zip(commits, commits[1:], strict=False):
        taken = after.samples - before.samples
        if after.step <= before.step:  # after a rewind: a batch, as any
            taken = records.config["batch_size"]
        sizes[min(int(max(0.0, after.t - first) / width), len(sizes) - 1)] += taken
    if len(sizes) > 1:  # the last is of less than a whole width
        sizes.pop()
    return [[_s(first - start + (i + 0.5) * width), _s(n / width)] for i, n in enumerate(sizes)]


def _evals(records: Records, start: float) -> list[dict[str, Any]]:
    events = [e for e in records.events if e.name == "evaluated"]
    return [{"t": _s(e.t - start), "step": e["step"], **e["metrics"]} for e in events[-ROWS:]]


def _lanes(records: Records, start: float, now: float | None) -> dict[str, list[list[Any]]]:
    found = lanes(records, now)
    spans = sorted((s for lane in found.values() for s in lane), key=lambda s: s.end - s.start)
    least_s = spans[-SPANS].end - spans[-SPANS].start if len(spans) > SPANS else 0.0
    return {
        str(worker): [
            [_s(s.start - start), _s(s.end - start), s.state, s.incarnation, s.what]
            for s in lane
            if s.end - s.start >= least_s
        ]
        for worker, lane in found.items()
    }


def _fault(r: Recovery, start: float) -> list[Any]:
    who = "coordinator" if r.worker is None else f"worker {r.worker}"
    return [_s(r.t - start), who, r.cause]


def _recovery(r: Recovery, start: float) -> dict[str, Any]:
    return {
        "t": _s(r.t - start),
        "worker": r.worker,
        "incarnation": r.incarnation,
        "cause": r.cause,
        "stuck_s": _s(r.stuck_s) if r.stuck_s else None,
        "took_part": r.took_part,
        "survivors": list(r.survivors),
        "went_on_s": _s(r.went_on_s),
        "step": r.went_on.step if r.went_on else None,
        "back_s": _s(r.back_s),
        "bytes": r.synced["bytes"] if r.synced else None,
    }


def _summary(deaths: Sequence[Recovery]) -> dict[str, Any]:
    """Of deaths that others survived: how long they needed."""
    went_on = [r.went_on_s for r in deaths if r.survivors and r.took_part and r.went_on]
    back = [r.back_s for r in deaths if r.back_s is not None]
    return {
        "deaths": len(deaths),
        "shown": min(len(deaths), ROWS),
        "went_on": [_s(statistics.median(went_on)), _s(max(went_on))] if went_on else None,
        "back": [_s(statistics.median(back)), _s(max(back))] if back else None,
    }


def _checkpoints(records: Records, start: float) -> list[dict[str, Any]]:
    names = {"checkpoint_saved": "saved", "checkpoint_restored": "restored"}
    names |= {"checkpoint_skipped": "unreadable", "save_failed": "failed"}
    rows = [
        {
            "t": _s(e.t - start),
            "step": e["step"],
            "what": names[e.name],
            "tier": e.get("tier", ""),
            "seconds": _s(e.get("seconds")),
            "why": e.get("why") or e.get("error") or "",
        }
        for e in records.events
        if e.name in names
    ]
    return rows[-ROWS:]


def _verdict(records: Records) -> dict[str, Any]:
    verdict = judge(records)
    return {
        "ok": verdict.ok,
        "rules": [
            {
                "name": rule.name,
                "claim": rule.claim,
                "findings": [
                    [f.severity, f.message] for f in verdict.findings if f.rule == rule.name
                ][:20],
            }
            for rule in RULES
        ],
    }


def _buckets(commits: Sequence[Commit]) -> list[Sequence[Commit]]:
    size = max(1, math.ceil(len(commits) / POINTS))
    return [commits[i : i + size] for i in range(0, len(commits), size)]


def _s(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
