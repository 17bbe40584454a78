"""The command line: `ftrain run`, `check`, `debug`, `checkpoints`, `doctor`.

No jax but to verify checkpoints.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from ftrain import doctor
from ftrain.config import Config, changed_keys, continue_problems, load_config, read_resolved
from ftrain.environment import resolve_platform, worker_environment
from ftrain.errors import (
    EXIT_DEFECT,
    EXIT_GAVE_UP,
    EXIT_OK,
    EXIT_REFUSED,
    ConfigError,
    FtrainError,
)
from ftrain.pretrained import find_source
from ftrain.user_code import find_base
from ftrain.versions import check_versions


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; 1 is a defect of ftrain and shows a traceback."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command is doctor.main:  # which says itself what it thinks of the versions
            return doctor.main(arguments)
        check_versions()
        if arguments.command is _checkpoints:
            return _checkpoints(arguments)
        config = load_config(arguments.config, arguments.set, arguments.run_dir)
        for name in (config.trainer, config.run_dir, config.init_from.path, config.compile_cache):
            os.fsencode(name or "")  # what cannot be a file's name here is told below
        base = find_base(config.trainer, arguments.config)
        platform = resolve_platform(config, os.environ)
        worker_environment(config, platform, os.environ)
        return arguments.command(config, base, platform)
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
        sub.set_defaults(command=command)
    _add_checkpoints(commands)
    doctor.add_doctor(commands)
    return parser


def _add_checkpoints(commands: argparse._SubParsersAction) -> None:
    text = "list the checkpoints of a run and their health"
    sub = commands.add_parser("checkpoints", help=text, description=text)
    sub.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run")
    sub.add_argument(
        "--verify", action="store_true", help="read each and compare its digest; 3 if one is torn"
    )
    sub.add_argument("--json", action="store_true", help="print a JSON list")
    sub.set_defaults(command=_checkpoints)


def _run(config: Config, base: str, platform: str) -> int:
    from ftrain.events import EventLog
    from ftrain.run_lock import RunLock
    from ftrain.screen import Screen
    from ftrain.supervisor import Supervisor

    if config.init_from.path and not _has_checkpoints(config):
        find_source(config.init_from.path)
    os.makedirs(config.run_dir, exist_ok=True)
    lock = RunLock(config.run_dir)
    changed = _continue(config)
    done = _finished_step(config)
    if done is not None:
        sys.stdout.write(
            f"{config.run_dir} has finished: step {done} of {_target(config)} is saved; "
            f"set a larger `{'steps' if config.epochs is None else 'epochs'}` to train on\n"
        )
        return EXIT_OK
    log = EventLog(config.run_dir)
    log("run_started", config=config.model_dump(), changed=changed)
    screen = Screen()
    try:
        return Supervisor(
            config, base=base, platform=platform, lock=lock, log=log, screen=screen
        ).run()
    finally:
        screen.close()


def _target(config: Config) -> str:
    if config.epochs is None:
        return str(config.steps)
    return f"{config.epochs} epoch{'s' * (config.epochs > 1)}"


def _continue(config: Config) -> dict[str, list]:
    """Checks the config against the one the run began with, and writes the resolved one down."""
    path = os.path.join(config.run_dir, "config.yaml")
    changed = {}
    if os.path.exists(path):
        old = read_resolved(path)
        problems = continue_problems(old, config)
        if problems:
            raise ConfigError(*problems)
        changed = changed_keys(old, config)
    part = path + ".part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(config.to_yaml())
    os.replace(part, path)
    return changed


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


def _has_checkpoints(config: Config) -> bool:
    """Whether the run is to be continued: then `init_from` is not read again."""
    folder = os.path.join(config.run_dir, "checkpoints")
    return os.path.isdir(folder) and any(name.isdigit() for name in os.listdir(folder))


def _checkpoints(arguments: argparse.Namespace) -> int:
    from ftrain.checkpoints_table import show

    # To read takes no accelerator, and none may be taken from a run.
    os.environ["JAX_PLATFORMS"] = "cpu"
    all_good = show(
        arguments.run_dir,
        verify=arguments.verify,
        as_lines=not arguments.json,
        write=sys.stdout.write,
    )
    return EXIT_OK if all_good or not arguments.verify else EXIT_GAVE_UP


def _check(config: Config, base: str, platform: str) -> int:
    return _replace_by("ftrain.check", config, base, platform)


def _debug(config: Config, base: str, platform: str) -> int:
    return _replace_by("ftrain.debug", config, base, platform)


def _replace_by(module: str, config: Config, base: str, platform: str) -> int:
    """Becomes a process that may import jax, on this terminal."""
    env = worker_environment(config, platform, os.environ)
    os.execve(sys.executable, [sys.executable, "-m", module, config.to_json(), base, platform], env)


if __name__ == "__main__":
    sys.exit(main())
