"""`ftrain run` as one of several hosts: the head with its door open, or an agent."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable

from ftrain.agent import Agent
from ftrain.config import Config
from ftrain.door import tell_hosts
from ftrain.ears import Ears
from ftrain.errors import (
    EXIT_DEFECT,
    EXIT_REFUSED,
    EXIT_TRY_AGAIN,
    ConfigError,
    FtrainError,
    UnresolvedError,
)
from ftrain.meeting_point import MeetingPoint, open_meeting_point, use_interface
from ftrain.placement import Placement
from ftrain.run_lock import RunLock, host_lock
from ftrain.run_token import given_token, make_token, read_token
from ftrain.screen import Screen
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


def run_head(
    config: Config,
    placement: Placement,
    token_file: str | None,
    run: Callable[[MeetingPoint], int],
) -> int:
    """Runs as the head, and has every host exit as this one does.

    Args:
      config: the run's.
      placement: this host's, rank 0.
      token_file: as given on the command line.
      run: the run itself; returns its exit code.

    Raises:
      FtrainError: as `run` does, and if nothing can listen where the placement says.
    """
    check_hosts(config, placement)
    token = given_token(os.environ, token_file)
    os.makedirs(config.run_dir, exist_ok=True)
    patience_s = placement.patience_s(config.cluster.start_timeout_s)
    try:
        meeting = open_meeting_point(placement, token or make_token(config.run_dir), patience_s)
    except UnresolvedError as error:
        return _not_yet(placement, error)
    use_interface(meeting.address, os.environ)
    verdict = Verdict(EXIT_DEFECT, "a defect of ftrain on the head, which has printed a traceback")
    try:
        code = run(meeting)
        verdict = Verdict(code, "the run has finished already")
        return code
    except FtrainError as error:
        verdict = Verdict(EXIT_REFUSED, f"the head was refused: {error}")
        raise
    finally:
        if meeting.listener.fileno() >= 0:  # it never came to a supervisor, which tells them
            tell_hosts(meeting, Ears(), verdict, CALL_S)


def run_agent(
    config: Config, base: str, platform: str, placement: Placement, token_file: str | None
) -> int:
    """Runs as an agent; returns the head's exit code.

    Raises:
      FtrainError: another agent of this rank is here, or the head cannot be called.
    """
    check_hosts(config, placement)
    token = given_token(os.environ, token_file)
    config = with_own_folders(config, placement.node_rank)
    os.makedirs(config.run_dir, exist_ok=True)
    screen = Screen()
    try:
        return Agent(
            config,
            base=base,
            platform=platform,
            placement=placement,
            token=(lambda: token) if token else functools.partial(read_token, config.run_dir),
            lock=RunLock(config.run_dir, host_lock(config.run_dir, placement.node_rank)),
            screen=screen,
        ).run()
    except UnresolvedError as error:
        return _not_yet(placement, error)
    finally:
        screen.close()


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
    if config.compile_cache == "off":
        return config
    cache = config.compile_cache
    folder = os.path.join(config.run_dir, "compile_cache") if cache == "auto" else cache
    return config.model_copy(update={"compile_cache": f"{folder}-host-{rank}"})
