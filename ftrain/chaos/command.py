"""`ftrain chaos CONFIG`: a run under faults, healed, waited for, judged.

start      the run, as `ftrain run` shows it
inject     what the plan has, each fault recorded and marked on the screen
heal       nothing is broken any more: a run that ends while broken proves nothing
recover    every worker commits again, or the run has reached its target
judge      by the run's records alone (`verify`); exit 0 or 1
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftrain.chaos.faults import Injector, refusals
from ftrain.chaos.live import LiveRun
from ftrain.chaos.plan import DEFAULT, DRAWN, Fault, Plan, drawn, read_plan, seconds, write_plan
from ftrain.errors import EXIT_OK, EXIT_REFUSED, EXIT_TRY_AGAIN, ConfigError

if TYPE_CHECKING:
    from ftrain.config import Config

TICK_S = 0.01
PLAN_FILE = "chaos-plan.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ftrain chaos`, beside those of every run."""
    parser.add_argument("--plan", metavar="FILE", help="a plan to run; none is drawn then")
    parser.add_argument(
        "--faults", metavar="KIND,...", help=f"kinds to draw from: {', '.join(DRAWN)}"
    )
    parser.add_argument("--every", metavar="DURATION", default="10s", help="mean time between two")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="what they are drawn from")
    parser.add_argument(
        "--for",
        dest="for_s",
        metavar="DURATION",
        help="how long faults are injected; then the run is stopped, its state saved "
        "(without: to the end of the run)",
    )


def chaos(config: Config, arguments: argparse.Namespace) -> int:
    """Runs a config under faults; returns 0 if the verdict on it is good, else 1."""
    plan, kinds = _plan(config, arguments)
    if os.path.isdir(os.path.join(config.run_dir, "orders")):
        shutil.rmtree(os.path.join(config.run_dir, "orders"))  # of a chaos that was killed
    argv = [sys.executable, "-m", "ftrain.cli", "run", arguments.config]
    argv += ["--run-dir", config.run_dir]
    for item in arguments.set:
        argv += ["--set", item]
    with _surroundings(config, kinds) as (network, disk):
        live = LiveRun(argv, config.run_dir, config.cluster.workers, network, disk)
        course = Course(live, plan, config)
        with course.stopped_by_signals():
            try:
                live.start()
                course.run()
            finally:
                live.close()
                shutil.rmtree(live.run_dir / "orders", ignore_errors=True)
                course.write_down()
    if live.process.returncode == EXIT_REFUSED:
        return EXIT_REFUSED  # it has said why
    return course.judge()


def _plan(config: Config, arguments: argparse.Namespace) -> tuple[Plan, set[str]]:
    """What is to be injected, and of which kinds.

    Raises:
      ConfigError: no such kind, or one that this machine does not allow was asked for.
    """
    workers = config.cluster.workers
    if arguments.plan is not None:
        plan = read_plan(arguments.plan, workers)
        timed = list(plan.timed)
        kinds = {f.kind for f in [*timed, *plan.stepped]}
        _refuse_impossible(kinds)
        return plan._replace(timed=iter(timed)), kinds
    problems = []
    spans: dict[str, float | None] = {"--every": None, "--for": None}
    for flag, text in (("--every", arguments.every), ("--for", arguments.for_s)):
        try:
            spans[flag] = None if text is None else seconds(text)
        except ValueError as error:
            problems.append(f"{flag}: {error}")
    asked = arguments.faults and arguments.faults.replace("-", "_").split(",")
    unknown = sorted(set(asked or ()) - set(DRAWN))
    problems += [f"--faults: {kind} is not one of {', '.join(DRAWN)}" for kind in unknown]
    if problems:
        raise ConfigError(*problems)
    if asked:
        _refuse_impossible(set(asked))
    impossible = refusals()
    for kind in set(DEFAULT) & set(impossible) if not asked else ():
        sys.stdout.write(f"chaos: without {kind}: {impossible[kind]}\n")
    kinds = list(asked or (kind for kind in DEFAULT if kind not in impossible))
    # Longer than it takes to be found out, so that both a fault that is seen and one that is not
    # are drawn.
    lasts_s = 1.5 * config.cluster.heartbeat_timeout_s
    timed = drawn(arguments.seed, kinds, spans["--every"] or 10.0, workers, lasts_s)
    return Plan(timed, [], spans["--for"], arguments.seed), set(kinds)


def _refuse_impossible(kinds: set[str]) -> None:
    impossible = refusals()
    found = sorted(kinds & set(impossible))
    if found:
        raise ConfigError(*(f"{kind} is not possible here: {impossible[kind]}" for kind in found))


@contextlib.contextmanager
def _surroundings(config: Config, kinds: set[str]) -> Iterator[tuple]:
    """The network and the disk that the plan breaks, or None where it does not."""
    from ftrain.chaos.disk import Disk
    from ftrain.chaos.network import Network

    os.makedirs(config.run_dir, exist_ok=True)
    with contextlib.ExitStack() as held:
        network = disk = None
        if "partition" in kinds:
            network = held.enter_context(Network(config.cluster.workers))
        if "full_disk" in kinds:
            disk = held.enter_context(Disk(config.run_dir))
        yield network, disk


class Course:
    """One run from its start to its verdict."""

    def __init__(self, live: LiveRun, plan: Plan, config: Config):
        self._live, self._plan, self._config = live, plan, config
        self._injector = Injector(live)
        self._timed = itertools.chain(plan.timed, [None])
        self._next: Fault | None = next(self._timed)
        self._stepped = list(plan.stepped)
        self._interrupted = self._stopped = False
        self._problems: list[str] = []

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Within, SIGINT and SIGTERM stop the run; it is healed and judged all the same."""

        def stop(number: int, frame: object) -> None:
            self._interrupted = True
            self._live.signal(number)

        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> None:
        """Injects, heals, waits for recovery and for the run's end."""
        while self._live.is_alive() and not self._interrupted and self._inject_due():
            self._injector.tick()
            time.sleep(TICK_S)
        self._injector.heal()
        self._wait_for_recovery()
        if self._plan.for_s is not None and not self._interrupted:
            self._stopped = True
            self._live.signal(signal.SIGTERM)
        self._live.process.wait()
        self._live.read()

    def _inject_due(self) -> bool:
        """Begins every fault whose time has come; False when there are no more."""
        self._live.read()
        if self._live.first_commit_at is None:
            return True
        now = time.monotonic() - self._live.first_commit_at
        if self._plan.for_s is not None and now > self._plan.for_s:
            return False
        while self._next is not None and now >= self._next.at_s:
            fault, self._next = self._next, next(self._timed)
            self._injector.begin(fault)
        for fault in [f for f in self._stepped if self._live.step >= f.at_step]:
            self._stepped.remove(fault)
            self._injector.begin(fault)
        lasting = any(not i.is_over for i in self._injector.injections)
        return self._next is not None or bool(self._stepped) or lasting

    def _wait_for_recovery(self) -> None:
        """Until all workers have committed after the last fault and its healing."""
        cluster, everybody = self._config.cluster, list(range(self._live.workers))
        since = max((i.t for i in self._injector.injections), default=0.0)
        limit_s = (
            cluster.start_timeout_s
            + 2 * max(cluster.hang_timeout_s, cluster.heartbeat_timeout_s)
            + self._config.restart.backoff_max_s
        )
        end = time.monotonic() + limit_s
        while self._live.is_alive() and not self._interrupted:
            self._live.read()
            if any(m["t"] > since and m["workers"] == everybody for m in self._live.commits):
                return
            if time.monotonic() > end:
                self._problems.append(
                    f"not all workers committed within {limit_s:.0f} s of the last fault"
                )
                self._live.signal(signal.SIGTERM)
                return
            time.sleep(TICK_S)

    def write_down(self) -> None:
        """What was injected, as a plan that can be run again."""
        begun = self._live.first_commit_at
        rows = []
        for injection in self._injector.injections:
            row = dict(injection.row)
            if injection.fault.at_s is not None:
                row["at"] = f"{injection.told - begun:.3f}s"
            rows.append(row)
        write_plan(
            self._live.run_dir / PLAN_FILE,
            rows,
            seed=self._plan.seed,
            **{"for": None if self._plan.for_s is None else f"{self._plan.for_s:g}s"},
        )

    def judge(self) -> int:
        """Prints the verdict; 0 if it is good."""
        from ftrain.verify import verify

        code = self._live.process.returncode
        expected = (EXIT_TRY_AGAIN, EXIT_OK) if self._stopped or self._interrupted else (EXIT_OK,)
        if code not in expected:
            self._problems.append(f"the run ended with exit code {code}, expected {expected[0]}")
        injections = self._injector.injections
        if not injections:
            self._problems.append("no fault was injected: the run was over before the first")
        verdict = verify(str(self._live.run_dir))
        write = sys.stdout.write
        count = f"{len(injections)} fault{'s' * (len(injections) != 1)}"
        write(f"chaos: {count}, written down in {self._live.run_dir / PLAN_FILE}\n")
        for injection in injections:
            if "outcome" in injection.row:
                write(f"  {injection.fault.text()}: {injection.row['outcome']}\n")
        write(f"{verdict}\n")
        for problem in self._problems:
            write(f"FAIL {problem}\n")
        good = verdict.ok and not self._problems
        write(f"chaos: the verdict is {'good' if good else 'bad'}\n")
        return EXIT_OK if good else 1
