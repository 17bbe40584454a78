"""What it takes to be the head of a run over several hosts: an open door, and a lease. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

from ftrain.errors import AddressError, RunInUseError
from ftrain.lease import Lease, Seen, read_lease
from ftrain.meeting_point import MeetingPoint
from ftrain.memory_tier import Part
from ftrain.run_lock import RunLock, put_nameplate
from ftrain.succession import find_head

TOPOLOGY = "topology"  # in the folder of the lease: what JAX knows of all workers' devices


@dataclasses.dataclass
class Headship:
    """A head that may begin.

    Attributes:
      lock: of this host.
      meeting: where agents call; None for a run on one host.
      lease: None where the run directory's file system has no links: nobody can take over then.
      after: the head that was lost, if this one takes over from it.
      silent_s: how long it had not been heard of.
      commits: that were reported on this host and may not be in the records.
    """

    lock: RunLock
    meeting: MeetingPoint | None
    lease: Lease | None
    after: Seen | None = None
    silent_s: float = 0.0
    commits: list[tuple[int, dict[str, Any]]] = dataclasses.field(default_factory=list)

    @property
    def rank(self) -> int:
        """This host's."""
        return self.meeting.rank if self.meeting else 0

    @property
    def part(self) -> Part | None:
        """Whose snapshots are this host's."""
        return self.lease and Part(self.rank, self.lease.claim.generation)

    @contextlib.contextmanager
    def fenced(self) -> Iterator[str | None]:
        """Within, the run's files are made in the folder that it gives, and renamed.

        Raises:
          DeposedError: another host has become the head.
        """
        if self.lease is None:
            yield None
        else:
            with self.lease.fenced():
                yield self.lease.staging

    def generation(self) -> dict[str, int]:
        """As `run_started` has it."""
        return {"generation": self.lease.claim.generation} if self.lease else {}

    def taken_over(self) -> dict[str, Any]:
        """As `head_taken_over` has it."""
        claim = self.lease.claim
        return {
            "host": self.rank,
            "name": claim.name,
            "was": self.after.claim.rank,
            "generation": claim.generation,
            "seconds": round(self.silent_s, 3),
        }

    def topology(self) -> str:
        """The file with what JAX has to know of workers that are away; "" without a lease."""
        if self.lease is None:
            return ""
        return os.path.join(os.path.dirname(self.lease.staging), TOPOLOGY)


def take_lease(
    run_dir: str, generation: int, rank: int, address: str, lock: RunLock
) -> Lease | None:
    """Takes a generation; the run directory's lock says so too. None if another host has it.

    Raises:
      OSError: the run directory cannot be written to, or has no links.
    """
    lease = Lease.take(
        run_dir,
        generation,
        rank=rank,
        name=socket.gethostname(),
        address=address,
        lock=lock.identity(),
    )
    if lease is not None and address:
        with lease.fenced():
            put_nameplate(run_dir, lease.staging)
    return lease


def try_to_follow(
    run_dir: str,
    generation: int,
    open_door: Callable[[], MeetingPoint],
    lock: RunLock,
) -> Headship | None:
    """Becomes the head, if nobody else does and this host can."""
    with contextlib.suppress(AddressError, OSError):
        meeting = open_door()
        lease = take_lease(run_dir, generation, meeting.rank, str(meeting.endpoint), lock)
        if lease is not None:
            return Headship(lock, meeting, lease)
        meeting.listener.close()
    return None


def begin_as_head(
    run_dir: str,
    meeting: MeetingPoint | None,
    lock: RunLock,
    patience_s: float,
    say: Callable[[str], None] = lambda line: None,
) -> Headship | Seen:
    """Becomes the head if no other lives; else tells which does.

    Args:
      run_dir: the run's folder.
      meeting: the open door; None for a run on one host.
      lock: of this host.
      patience_s: how long a head may be silent.
      say: told if that takes long.

    Raises:
      RunInUseError: a run without a lease is in that folder.
      OSError: the folder cannot be written to, or has no links.
    """
    if meeting is not None and read_lease(run_dir) is None:
        os.close(RunLock(run_dir).fileno())
    tried = 0
    while True:
        seen = find_head(run_dir, lock.identity(), patience_s, say)
        if seen is not None:
            return seen
        newest = read_lease(run_dir)
        # One that was taken by who was never heard of since is passed over, in another round.
        generation = max(tried, newest.claim.generation if newest else 0) + 1
        rank, address = (meeting.rank, str(meeting.endpoint)) if meeting else (0, "")
        lease = take_lease(run_dir, generation, rank, address, lock)
        if lease is not None:
            return Headship(lock, meeting, lease)
        tried = generation


def single_host(run_dir: str, patience_s: float) -> Headship:
    """The head of a run on one host, which needs a lease only where there has been one.

    Raises:
      RunInUseError: another run, on whatever host, is in that folder.
    """
    lock = RunLock(run_dir)
    if read_lease(run_dir) is None:
        return Headship(lock, None, None)
    found = begin_as_head(run_dir, None, lock, patience_s)
    if isinstance(found, Seen):
        raise RunInUseError(run_dir, None)
    return found
