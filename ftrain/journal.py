"""What workers of a host have reported and the head may not have: an agent keeps it. Pure."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

KEPT = 20_000  # records; some 10 MB


class Entry(NamedTuple):
    """A record, by the head's number of the child, and the worker that it was then."""

    seq: int
    child: int
    worker: int
    line: str


class Journal:
    """Records in order, each with a number that only grows."""

    def __init__(self) -> None:
        self._entries: collections.deque[Entry] = collections.deque(maxlen=KEPT)
        self._seq = 0

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    def add(self, child: int, worker: int, line: str) -> Entry:
        """Takes a record in."""
        self._seq += 1
        entry = Entry(self._seq, child, worker, line)
        self._entries.append(entry)
        return entry

    def forget(self, taken: int) -> None:
        """The head has all up to that number."""
        while self._entries and self._entries[0].seq <= taken:
            self._entries.popleft()

    def clear(self) -> None:
        """Another head counts children anew: what is of an earlier one would be taken for its."""
        self._entries.clear()

    def commits(self, children: set[int]) -> list[tuple[int, dict[str, Any]]]:
        """(worker, record) of the commits of those children, of the newest history alone."""
        entries = [e for e in self._entries if e.child in children]
        found = [(e.worker, json.loads(e.line)) for e in entries]
        commits = [(w, r) for w, r in found if r["record"] == "commit"]
        newest = max((r["lineage"] for _, r in commits), default=0)
        return [(w, r) for w, r in commits if r["lineage"] == newest]
