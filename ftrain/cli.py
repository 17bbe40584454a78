"""The command line: commands that take a config, and those that look at a run directory. No jax.

`RUN_DIR_COMMANDS` is the table of the latter. Each is a module of that name with a
`main(arguments) -> exit code`, imported when it is asked for.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ftrain.chaos.command import add_arguments
from ftrain.config import Config, changed_keys, continue_problems, load_config, read_resolved
from ftrain.doctor.command import add_doctor
from ftrain.environment import resolve_platform, worker_environment
from ftrain.errors import (
    EXIT_DEFECT,
    EXIT_OK,
    EXIT_REFUSED,
    ConfigError,
    FtrainError,
    told_of,
)
from ftrain.placement import Placement, add_flags, find_placement
from ftrain.pretrained import find_source
from ftrain.user_code import find_base
from ftrain.versions import check_versions

if TYPE_CHECKING:
    from ftrain.headship import Headship

Option = tuple[str, dict[str, Any]]
JSON: Option = ("--json", {"action": "store_true", "help": "as JSON, for programs"})


class RunDirCommand(NamedTuple):
    """A command `ftrain NAME RUN_DIR [options]`, in the module `ftrain.NAME`."""

    name: str
    help: str
    options: tuple[Option, ...] = (JSON,)


RUN_DIR_COMMANDS = (
    RunDirCommand(
        "status",
        "where a run is: live on a terminal, else once",
        (JSON, ("--once", {"action": "store_true", "help": "print it once"})),
    ),
    RunDirCommand("verify", "judge a run by its records; exit 0 if no rule is broken, else 1"),
    RunDirCommand(
        "report",
        "a run as one HTML file that opens offline",
        (("-o", {"dest": "output", "metavar": "FILE", "help": "default: RUN_DIR/report.html"}),),
    ),
    RunDirCommand(
        "checkpoints",
        "list the checkpoints of a run and their health",
        (JSON, ("--verify", {"action": "store_true", "help": "read each; 3 if one is torn"})),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 1 is a defect of ftrain and shows a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except FtrainError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    except UnicodeEncodeError as error:
        sys.stderr.write(
            f"{error.object!a} cannot be written in this locale's encoding, {error.encoding}; "
            "set LC_ALL=C.UTF-8, and leave PYTHONUTF8 unset\n"
        )
        return EXIT_REFUSED
    except Exception:  # noqa: BLE001  the outermost: a defect is shown and given its exit code
        traceback.print_exc()
        return EXIT_DEFECT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftrain", description="Fault-tolerant data-parallel training on JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("run", _run, "train, or continue; workers may die"),
        ("check", _check, "do all that a start does, without starting"),
        ("debug", _debug, "one worker in the foreground, for breakpoint() and profilers"),
        ("chaos", _chaos, "run under faults, heal, and judge what became of the run"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("config", metavar="CONFIG", help="a YAML file, see configs/")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="key.path=value",
            help="replace a value of the config; may be given several times",
        )
        sub.add_argument("--run-dir", metavar="DIR", help="replace run_dir")
        sub.set_defaults(command=_on_config, action=command)
        if command is _run:
            add_flags(sub)
            sub.add_argument(
                "--token-file",
                metavar="FILE",
                help="by what hosts know one another; default: FTRAIN_TOKEN, else run_dir/token",
            )
        if command is _chaos:
            add_arguments(sub)
            sub.set_defaults(command=_chaos)
    add_doctor(commands)
    for reader in RUN_DIR_COMMANDS:
        sub = commands.add_parser(reader.name, help=reader.help, description=reader.help)
        sub.add_argument("run_dir", metavar="RUN_DIR", help="the run_dir of an `ftrain run`")
        for flag, settings in reader.options:
            sub.add_argument(flag, **settings)
        sub.set_defaults(command=_on_run_dir, module=f"ftrain.{reader.name}")
    return parser


def _on_config(arguments: argparse.Namespace) -> int:
    check_versions()
    config = load_config(arguments.config, arguments.set, arguments.run_dir)
    for name in (config.trainer, config.run_dir, config.init_from.path, config.compile_cache):
        os.fsencode(name or "")  # what cannot be a file's name here is told by `main`
    base = find_base(config.trainer, arguments.config)
    placement = find_placement(arguments, os.environ) if arguments.action is _run else None
    platform = resolve_platform(config, os.environ, _workers_here(config, placement))
    worker_environment(config, platform, os.environ)
    if placement is not None:
        return _run_hosts(config, base, platform, placement, arguments.token_file)
    return arguments.action(config, base, platform)


def _on_run_dir(arguments: argparse.Namespace) -> int:
    return importlib.import_module(arguments.module).main(arguments)


def _workers_here(config: Config, placement: Placement | None) -> int | None:
    """How many workers this host has; None: all."""
    if placement is None:
        return None
    from ftrain.hosts import ids_of

    return len(ids_of(placement.node_rank, placement.nodes, config.cluster.workers))


def _run_hosts(
    config: Config, base: str, platform: str, placement: Placement, token_file: str | None
) -> int:
    from ftrain.run_hosts import HostRun

    run = functools.partial(_run, config, base, platform)
    return HostRun(config, base, platform, placement, token_file, run).run()


def _run(config: Config, base: str, platform: str, headship: Headship | None = None) -> int:
    from ftrain.events import EventLog
    from ftrain.headship import single_host
    from ftrain.recorder import write_late
    from ftrain.retention import Place
    from ftrain.run_hosts import with_own_folders
    from ftrain.screen import Screen
    from ftrain.sinks import Sinks
    from ftrain.supervisor import Supervisor

    if config.init_from.path and not _has_state(config):
        find_source(config.init_from.path)
    try:
        os.makedirs(config.run_dir, exist_ok=True)
        headship = headship or single_host(config.run_dir, config.cluster.heartbeat_timeout_s)
        Place.of(config.run_dir)
    except OSError as error:
        raise ConfigError(
            f"run_dir: {told_of(error, config.run_dir)}; give a folder that can be written to"
        ) from error
    continues, changed = _continue(config)
    done = _finished_step(config)
    if done is not None:
        sys.stdout.write(
            f"{config.run_dir} has finished: step {done} of {_target(config)} is saved; "
            f"set a larger `{'steps' if config.epochs is None else 'epochs'}` to train on\n"
        )
        return EXIT_OK
    sinks = Sinks(config, base)
    with headship.fenced() as staging:
        _write_down(config, staging)
        late = write_late(config.run_dir, staging, headship.commits) if headship.commits else []
        log = EventLog(config.run_dir, staging)
        log("run_started", config=config.model_dump(), changed=changed, **headship.generation())
        if headship.after is not None:
            log("head_taken_over", **headship.taken_over(), steps=late)
    screen = Screen()
    try:
        return Supervisor(
            config,
            base=base,
            platform=platform,
            headship=headship,
            log=log,
            screen=screen,
            continues=continues,
            sinks=sinks,
            own_config=with_own_folders(config, headship.rank),
        ).run()
    finally:
        screen.close()


def _target(config: Config) -> str:
    if config.epochs is None:
        return str(config.steps)
    return f"{config.epochs} epoch{'s' * (config.epochs > 1)}"


def _continue(config: Config) -> tuple[bool, dict[str, list]]:
    """Whether there is a run to continue, and what of its config has changed.

    Raises:
      ConfigError: it cannot be continued with this config, or is not known to be this one's.
    """
    path = os.path.join(config.run_dir, "config.yaml")
    if os.path.exists(path):
        old = read_resolved(path)
        problems = continue_problems(old, config)
        if problems:
            raise ConfigError(*problems)
        return True, changed_keys(old, config)
    from ftrain.retention import checkpoint_folder, steps_in

    folder = checkpoint_folder(config.run_dir)
    if steps := steps_in(folder):
        raise ConfigError(
            f"{folder} has steps {', '.join(map(str, steps))}, and {path}, which would say of what "
            "run, is not there; give another folder with --run-dir, move checkpoints away to start "
            "afresh, or to continue from them put their run's config.yaml there"
        )
    return False, {}


def _write_down(config: Config, staging: str | None) -> None:
    """The resolved config, for who continues the run."""
    path = os.path.join(config.run_dir, "config.yaml")
    part = os.path.join(staging or config.run_dir, "config.yaml.part")
    with open(part, "w", encoding="utf-8") as file:
        file.write(config.to_yaml())
    os.replace(part, path)


def _finished_step(config: Config) -> int | None:
    """The step at which the run has finished and saved, if that is all it is to do."""
    from ftrain.events import EVENTS_FILE, read_lines

    started = last = None
    for row in read_lines(os.path.join(config.run_dir, EVENTS_FILE)):
        if row["event"] == "run_finished":
            last = row
        elif row["event"] == "run_started":
            started, last = row["config"], None
    if last is None or last["exit_code"] != EXIT_OK or not _is_enough(started, last, config):
        return None
    saved = os.path.join(config.run_dir, "checkpoints", str(last["step"]))
    return last["step"] if os.path.isdir(saved) else None


def _is_enough(started: dict, finished: dict, config: Config) -> bool:
    """Whether a run that was started so and has finished so has reached the target of `config`.

    Epochs are compared with epochs: steps and samples are compared by the workers, which know the
    length of the data set.
    """
    if config.epochs is None:
        return finished["step"] >= config.steps
    return (started.get("epochs") or 0) >= config.epochs


def _has_state(config: Config) -> bool:
    """Whether the run is to be continued: then `init_from` is not read again."""
    from ftrain.memory_tier import has_snapshots
    from ftrain.retention import checkpoint_folder, steps_in

    if not os.path.isdir(config.run_dir):
        return False
    on_disk = bool(steps_in(checkpoint_folder(config.run_dir)))
    return on_disk or has_snapshots(config.run_dir, config.checkpoint.memory_folder)


def _check(config: Config, base: str, platform: str) -> int:
    return _replace_by("ftrain.check", config, base, platform)


def _debug(config: Config, base: str, platform: str) -> int:
    return _replace_by("ftrain.debug", config, base, platform)


def _chaos(arguments: argparse.Namespace) -> int:
    from ftrain.chaos.command import chaos

    check_versions()
    return chaos(load_config(arguments.config, arguments.set, arguments.run_dir), arguments)


def _replace_by(module: str, config: Config, base: str, platform: str) -> int:
    """Becomes a process that may import jax, on this terminal."""
    env = worker_environment(config, platform, os.environ)
    os.execve(sys.executable, [sys.executable, "-m", module, config.to_json(), base, platform], env)


if __name__ == "__main__":
    sys.exit(main())
