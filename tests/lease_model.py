"""Heads that take a lease from one another, one file operation at a time, in a random order.

The code is the real one, on a real folder; only its calls of the system wait for their turn. A head
that is stopped anywhere, for however long, is one whose turn does not come.

    verdict = run(seed, folder, without="fence")
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ftrain import events, lease
from ftrain.events import LineFile
from ftrain.lease import DeposedError, Lease, read_lease

ACTORS, LIVES, COMMITS = 3, 3, 4
WAITS = ("link", "rename", "open", "write", "unlink", "rmdir", "makedirs", "mkdir", "scandir")


class Turns:
    """Lets one of several threads go on at a time, up to its next call."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._turns: dict[threading.Thread, threading.Semaphore] = {}
        self._back = threading.Semaphore(0)
        self.errors: list[BaseException] = []

    def start(self, body: Callable[[], None]) -> None:
        """Another thread."""

        def work() -> None:
            self.wait()
            try:
                body()
            except BaseException as error:  # noqa: BLE001  told by `play`
                self.errors.append(error)
            del self._turns[threading.current_thread()]
            self._back.release()

        thread = threading.Thread(target=work, daemon=True)
        self._turns[thread] = threading.Semaphore(0)
        thread.start()
        self._back.acquire()

    def wait(self) -> None:
        """Until it is this thread's turn."""
        mine = self._turns.get(threading.current_thread())
        if mine is not None:
            self._back.release()
            mine.acquire()

    def play(self, look: Callable[[], None]) -> None:
        """To the end of all; `look` is called between any two calls."""
        favourite, left = None, 0
        while self._turns:
            alive = list(self._turns)
            if left == 0 or favourite not in alive:  # one goes on for a while, the others stand
                favourite, left = self._random.choice(alive), self._random.choice((1, 2, 5, 20))
            left -= 1
            self._turns[favourite].release()
            self._back.acquire()
            look()
            if self.errors:
                raise self.errors[0]


class Paced:
    """A module whose calls wait for their turn."""

    def __init__(self, module: Any, turns: Turns):
        self._module, self._turns = module, turns

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name not in WAITS:
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._turns.wait()
            return found(*args, **options)

        return call


class PacedRemoval:
    """`shutil`, whose rmtree is many calls."""

    def __init__(self, paced: Paced):
        self._os = paced
        self.copyfile = shutil.copyfile

    def rmtree(self, folder: Any, ignore_errors: bool = False) -> None:
        with contextlib.suppress(OSError):
            for entry in list(self._os.scandir(folder)):
                if entry.is_dir():
                    self.rmtree(entry.path)
                else:
                    self._os.unlink(entry.path)
            self._os.rmdir(folder)


class World:
    """A run folder, its heads, and what must be so at every moment."""

    def __init__(self, seed: int, run_dir: Path, without: str):
        self.run_dir, self._without = run_dir, without
        self.turns = Turns(seed)
        self.os = Paced(os, self.turns)
        self.holders: dict[int, str] = {}  # of generations that were taken
        self._published: dict[int, int] = {}  # checkpoint -> generation
        self._lease = 0
        self.wrong = ""
        self.deposed = self.commits = 0

    def play(self) -> None:
        for rank in range(ACTORS):
            self.turns.start(lambda rank=rank: self._host(rank))
        self.turns.play(self._look)

    def _host(self, rank: int) -> None:
        for _ in range(LIVES):
            tried = 0
            while True:
                seen = read_lease(str(self.run_dir))
                tried = max(tried, seen.claim.generation if seen else 0) + 1
                with contextlib.suppress(DeposedError):
                    who = {"rank": rank, "name": "h", "address": "a", "lock": "l"}
                    taken = Lease.take(str(self.run_dir), tried, **who)
                    if taken is not None:
                        self._lead(taken)
                        break

    def _lead(self, mine: Lease) -> None:
        generation = mine.claim.generation
        if generation in self.holders:
            self.wrong = self.wrong or "two holders"
        self.holders[generation] = mine.claim.holder
        with contextlib.ExitStack() as stack:
            try:
                with mine.fenced():
                    own = None if self._without == "replaced records" else mine.staging
                    records = LineFile(str(self.run_dir / "events.jsonl"), own)
                    stack.callback(records.close)
                for number in range(COMMITS):
                    records.append({"generation": generation, "number": number})
                    self._save(mine, number)
                    mine.renew()
                    self.commits += 1
            except (DeposedError, OSError):  # which a save that failed raises
                self.deposed += 1

    def _save(self, mine: Lease, number: int) -> None:
        """As the saver does it: Orbax makes the folders that it writes into."""
        step = mine.claim.generation * 10 + number
        part = Path(mine.checkpoint_staging) / f"{step}.part"
        self.os.makedirs(f"{part}.orbax-checkpoint-tmp")
        self.os.rename(f"{part}.orbax-checkpoint-tmp", part)
        self.os.rename(part, self.run_dir / "checkpoints" / str(step))

    def _look(self) -> None:
        newest = max(self.holders, default=0)
        written = self._generations()
        if written != sorted(written):
            self.wrong = self.wrong or "an old head's records"
        for name in os.listdir(self.run_dir / "checkpoints"):
            if name.isdigit() and int(name) not in self._published:
                self._published[int(name)] = int(name) // 10
                if int(name) // 10 < newest:
                    self.wrong = self.wrong or "an old head's checkpoint"
        seen = read_lease(str(self.run_dir))
        now = seen.claim.generation if seen else 0
        if now < self._lease:
            self.wrong = self.wrong or "the lease went back"
        self._lease = now

    def _generations(self) -> list[int]:
        path = self.run_dir / "events.jsonl"
        if not path.exists():
            return []
        return [json.loads(line)["generation"] for line in path.read_bytes().splitlines()]


def run(seed: int, run_dir: Path, without: str = "") -> World:
    """One schedule, with all rules or without one; `wrong` says what was broken."""
    run_dir.mkdir(parents=True)
    (run_dir / "checkpoints").mkdir()
    (run_dir / "head").mkdir()
    world = World(seed, run_dir, without)
    with contextlib.ExitStack() as stack:
        for module in (lease, events):
            stack.enter_context(mock.patch.object(module, "os", world.os))
            stack.enter_context(mock.patch.object(module, "shutil", PacedRemoval(world.os)))
        for patch in _without(without, world):
            stack.enter_context(patch)
        world.play()
    return world


def _without(rule: str, world: World) -> Iterator[Any]:
    """What leaves a rule out."""
    if rule == "link":  # whoever finds no claim makes one

        def claim(self: Lease) -> bool:
            own = os.path.join(self.staging, "claim")
            lease._write(own, json.dumps(self.claim.__dict__).encode())
            if lease.read_claim(self.run_dir, self.claim.generation) is not None:
                return False
            lease.os.rename(own, lease._claim_path(self.run_dir, self.claim.generation))
            return True

        yield mock.patch.object(Lease, "_link", claim)
    elif rule == "fence":
        yield mock.patch.object(Lease, "_fence", lambda self: None)
    elif rule == "all earlier":  # only the one before

        def fence(self: Lease) -> None:
            before = lease.read_claim(self.run_dir, self.claim.generation - 1)
            for folder in before.staging(self.run_dir) if before else ():
                lease._bury(folder)

        yield mock.patch.object(Lease, "_fence", fence)
    elif rule == "a file in its place":
        yield mock.patch.object(lease, "_bury", lambda folder: lease.shutil.rmtree(folder))
    elif rule == "staging before the claim":
        linked = Lease._link

        def link(self: Lease) -> bool:
            made = linked(self)
            for folder in self.claim.staging(self.run_dir) if made else ():
                lease.shutil.rmtree(folder)  # as if they were made only now
                with contextlib.suppress(FileExistsError):
                    lease.os.makedirs(folder)
            return made

        def bury(folder: str) -> None:
            if os.path.isdir(folder):
                real(folder)

        real = lease._bury
        yield mock.patch.object(Lease, "_link", link)
        yield mock.patch.object(lease, "_bury", bury)
    elif rule == "renames out of staging":  # a look before the write instead

        def write(self: Lease, path: str, data: bytes) -> None:
            seen = read_lease(self.run_dir)
            if seen is not None and seen.claim.generation > self.claim.generation:
                raise DeposedError(self.claim.generation)
            part = f"{path}.{self.claim.holder}"
            lease._write(part, data)
            lease.os.rename(part, path)

        yield mock.patch.object(Lease, "write", write)
