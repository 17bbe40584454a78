"""Who is the head: a lease in the run directory. Its generations fence one another. No jax.

    head/<generation>        a claim, made by link(2): who makes it has that generation, and nobody
                             else ever has
    head/lease               the newest head's, written anew each second
    head/staging-<holder>    what a head publishes is written here first; a checkpoint in
                             checkpoints/.staging-<holder>

A head publishes by a rename out of its staging folders alone. They are made before its claim, which
names them, and never again; whoever has a later generation removes them before it reads anything.
From then on each rename of the old head fails, whenever it comes: not a look before the write, but
the write itself. docs/hosts.md has the protocol, its assumptions and why it is safe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import shutil
import time
from typing import Any

from ftrain.errors import FtrainError
from ftrain.retention import checkpoint_folder, clean_up

FOLDER, LEASE = "head", "lease"
RENEW_EVERY_S = 1.0
HELD, STOPPING, OVER = "held", "stopping", "over"  # what a head says of its run
# What anything in a staging folder says once a file is in its place.
_GONE = (errno.ENOTDIR, errno.ENOENT, errno.ESTALE)


class DeposedError(FtrainError):
    """Raised when another host has become the head: nothing that this one writes counts."""

    def __init__(self, generation: int):
        super().__init__(
            f"another host has become the head since this one, generation {generation}, was last "
            "heard of"
        )


@dataclasses.dataclass(frozen=True)
class Claim:
    """A generation and who has it."""

    generation: int  # 1, 2, ... of this run directory
    rank: int
    name: str  # the host's own
    address: str  # HOST:PORT where agents call; "" for a run on one host
    holder: str  # random, of this life of the head
    lock: str  # which lock its processes hold, all of them, see `run_lock`

    def staging(self, run_dir: str) -> tuple[str, str]:
        """Its staging folders, for all but checkpoints and for checkpoints."""
        return (
            os.path.join(run_dir, FOLDER, f"staging-{self.holder}"),
            os.path.join(checkpoint_folder(run_dir), f".staging-{self.holder}"),
        )


@dataclasses.dataclass(frozen=True)
class Seen:
    """What `head/lease` says."""

    claim: Claim
    beat: int
    state: str  # HELD, STOPPING or OVER
    exit_code: int | None = None  # once it is over
    reason: str = ""


class Lease:
    """One generation, held. `take` gets it; only its holder writes the run's shared files."""

    def __init__(self, run_dir: str, claim: Claim):
        self.run_dir, self.claim = run_dir, claim
        self.staging, self.checkpoint_staging = claim.staging(run_dir)
        self._beat, self._renewed_at, self._state = 0, float("-inf"), HELD

    @classmethod
    def take(cls, run_dir: str, generation: int, **who: Any) -> Lease | None:
        """Takes a generation, and fences all before it; None if another host has it.

        Args:
          run_dir: the run's folder, shared by all hosts.
          generation: the number after the newest that there is.
          who: rank, name, address and lock of the claim.

        Raises:
          OSError: the folder cannot be written to, or its file system knows no links.
        """
        claim = Claim(generation=generation, holder=secrets.token_hex(8), **who)
        lease = cls(run_dir, claim)
        folders = claim.staging(run_dir)
        for folder in folders:  # before the claim: what it names is there, and made once
            os.makedirs(folder)
        try:
            if not lease._link():
                for folder in folders:
                    shutil.rmtree(folder, ignore_errors=True)
                return None
            lease._fence()
            lease.renew()
        except DeposedError:
            return None
        return lease

    def _link(self) -> bool:
        own = os.path.join(self.staging, "claim")
        _write(own, json.dumps(dataclasses.asdict(self.claim)).encode(), sync=True)
        try:
            os.link(own, _claim_path(self.run_dir, self.claim.generation))
        except FileExistsError:
            # Over NFS an answer may be lost and the call repeated: then it is our own.
            return read_claim(self.run_dir, self.claim.generation) == self.claim
        return True

    def _fence(self) -> None:
        """No earlier head can publish anything once this returns."""
        folder = checkpoint_folder(self.run_dir)
        for generation in range(self.claim.generation - 1, 0, -1):
            claim = read_claim(self.run_dir, generation)
            if claim is not None:
                staging, checkpoints = claim.staging(self.run_dir)
                clean_up(folder, checkpoints)  # a whole one that lacked its name alone gets it
                for old in (checkpoints, staging):
                    _bury(old)

    # What its holder may do.

    def tick(self, now: float) -> None:
        """Renews the lease, once a second.

        Raises:
          DeposedError: another host is the head.
        """
        if now >= self._renewed_at + RENEW_EVERY_S:
            self._renewed_at = now
            with contextlib.suppress(OSError):  # a full disk: it is silent then, not over
                self.renew()

    def renew(self, **end: Any) -> None:
        """Writes the lease anew; `end` has exit_code and reason once the run is over."""
        self._beat += 1
        seen = Seen(self.claim, self._beat, OVER if end else self._state, **end)
        path = os.path.join(self.run_dir, FOLDER, LEASE)
        self.write(path, json.dumps(dataclasses.asdict(seen)).encode())

    def stopping(self) -> None:
        """The run is about to stop: nobody is to take over from now on."""
        self._state = STOPPING
        self.tick(float("inf"))
        self._renewed_at = time.monotonic()

    def write(self, path: str | os.PathLike[str], data: bytes) -> None:
        """Replaces a shared file, whole, if this is the head still.

        Raises:
          DeposedError: it is not; nothing was written.
          OSError: it could not be written.
        """
        with self.fenced():
            name = os.path.basename(path)
            _write(os.path.join(self.staging, name), data)
            os.rename(os.path.join(self.staging, name), path)

    @contextlib.contextmanager
    def fenced(self) -> Any:
        """Within, a file or folder of its staging that has gone is a DeposedError."""
        try:
            yield
        except OSError as error:
            if error.errno in _GONE:
                raise DeposedError(self.claim.generation) from error
            raise

    def end(self, exit_code: int, reason: str) -> None:
        """The run is over: nobody takes over, and whoever comes begins at once."""
        with contextlib.suppress(OSError, DeposedError):
            self.renew(exit_code=exit_code, reason=reason)


def _write(path: str, data: bytes, *, sync: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(fd, data)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


def _bury(folder: str) -> None:
    """Puts a file in the place of a folder: what is in it goes, and nobody can make it again.

    Its owner may still put something into it meanwhile, or have Orbax make it anew.
    """
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(FileExistsError, IsADirectoryError):
            os.close(os.open(folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        if os.path.isfile(folder):
            return


def _claim_path(run_dir: str, generation: int) -> str:
    return os.path.join(run_dir, FOLDER, str(generation))


def read_claim(run_dir: str, generation: int) -> Claim | None:
    """Who has a generation; None if nobody has."""
    try:
        with open(_claim_path(run_dir, generation), encoding="utf-8") as file:
            return Claim(**json.load(file))
    except FileNotFoundError:
        return None


def read_lease(run_dir: str) -> Seen | None:
    """What the newest head says; None where there never was a lease.

    Raises:
      OSError: it cannot be read now.
    """
    try:
        with open(os.path.join(run_dir, FOLDER, LEASE), encoding="utf-8") as file:
            fields = json.load(file)
    except FileNotFoundError:
        return None
    return Seen(**{**fields, "claim": Claim(**fields["claim"])})
