"""`ftrain doctor [CONFIG]`: what would stop a run here, one line each, with the mend. No jax.

Everything is tried as a run would do it, on this host and in processes that end with the command;
nothing is left behind. Checks that take a second or more go on side by side.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import sys
from collections.abc import Callable, Iterator

from ftrain.config import Config, load_config
from ftrain.doctor import devices, host, network
from ftrain.doctor.finding import Finding
from ftrain.environment import resolve_platform, visible_gpus, worker_environment
from ftrain.errors import EXIT_DEFECT, EXIT_OK, ConfigError
from ftrain.hosts import ids_of
from ftrain.placement import Placement, add_flags, find_placement
from ftrain.user_code import find_base

MARKS = {"ok": "\033[32mok\033[0m  ", "warn": "\033[33mwarn\033[0m", "fail": "\033[31mfail\033[0m"}
WIDTH = 14  # of the longest check's name

Check = Callable[[], Finding | list[Finding]]


def add_doctor(commands: argparse._SubParsersAction) -> None:
    """The sub-command, with the flags that say where this host stands."""
    text = "what would stop a run here, and the mend"
    sub = commands.add_parser("doctor", help=text, description=text)
    sub.add_argument("config", metavar="CONFIG", nargs="?", help="of the run; default: none")
    sub.add_argument("--set", action="append", default=[], metavar="key.path=value")
    sub.add_argument("--run-dir", metavar="DIR", help="replace run_dir")
    sub.add_argument("--json", action="store_true", help="print a JSON list")
    add_flags(sub)
    sub.set_defaults(command=main)


def main(arguments: argparse.Namespace) -> int:
    """Prints a line for each finding; 1 if one of them is a failure."""
    findings = list(examine(arguments, show=None if arguments.json else _show))
    if arguments.json:
        json.dump([finding._asdict() for finding in findings], sys.stdout, indent=1)
        sys.stdout.write("\n")
    failed = any(finding.level == "fail" for finding in findings)
    return EXIT_DEFECT if failed else EXIT_OK


def examine(
    arguments: argparse.Namespace, show: Callable[[Finding], None] | None = None
) -> Iterator[Finding]:
    """All findings, in a fixed order; `show` gets each as soon as those before it are there."""
    findings, config = _config(arguments)
    placement, more = _placement(arguments)
    platform, env, still_more = _environment(config, placement)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for check in [
            lambda: [*findings, *more, *still_more],
            *map(pool.submit, _checks(config, placement, platform, env)),
        ]:
            found = check() if callable(check) else check.result()
            for finding in found if isinstance(found, list) else [found]:
                if show is not None:
                    show(finding)
                yield finding


def _checks(
    config: Config, placement: Placement | None, platform: str, env: dict[str, str]
) -> list[Check]:
    nodes = 1 if placement is None else placement.nodes
    checks: list[Check] = [
        host.versions,
        lambda: devices.devices(env, platform),
        lambda: network.own_name(nodes),
        network.loopback,
        lambda: network.proxies(os.environ),
        host.shared_memory,
        lambda: host.descriptors(config.cluster.workers),
        host.clock,
        lambda: host.run_directory(config.run_dir),
    ]
    if placement is not None:
        checks.append(lambda: network.head(placement))
    # With two GPUs at hand two workers can meet on them; NCCL refuses two on one.
    meeting = platform if platform == "cpu" or len(visible_gpus(env)) > 1 else "cpu"
    meeting_env = env if meeting == platform else worker_environment(config, meeting, os.environ)
    checks.append(lambda: devices.sum_of_two(meeting_env, meeting))
    return checks


def _config(arguments: argparse.Namespace) -> tuple[list[Finding], Config]:
    """The config, or a line for each of its problems and the defaults in its place."""
    default = Config(
        trainer="none.py:None", run_dir=arguments.run_dir or ".", steps=1, batch_size=1
    )
    if arguments.config is None:
        return [], default
    try:
        config = load_config(arguments.config, arguments.set, arguments.run_dir)
        find_base(config.trainer, arguments.config)
    except ConfigError as error:
        problems = [problem.rpartition("; ") for problem in error.problems]
        return [Finding("config", "fail", a or c, c if a else "") for a, _, c in problems], default
    return [Finding("config", "ok", arguments.config)], config


def _placement(arguments: argparse.Namespace) -> tuple[Placement | None, list[Finding]]:
    try:
        return find_placement(arguments, os.environ), []
    except ConfigError as error:
        found, _, mend = str(error).rpartition("; ")
        return None, [Finding("placement", "fail", found, mend)]


def _environment(
    config: Config, placement: Placement | None
) -> tuple[str, dict[str, str], list[Finding]]:
    """The platform and the environment that workers would get."""
    here = None
    if placement is not None:
        here = len(ids_of(placement.node_rank, placement.nodes, config.cluster.workers))
    try:
        platform = resolve_platform(config, os.environ, here)
        return platform, worker_environment(config, platform, os.environ), []
    except ConfigError as error:
        found, _, mend = str(error).rpartition("; ")
        clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        env = worker_environment(config, "cpu", clean)
        return "cpu", env, [Finding("environment", "fail", found, mend)]


def _show(finding: Finding) -> None:
    mark = MARKS[finding.level] if sys.stdout.isatty() else f"{finding.level:4}"
    mend = f"\n{'':{WIDTH + 6}}-> {finding.mend}" if finding.mend else ""
    sys.stdout.write(f"{mark}  {finding.check:{WIDTH}}{finding.found}{mend}\n")
    sys.stdout.flush()
