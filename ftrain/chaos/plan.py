"""What is injected when: read from a file, drawn from a seed, and written down as it was.

    seed: 7                    # only to say where a drawn plan came from
    for: 5m                    # then it heals, waits and stops the run; without: to the run's end
    faults:
      - {at: 12s, fault: kill, worker: 2}
      - {at: 12s, fault: kill, worker: 3}              # at the same time: both at once
      - {at_step: 120, fault: exception, worker: 0, place: gradient}
      - {at: 20s, fault: kill, worker: coordinator}
      - {at: 31.5s, fault: partition, worker: 1, from: 2, for: 4s}

`at` counts from the run's first committed step, so that every fault finds something to break.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ftrain.errors import ConfigError
from ftrain.yaml_lines import Document, dump_yaml, read_document, show

COORDINATOR = "coordinator"
Victim = int | str | None

# What a worker may be ordered to commit, and the phases in which it does.
PLACES = {
    "exception": ("gradient", "update"),
    "memory": ("gradient", "update"),
    "device_memory": ("gradient", "update"),
    "exit": ("gradient", "update"),
    "segfault": ("gradient", "update"),
    "abort": ("gradient", "update"),
    "spin": ("gradient", "update"),
    "attempt": ("gradient", "reduce", "update"),
    "bit_flip": ("data",),
}
# Whom each kind can hit: any worker, the coordinator too, or nobody that is drawn.
OF_WORKERS = ("slow", "partition", *PLACES)
OF_ANYBODY = ("kill", "stop")
OF_ONE = ("coordinator", "supervisor", "torn_checkpoint", "full_disk")
LASTING = ("stop", "slow", "partition", "full_disk")
KINDS = (*OF_ANYBODY, *OF_WORKERS, *OF_ONE)
DRAWN = (*KINDS, "several")  # what --faults may name
DEFAULT = (
    "kill",
    "stop",
    "slow",
    "exception",
    "memory",
    "bit_flip",
    "coordinator",
    "supervisor",
    "partition",
    "torn_checkpoint",
    "full_disk",
    "several",
)
AT_ONCE = ("kill", "stop", "exception")  # what `several` is made of
TOLD = ("step", "pid", "outcome", "t")  # in a plan that was written down; not read back


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
      kind: one of `KINDS`.
      at_s: seconds after the first committed step, or None and
      at_step: as soon as this step is committed.
      worker: whom it hits: a worker's id, "coordinator", or None where the kind says it.
      place: the phase in which a worker commits an ordered fault.
      peer: of a partition: a worker's id, "coordinator", or None for everybody.
      for_s: until it is healed; None for a stop that lasts until the worker is replaced.
    """

    kind: str
    at_s: float | None = None
    at_step: int | None = None
    worker: Victim = None
    place: str = ""
    peer: Victim = None
    for_s: float | None = None

    def fields(self) -> dict[str, Any]:
        """As a plan's file has it."""
        row: dict[str, Any] = {}
        if self.at_s is not None:
            row["at"] = f"{self.at_s:.3f}s"
        if self.at_step is not None:
            row["at_step"] = self.at_step
        row["fault"] = self.kind
        given = {"worker": self.worker, "place": self.place, "from": self.peer}
        row |= {k: v for k, v in given.items() if v not in (None, "")}
        if self.for_s is not None:
            row["for"] = f"{self.for_s:.3f}s"
        return row

    def text(self) -> str:
        """In words, for the screen."""
        name = self.kind.replace("_", " ")
        whom = f"worker {self.worker}" if isinstance(self.worker, int) else self.worker or ""
        if self.kind == "partition":
            far = f"worker {self.peer}" if isinstance(self.peer, int) else self.peer or "everybody"
            whom += f" from {far}"
        where = f" in {self.place}" if self.place else ""
        lasts = f" for {self.for_s:.1f} s" if self.for_s is not None else ""
        return f"{name} {whom}".rstrip() + where + lasts


class Plan(NamedTuple):
    """Faults, and how long the run is kept on.

    Attributes:
      timed: those with `at_s`, in that order; may be endless.
      stepped: those with `at_step`.
      for_s: from the first committed step to the last fault, or None: to the run's own end.
      seed: what they were drawn from, or None.
    """

    timed: Iterator[Fault]
    stepped: list[Fault]
    for_s: float | None
    seed: int | None = None


def seconds(text: Any) -> float:
    """A duration: `10s`, `1.5m`, `2h`, `300ms`, or a number of seconds.

    Raises:
      ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(ms|s|m|h|)", str(text))
    if not found or isinstance(text, bool):
        raise ValueError(f"{show(text)} is not a duration such as 10s, 1.5m or 2h")
    return float(found[1]) * {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600}[found[2]]


def drawn(
    seed: int, kinds: Sequence[str], every_s: float, workers: int, lasts_s: float
) -> Iterator[Fault]:
    """Endless faults, the same for the same arguments.

    Between two there are `every_s` on average, half of it at least. Every worker, 0 included, is
    as likely as any other, and so is the coordinator where a kind can hit it.

    Args:
      seed: what everything is drawn from.
      kinds: names of `DRAWN`, each as likely.
      every_s: mean seconds from one to the next.
      workers: how many there are.
      lasts_s: longest that a fault which is healed lasts; the shortest is a fifth of it.
    """
    draw, at_s = random.Random(seed), 0.0
    while True:
        at_s += every_s * draw.uniform(0.5, 1.5)
        kind = draw.choice(kinds)
        if kind == "several":
            hit = draw.sample(range(workers), draw.randint(min(2, workers), workers))
            for worker in hit:
                yield _one(draw, draw.choice(AT_ONCE), at_s, worker, workers, lasts_s)
        else:
            anybody = [*range(workers), *([COORDINATOR] if kind in OF_ANYBODY else [])]
            victim = None if kind in OF_ONE else draw.choice(anybody)
            yield _one(draw, kind, at_s, victim, workers, lasts_s)


def _one(
    draw: random.Random, kind: str, at_s: float, victim: Victim, workers: int, lasts_s: float
) -> Fault:
    peers = [None, COORDINATOR, *(w for w in range(workers) if w != victim)]
    return Fault(
        kind,
        round(at_s, 3),
        worker=victim,
        place=draw.choice(PLACES[kind]) if kind in PLACES else "",
        peer=draw.choice(peers) if kind == "partition" else None,
        for_s=round(draw.uniform(0.2, 1) * lasts_s, 3) if kind in LASTING[1:] else None,
    )


def read_plan(path: str, workers: int) -> Plan:
    """A plan's file, for a run of so many workers.

    Raises:
      ConfigError: a line for each problem, with the file's line.
    """
    try:
        document = read_document(Path(path).read_text(), path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a plan") from None
    values = document.values
    for key in set(values) - {"seed", "for", "faults", "run"}:
        document.refuse((key,), "unknown key; known are seed, for, faults")
    for_s = _duration(document, ("for",), values.get("for"))
    rows = values.get("faults")
    if not isinstance(rows, list) or not rows:
        document.refuse(("faults",), "is required: a list of {at: 12s, fault: kill, worker: 2}")
        rows = []
    faults = [_fault(document, i, row, workers) for i, row in enumerate(rows)]
    if document.problems:
        raise ConfigError(*(message for _, message in sorted(document.problems)))
    timed = sorted((f for f in faults if f.at_s is not None), key=lambda f: f.at_s)
    stepped = [f for f in faults if f.at_s is None]
    return Plan(iter(timed), stepped, for_s, values.get("seed"))


def _duration(document: Document, path: tuple[Any, ...], value: Any) -> float | None:
    if value is None:
        return None
    try:
        return seconds(value)
    except ValueError as error:
        document.refuse(path, str(error))
        return 0.0


def _fault(document: Document, i: int, row: Any, workers: int) -> Fault:
    at = ("faults", i)
    if not isinstance(row, dict):
        document.refuse(at, f"{show(row)} is not {{at: 12s, fault: kill, worker: 2}}")
        return Fault("")

    def refuse(key: str, message: str) -> None:
        document.refuse((*at, key) if key in row else at, message)

    for key in row.keys() - {"at", "at_step", "fault", "worker", "place", "from", "for", *TOLD}:
        refuse(key, "unknown key; known are at, at_step, fault, worker, place, from, for")
    kind, worker, place, peer = (row.get(key) for key in ("fault", "worker", "place", "from"))
    if kind not in KINDS:
        refuse("fault", f"{show(kind)} is not one of {', '.join(KINDS)}")
    if ("at" in row) == ("at_step" in row):
        refuse("at", "one of at (a duration) and at_step (a step) says when")
    step = row.get("at_step")
    if step is not None and (type(step) is not int or step < 1):
        refuse("at_step", f"{show(step)} is not an integer >= 1")
    if kind in OF_ONE and worker is not None:
        refuse("worker", f"{kind} hits no worker; leave it out")
    elif kind in (*OF_ANYBODY, *OF_WORKERS) and not _is_victim(worker, kind, workers):
        rule = f"a worker from 0 to {workers - 1}" + (
            " or coordinator" if kind in OF_ANYBODY else ""
        )
        refuse("worker", f"{show(worker)} is not {rule}")
    if place is not None and place not in PLACES.get(kind, ()):
        refuse("place", f"{show(place)} is not one of {', '.join(PLACES.get(kind, ('no place',)))}")
    if (
        kind == "partition"
        and peer is not None
        and (peer == worker or not _is_victim(peer, "kill", workers))
    ):
        refuse("from", f"{show(peer)} is not another worker or coordinator")
    for_s = _duration(document, (*at, "for"), row.get("for"))
    if for_s is None and kind in LASTING[1:]:
        refuse("for", f"{kind} needs `for`, how long it lasts")
    if for_s is not None and kind in KINDS and kind not in LASTING:
        refuse("for", f"{kind} is over at once; leave it out")
    default = PLACES[kind][0] if kind in PLACES else ""
    at_s = _duration(document, (*at, "at"), row.get("at"))
    return Fault(str(kind), at_s, step, worker, place or default, peer, for_s)


def _is_victim(worker: Any, kind: str, workers: int) -> bool:
    if worker == COORDINATOR:
        return kind in OF_ANYBODY
    return type(worker) is int and 0 <= worker < workers


def write_plan(path: str | Path, rows: Sequence[dict[str, Any]], **head: Any) -> None:
    """Writes down what was injected: `Fault.fields` and what is told of each; `read_plan` reads it.

    Args:
      path: the file, replaced whole.
      rows: one a fault.
      head: what else stands at the top; None is left out.
    """
    part = Path(f"{path}.part")
    top = {key: value for key, value in head.items() if value is not None}
    part.write_text(dump_yaml({**top, "faults": list(rows)}))
    part.rename(path)
