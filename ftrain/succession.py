"""Who is head now, and whether this host is to take its place: one host's view of the lease.

The lease is looked at once a second. No clock of another host is used: a head counts as silent for
as long as what it writes there has not changed, by this host's own clock. No jax.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from ftrain.lease import OVER, RENEW_EVERY_S, STOPPING, Seen, read_lease

LOOK_EVERY_S = 1.0
MISSED_S = 10.0  # without a look, longer than a call takes: what happened meanwhile is not known
STAGGER_S = 1.0  # by which a host waits longer for each that comes before it
POLL_S = 0.1


class Watch:
    """What the lease says, and for how long it has said so.

    Attributes:
      seen: the newest; None where there is no lease.
    """

    def __init__(self, run_dir: str):
        self._run_dir = run_dir
        self.seen: Seen | None = None
        self._since = self._looked_at = float("-inf")

    def look(self, now: float, *, at_once: bool = False) -> None:
        """Reads the lease, if it is time. One that cannot be read says nothing about its head."""
        if now < self._looked_at + LOOK_EVERY_S and not at_once:
            return
        late, self._looked_at = now > self._looked_at + MISSED_S, now
        try:
            seen = read_lease(self._run_dir)
        except (OSError, ValueError):
            self._since = now
            return
        if late or seen != self.seen:
            self._since = now
        self.seen = seen

    def silent_s(self, now: float) -> float:
        """How long it has not changed, as far as this host has seen."""
        return now - self._since


class Succession:
    """An agent's part: which head to obey, and when to follow it.

    Args:
      run_dir: shared by all hosts, or not: then nobody takes over.
      rank: this host's.
      patience_s: how long a head may be silent.

    Attributes:
      generation: the newest that this host knows of; it obeys no other.
      shared: whether the head that it obeyed last writes its lease where this host reads it.
    """

    def __init__(self, run_dir: str, rank: int, patience_s: float):
        self._watch = Watch(run_dir)
        self._rank, self._patience_s = rank, patience_s
        self.generation = 0
        self.shared = False
        self._hosts: Sequence[int] = ()
        self._holder = ""
        self._taken: dict[int, float] = {}  # generations whose holders are yet to be heard of

    @property
    def seen(self) -> Seen | None:
        """What the lease says."""
        return self._watch.seen

    def look(self, now: float, *, at_once: bool = False) -> bool:
        """Looks at the lease, if it is time; returns whether there is a newer head."""
        self._watch.look(now, at_once=at_once)
        newest = self.seen.claim.generation if self.seen else 0
        if newest <= self.generation:
            return False
        self.generation, self._taken = newest, {}
        return True

    def address(self) -> str:
        """Where the newest head is called, if it is not where the user said; else ""."""
        if self.seen is None or self.seen.state == OVER or self.seen.claim.rank == 0:
            return ""
        return self.seen.claim.address

    def obey(self, generation: int, holder: str, now: float) -> bool:
        """Whether a head that calls itself of that generation may be obeyed."""
        self.look(now, at_once=True)
        if generation < self.generation:
            return False
        self.generation, self._holder = generation, holder
        self.shared = bool(holder) and self.seen is not None and self.seen.claim.holder == holder
        return True

    def take_hosts(self, hosts: Sequence[int]) -> None:
        """Hears from the head which ranks are there beside it."""
        self._hosts = hosts

    def verdict(self) -> Seen | None:
        """How the run of the head that was obeyed has ended, or that it was stopping; else None."""
        seen = self.seen
        if not self.shared or seen is None or seen.claim.holder != self._holder:
            return None
        return seen if seen.state in (OVER, STOPPING) else None

    def due(self, now: float) -> int | None:
        """The generation to take, now that the head is lost; None if it is not this host's turn.

        The lowest rank goes first. Who takes one and is never heard of is followed in turn.
        """
        if not self.shared or self.seen is None or self.seen.state != "held":
            return None
        before = sum(r < self._rank for r in self._hosts if r != self.seen.claim.rank)
        wait_s = self._patience_s + STAGGER_S * before
        if self._watch.silent_s(now) < wait_s:
            return None
        generation = self.seen.claim.generation + 1
        while generation in self._taken:
            if now < self._taken[generation] + wait_s:
                return None
            generation += 1
        return generation

    def lost_race(self, generation: int, now: float) -> None:
        """Another host has that generation."""
        self._taken[generation] = now

    def silent_s(self, now: float) -> float:
        """How long the head has not been heard of."""
        return self._watch.silent_s(now)


def find_head(
    run_dir: str, lock: str, patience_s: float, say: Callable[[str], None] = lambda line: None
) -> Seen | None:
    """The head of a run that lives, before anything is started; None if none does.

    Args:
      run_dir: the run's folder.
      lock: which lock this process holds: a head that held it has ended.
      patience_s: how long a head may be silent.
      say: told if that takes long.
    """
    watch, began, told = Watch(run_dir), time.monotonic(), False
    watch.look(began)
    first = watch.seen
    while (seen := watch.seen) is not None and seen.state != OVER and seen.claim.lock != lock:
        now = time.monotonic()
        if seen != first:
            return seen
        if now > began + patience_s:
            return None
        if not told and now > began + 2 * RENEW_EVERY_S:
            told = True
            say(
                f"waiting up to {patience_s:g} s for a sign of life of host {seen.claim.rank} "
                f"({seen.claim.name}), the last head of this run"
            )
        time.sleep(POLL_S)
        watch.look(now)
    return None


def await_newer(run_dir: str, generation: int, timeout_s: float) -> bool:
    """Waits until a head of a later generation has written its lease; whether one has."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            seen = read_lease(run_dir)
            if seen is not None and seen.claim.generation > generation:
                return True
        time.sleep(POLL_S)
    return False
