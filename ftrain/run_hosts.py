"""`ftrain run` as one of several hosts: the head with its door open, or an agent, in turn."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from ftrain.agent import Agent
from ftrain.config import Config
from ftrain.door import tell_hosts
from ftrain.ears import CAUGHT, Ears
from ftrain.errors import (
    EXIT_DEFECT,
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    ConfigError,
    FtrainError,
    RunInUseError,
    UnresolvedError,
    told_of,
)
from ftrain.headship import Headship, begin_as_head, try_to_follow
from ftrain.lease import DeposedError
from ftrain.meeting_point import (
    MeetingPoint,
    open_meeting_point,
    open_own_meeting_point,
    use_interface,
)
from ftrain.placement import Placement
from ftrain.run_lock import RunLock, host_lock
from ftrain.run_token import given_token, make_token, read_token
from ftrain.screen import Screen
from ftrain.succession import Succession, await_newer, find_head
from ftrain.verdict import Verdict

CALL_S = 15.0  # for the other hosts to hear of a run that ends before it begins


def check_hosts(config: Config, placement: Placement) -> None:
    """Every host has a worker.

    Raises:
      ConfigError: there are more hosts.
    """
    if config.cluster.workers < placement.nodes:
        raise ConfigError(
            f"cluster.workers={config.cluster.workers} over {placement.nodes} hosts, and each "
            "needs one; raise workers, which counts all hosts together, or lower --nodes"
        )


class HostRun:
    """`ftrain run` on one of several hosts: now the head, now an agent, until the run has ended.

    Args:
      config: the run's.
      base: the folder the trainer is relative to.
      platform: `cpu` or `gpu`.
      placement: this host's.
      token_file: as given on the command line.
      lead: the run itself, as the head; returns its exit code.

    Raises:
      FtrainError: there are more hosts than workers, or another `ftrain run` of this rank is here.
    """

    def __init__(
        self,
        config: Config,
        base: str,
        platform: str,
        placement: Placement,
        token_file: str | None,
        lead: Callable[[Headship], int],
    ):
        check_hosts(config, placement)
        self._config, self._base, self._platform = config, base, platform
        self._place, self._lead = placement, lead
        self._token = given_token(os.environ, token_file)
        os.makedirs(config.run_dir, exist_ok=True)
        rank, self._patience_s = placement.node_rank, config.cluster.heartbeat_timeout_s
        self._lock = RunLock(config.run_dir, host_lock(config.run_dir, rank))
        self._succession = Succession(config.run_dir, rank, self._patience_s)

    def run(self) -> int:
        """Runs to the end and returns the exit code, the same on every host.

        Raises:
          FtrainError: as the run itself does, and if this host cannot listen or call.
        """
        for number in CAUGHT:  # while nothing runs: between two roles, and before the first
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, lambda *_: sys.exit(EXIT_TRY_AGAIN))
        try:
            headship = self._begin() if self._place.node_rank == 0 else None
            while True:
                if headship is not None:
                    try:
                        return self._run_head(headship)
                    except DeposedError as error:
                        generation = headship.lease.claim.generation
                        if not await_newer(self._config.run_dir, generation, self._patience_s):
                            self._say(f"{error}, and nobody knows which; ended all workers")
                            return EXIT_TRY_AGAIN
                        self._say(f"{error}; ended all workers here, joining it")
                found = self._run_agent()
                if isinstance(found, Verdict):
                    return found.exit_code
                headship = found
        except UnresolvedError as error:
            return _not_yet(self._place, error)

    def _say(self, line: str) -> None:
        sys.stdout.write(f"host {self._place.node_rank}: {line}\n")
        sys.stdout.flush()

    def _begin(self) -> Headship | None:
        """Rank 0 is the head, unless another host has become it and lives."""
        run_dir = self._config.run_dir
        patience_s = self._place.patience_s(self._config.cluster.start_timeout_s)
        identity = self._lock.identity()
        other = find_head(run_dir, identity, self._patience_s, self._say)
        if other is None:
            token = self._token or make_token(run_dir)
            meeting = open_meeting_point(self._place, token, patience_s)
            try:
                found = begin_as_head(run_dir, meeting, self._lock, self._patience_s)
            except OSError as error:
                self._say(f"no other host can take over: {told_of(error, run_dir)}")
                return Headship(RunLock(run_dir), meeting, None)
            if isinstance(found, Headship):
                return found
            meeting.listener.close()
            other = found
        if not other.claim.address:
            raise RunInUseError(run_dir, None)
        self._say(f"host {other.claim.rank} ({other.claim.name}) is the head of this run; joining")
        return None

    def _run_head(self, headship: Headship) -> int:
        """Runs as the head, and has every host exit as this one does."""
        meeting, lease = headship.meeting, headship.lease
        use_interface(meeting.address, os.environ)
        verdict = Verdict(EXIT_DEFECT, "a defect of ftrain on the head, which printed a traceback")
        try:
            code = self._lead(headship)
            verdict = Verdict(code, "the run has finished already")
            return code
        except DeposedError:
            meeting.listener.close()
            raise
        except SystemExit:
            verdict = Verdict(EXIT_TRY_AGAIN, "the head was stopped as it was about to begin")
            raise
        except FtrainError as error:
            verdict = Verdict(EXIT_REFUSED, f"the head was refused: {error}")
            raise
        finally:
            if meeting.listener.fileno() >= 0:  # it never came to a supervisor, which tells them
                if lease is not None:
                    lease.end(*verdict)
                tell_hosts(meeting, Ears(), verdict, CALL_S)

    def _run_agent(self) -> Verdict | Headship:
        """Runs as an agent; returns the head's verdict, or that this host is the head now."""
        config = with_own_folders(self._config, self._place.node_rank)
        screen = Screen()
        try:
            return Agent(
                config,
                base=self._base,
                platform=self._platform,
                placement=self._place,
                token=self._find_token,
                lock=self._lock,
                screen=screen,
                succession=self._succession,
                follow=self._follow,
            ).run()
        finally:
            screen.close()

    def _find_token(self) -> bytes | None:
        return self._token or read_token(self._config.run_dir)

    def _follow(self, generation: int, address: str) -> Headship | None:
        def open_door() -> MeetingPoint:
            return open_own_meeting_point(self._place, self._find_token(), address)

        return try_to_follow(self._config.run_dir, generation, open_door, self._lock)


def _not_yet(placement: Placement, error: UnresolvedError) -> int:
    """A pod's name that does not resolve yet may do so the next time; any other is refused."""
    if not placement.head_comes_late:
        raise error
    sys.stderr.write(f"{error}; or the head's pod is not there yet: the same command tries again\n")
    return EXIT_TRY_AGAIN


def with_own_folders(config: Config, rank: int) -> Config:
    """The config with a compilation cache of this host's own, where it is in a shared folder.

    Processors may differ, and locks on network file systems are slow, or none.
    """
    if rank == 0 or config.compile_cache == "off":
        return config
    cache = config.compile_cache
    folder = os.path.join(config.run_dir, "compile_cache") if cache == "auto" else cache
    return config.model_copy(update={"compile_cache": f"{folder}-host-{rank}"})
