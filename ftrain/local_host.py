"""The processes of this host: its template, and the workers that are started here. No jax.

The head's supervisor and every agent have one. What happens to a worker is told to whoever had it
started, as `Heard`; its output is in this host's `logs/` by then.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ftrain.beat import Beat
from ftrain.endpoint import parse_endpoint
from ftrain.environment import direct_grpc, own_environment, worker_environment
from ftrain.forking import Template
from ftrain.processes import Child, Ends, Exit, kill_strays, launch, reap_strays

if TYPE_CHECKING:
    from ftrain.config import Config
    from ftrain.ears import Ears
    from ftrain.worker_logs import Logs

LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Heard:
    """Who is called with what happens to one worker process."""

    started: Callable[[int], None]  # its pid
    line: Callable[[str, str], None]  # stdout, stderr or records; and a whole line
    ended: Callable[[Exit, str], None]  # how; and why its host counts as lost, else ""
    late: Callable[[str], None] = lambda line: None  # a record, after it was counted as dead


@dataclasses.dataclass(frozen=True)
class Past:
    """What a worker is told of its run's history, where several hosts keep snapshots of it."""

    history: str  # of the coordinator that it belongs to; a part of its snapshots' names
    begun: list[tuple[str, int]]  # see `history`


class LocalHost:
    """Starts and ends workers here.

    Args:
      config: the run's, with this host's own `run_dir` and `compile_cache`.
      base: the folder the trainer is relative to.
      platform: `cpu` or `gpu`.
      address: this host's, as the workers of other hosts reach it; a literal one.
      workers: the ids that belong here; the lowest gets the first GPU.
      memory: where its workers keep snapshots of the state, best first.
      ears: of this process.
      logs: where output goes.
      tell_groups: takes a line about a process group, see `undertaker`.
    """

    clock_offset_s = 0.0  # against the head's

    def __init__(
        self,
        config: Config,
        *,
        base: str,
        platform: str,
        address: str,
        workers: Sequence[int],
        memory: Sequence[str],
        ears: Ears,
        logs: Logs,
        tell_groups: Callable[[str], None],
    ):
        self._config, self._base, self.platform = config, base, platform
        self._address, self._workers, self._memory = address, list(workers), list(memory)
        self._handover = self._memory[0]
        self._ears, self._logs, self._tell_groups = ears, logs, tell_groups
        self.env = worker_environment(config, platform, os.environ)
        self.env.update(direct_grpc(self.env, [address]))
        self._children: dict[int, tuple[Child, Heard]] = {}  # by pid
        self.template: Template | None = None

    def keep_snapshots(self, memory: Sequence[str], handover: str) -> None:
        """Has those who are started from now on keep their snapshots elsewhere.

        Args:
          memory: where, best first.
          handover: where those lie that the saver is to write to disk.
        """
        self._memory, self._handover = list(memory), handover

    def open(self) -> None:
        """Imports the user's file once, for every worker that will be forked from it."""
        template = self.template = Template(self._config.trainer, self._base, self.env)
        self._ears.hear(template.child, "stdout", self._logs.supervisor)
        self._ears.hear(template.child, "stderr", self._logs.supervisor)

        def ready() -> None:
            self._ears.forget(template)
            template.take_ready()
            if template.unfit:
                self._logs.supervisor(f"workers are not forked: {template.unfit}")

        self._ears.watch(template, ready)

    def close(self) -> None:
        """Ends the template. No worker may be left."""
        if self.template.pending:
            self._ears.forget(self.template)
        self.template.end()
        self._ears.hear_out(self.template.child)

    def can_start(self) -> bool:
        """Whether a worker may be started now; or the template is on its way, and worth waiting."""
        if self.template.usable and self.template.is_stale():
            self.close()
            self.open()
        return not self.template.pending

    def start(
        self, worker: int, incarnation: int, address: str, heard: Heard, past: Past | None = None
    ) -> tuple[Child, Beat]:
        """Starts a worker that finds the coordination service at `address`."""
        beat_fd = Beat.create(f"ftrain-beat-{worker}")
        job = {
            "config": self._config.to_json(),
            "worker": worker,
            "address": address,
            "host": self._address,
            "platform": self.platform,
            "base": self._base,
            "memory": self._memory,
            "handover": self._handover,
            "neighbours": self._workers,
            "past": past and dataclasses.astuple(past),
            "parent": os.getpid(),
        }
        place = worker - min(self._workers)
        own = own_environment(self.env, self.platform, worker, incarnation, place)
        own.update(direct_grpc(self.env, [parse_endpoint(address, "coordinator").host]))
        launched = False

        def begin(ends: Ends) -> int:
            nonlocal launched
            forked = self.template.usable and self.template.fork(job, own, beat_fd, ends)
            launched = not forked
            return forked or launch(
                [sys.executable, "-m", "ftrain.worker", "{control}"],
                {**self.env, **own},
                ends,
                [beat_fd],
            )

        child = Child(begin)
        if launched:  # a forked one has been given its assignment
            child.send(json.dumps({**job, "records_fd": child.records_fd, "beat_fd": beat_fd}))
        self._children[child.pid] = child, heard
        self._tell_groups(f"group {child.pid}")
        for name in ("stdout", "stderr"):
            self._ears.hear(child, name, functools.partial(self._on_output, worker, name, heard))
        self._ears.hear(child, "records", functools.partial(heard.line, "records"))
        self._ears.watch(child.pidfd, lambda: self._collect(child))
        heard.started(child.pid)
        return child, Beat(beat_fd)

    def _on_output(self, worker: int, name: str, heard: Heard, line: str) -> None:
        self._logs.worker(worker, line)
        heard.line(name, line)

    def _collect(self, child: Child) -> None:
        """Its process has ended: what it left in its pipes is heard, and it is reaped."""
        _, heard = self._children.pop(child.pid)
        self._ears.hear_out(child)
        self._ears.forget(child.pidfd)
        ended = child.reap()
        self._tell_groups(f"group {child.pid} -")
        heard.ended(ended, "")

    def end_all(self) -> None:
        """Kills and reaps every worker, and what it left behind."""
        children = [child for child, _ in self._children.values()]
        for child in children:
            child.kill()
        for child in children:
            self._collect(child)

    def tick(self, others: set[int]) -> None:
        """Reaps what workers' own children left behind.

        Args:
          others: the children of this process that are not this object's.
        """
        reap_strays(self._pids() | others)

    def kill_strays(self, others: set[int]) -> None:
        """Ends every child of this process that is neither this object's nor one of `others`."""
        kill_strays(self._pids() | others)

    def _pids(self) -> set[int]:
        pids = set(self._children)
        return pids | {self.template.child.pid} if self.template is not None else pids
