"""Real runs for tests: `ftrain run` in a process of its own, watched through its records.

Waits are for events with a deadline. Processes are ended by pid, and only those the run recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
DEADLINE_S = 90.0
ENDLESS = "steps=1000000"  # until `Run.stop`


def environment() -> dict[str, str]:
    """The environment of a run: without the settings of the tests' own JAX."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(paths)}


def plain_process(code: str, *arguments: object) -> Any:
    """What a Python that knows nothing of the run prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Run:
    """An `ftrain run` that has been started."""

    def __init__(
        self,
        config: str | Path,
        run_dir: Path,
        *sets: str,
        command: str = "run",
        cwd: Path = REPOSITORY,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        flags: Sequence[str] = (),
        name: str = "",
    ):
        self.run_dir = run_dir
        self._read: dict[str, tuple[list[dict[str, Any]], int]] = {}
        self.output_file = run_dir.parent / f"{run_dir.name}{name}.out"
        argv = [*prefix, sys.executable, "-m", "ftrain", command, str(config)]
        argv += ["--run-dir", str(run_dir), *flags]
        for item in sets:
            argv += ["--set", item]
        with open(self.output_file, "ab") as out:
            self.process = subprocess.Popen(
                argv,
                cwd=cwd,
                env={**environment(), **(env or {})},
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.output_file.read_text()

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a record file so far. Each is read once."""
        path = self.run_dir / name
        if path.exists():
            rows, start = self._read.get(name, ([], 0))
            with open(path, "rb") as file:
                file.seek(start)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            rows += map(json.loads, whole.splitlines())
            self._read[name] = rows, start + len(whole)
        return self._read.get(name, ([], 0))[0][:]

    def log(self, worker: int) -> str:
        """What a worker's processes have written, all incarnations."""
        return (self.run_dir / "logs" / f"worker-{worker}.log").read_text()

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Its events so far, of those names or of all."""
        rows = self.rows("events.jsonl")
        return [r for r in rows if r["event"] in names] if names else rows

    def metrics(self) -> list[dict[str, Any]]:
        """Its committed steps so far."""
        return self.rows("metrics.jsonl")

    def wait_until(
        self, what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S
    ) -> Any:
        """Waits for a condition on the records; fails, with the output, when time is up."""
        end = time.monotonic() + deadline_s
        while True:
            found = condition()
            if found:
                return found
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"the run ended before: {what}\n{self.output}")
            if time.monotonic() > end:
                raise AssertionError(f"not within {deadline_s} s: {what}\n{self.output}")
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        """Waits until `step` is committed."""
        self.wait_until(f"step {step}", lambda: any(m["step"] >= step for m in self.metrics()))

    def wait_for_steps(self, steps: int) -> None:
        """Waits until so many more are committed."""
        seen = len(self.metrics())
        self.wait_until(f"{steps} more steps", lambda: len(self.metrics()) >= seen + steps)

    def wait_for_event(self, name: str, after: int = 0, **fields: Any) -> dict[str, Any]:
        """Waits for the next event of that name and those fields, beyond the first `after`."""

        def find() -> dict[str, Any] | None:
            return next(
                (
                    e
                    for e in self.events()[after:]
                    if e["event"] == name and all(e.get(k) == v for k, v in fields.items())
                ),
                None,
            )

        return self.wait_until(f"{name} {fields}", find)

    def pid(self, worker: int) -> int:
        """The process of a worker."""
        return [e["pid"] for e in self.events("worker_started") if e["worker"] == worker][-1]

    def kill(self, *workers: int, number: int = signal.SIGKILL) -> float:
        """Signals workers, as nearly at once as can be; returns when (unix seconds)."""
        pids = [self.pid(w) for w in workers]
        t = time.time()
        for pid in pids:
            os.kill(pid, number)
        return t

    @staticmethod
    def signal_pid(pid: int, number: int) -> None:
        """Signals a process that a test has read from the records."""
        os.kill(pid, number)

    def is_stuck(self, quiet_s: float = 0.5) -> bool:
        """Whether no step has been committed for so long."""
        return time.time() - self.metrics()[-1]["t"] > quiet_s

    def wait_back(self, worker: int, after: int) -> dict[str, Any]:
        """Waits until a worker that was ended takes part again.

        Only in a run that cannot be over before: one that goes on until `stop`, or that waits for
        all its workers (`cluster.min_workers`).
        """
        config = self.events("run_started")[-1]["config"]
        cluster = config["cluster"]
        assert (
            (config["steps"] or 0) >= 1_000_000
            or (config["epochs"] or 0) >= 1_000_000
            or cluster["min_workers"] == cluster["workers"]
        ), "this run may end before the worker is back: make it ENDLESS, and stop it"
        return self.wait_for_event("state_synced", after=after, worker=worker)

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits for its end; returns the exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished within {deadline_s} s\n{self.output}") from None

    def stop(self) -> int:
        """Asks a run that would go on to stop, once a test has seen what it waits for.

        A run of so many steps may be over before a worker is back, on a machine that is slow in the
        one and quick in the other.

        Returns:
          The step that it has saved.
        """
        os.kill(self.process.pid, signal.SIGTERM)
        assert self.finish() == 75, self.output
        return self.metrics()[-1]["step"]

    def wait_gone(self, deadline_s: float) -> None:
        """Waits until no process that it recorded is left."""
        end = time.monotonic() + deadline_s
        while self.processes():
            assert time.monotonic() < end, f"{self.processes()} are left after {deadline_s} s"
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """The processes it recorded that are still there (not counting zombies of others)."""
        started = ("worker_started", "coordinator_started", "saver_started")
        pids = {e["pid"] for e in self.events(*started)}
        return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@contextlib.contextmanager
def running(config: str | Path, run_dir: Path, *sets: str, **options: Any) -> Iterator[Run]:
    """A run that is ended with everything it started when the block is left."""
    run = Run(config, run_dir, *sets, **options)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        end = time.monotonic() + 20
        while run.processes() and time.monotonic() < end:
            time.sleep(0.02)
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
