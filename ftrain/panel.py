"""A RunNow for a terminal: a panel of rich for 80 columns and more, and one plain line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from ftrain.run_now import RunNow, WorkerNow

ROWS = 16  # workers shown; of more, those in trouble first
LOSSES = 3  # parts of the lost time that are named
COLOURS = {
    "training": "green",
    "finished": "green",
    "ended": "green",
    "stuck": "red",
    "down": "red",
    "dead": "red",
    "quarantined": "red",
}
QUIET = ("training", "ended")


def panel(now: RunNow) -> RenderableType:
    """The run as some lines and a table of its workers."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 2), expand=False)
    head.add_row(
        Text(now.state, style=f"bold {_colour(now.state)}"),
        f"step {_of(now)}",
        ProgressBar(
            total=now.target or 1,
            completed=now.step,
            width=20,
            complete_style=_colour(now.state),
            finished_style="green",
        ),
        *([f"{clock(now.eta_s)} left"] if now.eta_s is not None else []),
    )
    lines: list[Any] = [head, Text("  ".join(_facts(now)), overflow="ellipsis", no_wrap=True)]
    if lost := losses(now):
        lines.append(Text(f"lost to  {lost}", style="dim", overflow="ellipsis", no_wrap=True))
    if now.reason:
        code = f"exit code {now.exit_code}: " if now.exit_code is not None else ""
        lines.append(Text(code + now.reason.splitlines()[0], overflow="ellipsis", no_wrap=True))
    if now.workers:
        lines.append(_workers(now))
    return Group(*lines)


def _facts(now: RunNow) -> list[str]:
    facts = []
    if now.loss is not None:
        facts.append(f"loss {now.loss:.4g}")
    if now.samples_per_s:
        facts.append(f"{now.samples_per_s:,.0f} samples/s")
    facts.append(f"goodput {now.goodput:.1%}")
    if now.checkpoint is not None:
        facts.append(f"saved {now.checkpoint:,} ({ago(now.t - now.checkpoint_t)})")
    if now.deaths:
        facts.append(f"{now.deaths} death{'s' * (now.deaths > 1)}")
    return facts


def _workers(now: RunNow) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("worker", justify="right", width=6)
    table.add_column("state", width=11)
    table.add_column("life", justify="right", width=4)
    table.add_column("phase", width=14, no_wrap=True)
    table.add_column("last fault")  # the one that gives way; its texts are cut, not wrapped
    shown = sorted(now.workers, key=lambda w: w.state in QUIET)[:ROWS]
    for w in sorted(shown, key=lambda w: w.worker):
        table.add_row(
            str(w.worker),
            Text(w.state, style=_colour(w.state)),
            str(w.incarnation) if w.incarnation >= 0 else "",
            _phase(w),
            Text(_fault(w, now.t), style="dim", no_wrap=True, overflow="ellipsis"),
        )
    if more := len(now.workers) - len(shown):
        table.add_row("", Text(f"and {more} more", style="dim"), "", "", "")
    return table


def _phase(w: WorkerNow) -> str:
    return f"{w.phase} {w.phase_s:.0f} s" if w.phase_s >= 1.0 else w.phase


def _fault(w: WorkerNow, t: float) -> str:
    return f"{ago(t - w.fault_t)}: {w.fault}" if w.fault_t is not None else ""


def _colour(state: str) -> str:
    return COLOURS.get(state, "yellow")


def _of(now: RunNow) -> str:
    return f"{now.step:,}" if now.target is None else f"{now.step:,} / {now.target:,}"


def losses(now: RunNow) -> str:
    """What took most of the time that was not committed compute, in words."""
    taken = sorted(((s, p) for p, s in now.parts.items() if p != "train"), reverse=True)
    named = [f"{part} {s / now.wall_s:.1%}" for s, part in taken if s > 0.001 * now.wall_s]
    return "   ".join(named[:LOSSES])


def one_line(now: RunNow) -> str:
    """For a log: step, loss, speed, time left, who trains, what is saved."""
    parts = [f"step {now.step}/{now.target}" if now.target else f"step {now.step}"]
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4g}")
    if now.samples_per_s:
        parts.append(f"{now.samples_per_s:,.0f} samples/s")
    if now.eta_s is not None:
        parts.append(f"{clock(now.eta_s)} left")
    training = [str(w.worker) for w in now.workers if w.state == "training"]
    parts.append(f"workers {' '.join(training) or 'none'}")
    if now.checkpoint is not None:
        parts.append(f"saved {now.checkpoint}")
    return "  ".join(parts)


def full_text(now: RunNow) -> str:
    """The panel as plain text, for `--once` and where no terminal is; COLUMNS wide, or 80."""
    from rich.console import Console

    width = int(os.environ.get("COLUMNS", "80"))
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(panel(now))
    return captured.get()


def clock(seconds: float) -> str:
    """A duration as 0:07, 12:30 or 3:02:10."""
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def ago(seconds: float) -> str:
    """How long something is past, in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
