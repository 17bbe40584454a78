"""The run as its user wants to hear it: one line for each thing that happened, and why."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from ftrain.errors import EXIT_OK, EXIT_TRY_AGAIN

if TYPE_CHECKING:
    from ftrain.beat import Reading
    from ftrain.config import Config
    from ftrain.processes import Exit
    from ftrain.remote_host import RemoteHost
    from ftrain.screen import Screen
    from ftrain.slots import Slot
    from ftrain.stacks import Stack

CLOCKS_AGREE_S = 1.0


@dataclasses.dataclass
class _Death:
    worker: int
    pid: int
    how: str
    t: float
    told: bool = False


class Story:
    """Turns facts into lines. It is told all and keeps what the next sentence needs."""

    def __init__(self, screen: Screen, config: Config):
        self._screen, self._config = screen, config
        self._deaths: dict[int, _Death] = {}
        self._saved: int | None = None
        self._save_error = ""  # of the last save, as it was told
        self._begun = self._seen_all = False
        self._evaluated: dict[str, float] = {}

    # What happens to processes.

    def worker_started(self, slot: Slot) -> None:
        """A process was started."""
        if slot.incarnation == 0 and slot.worker == 0:
            n = self._config.cluster.workers
            self._screen.line(
                f"starting {n} worker{'s' * (n > 1)}; logs in {self._config.run_dir}/logs"
            )

    def host_joined(self, host: RemoteHost, workers: list[int], missing: list[int]) -> None:
        """Another host's agent is there; its workers are started."""
        offset = host.clock_offset_s
        ahead = f"; its clock is {offset:+.1f} s off" if abs(offset) > CLOCKS_AGREE_S else ""
        waits = f"; waiting for host {' '.join(map(str, missing))}" if missing else ""
        self._screen.line(
            f"host {host.rank} ({host.name}) is there with worker "
            f"{' '.join(map(str, workers))}{ahead}{waits}"
        )

    def host_lost(self, reason: str, workers: list[int]) -> None:
        """It counts as dead, with its workers, until it is back."""
        self._screen.line(
            f"{reason}; without worker {' '.join(map(str, workers))} until it is back"
        )

    def worker_died(self, slot: Slot, pid: int, cause: str, reading: Reading | None) -> None:
        """A process ended that should not have. Told with the next commit, which shows its cost."""
        if slot.hung.startswith("the coordinator"):
            return
        self._tell_before_return(self._deaths.get(slot.worker))
        phase = reading.phase if reading is not None else "start"
        how = f"was ended, {cause}" if slot.hung else f"died of {cause} (in {phase})"
        death = _Death(slot.worker, pid, how, time.time())
        self._deaths[slot.worker] = death
        if slot.is_refused_by_all and not self._begun:
            death.told = True  # the run ends with that, told once for all workers
        elif not slot.going or not self._begun:
            death.told = True
            self._screen.line(f"worker {slot.worker} (pid {pid}) ended while starting: {cause}")

    def worker_hangs(self, slot: Slot, stack: Stack | None, *, stopped: bool) -> None:
        """The others wait for a process that makes no progress; it is about to be ended."""
        where = (
            "it was stopped by a signal"
            if stopped
            else "no Python stack could be had"
            if stack is None
            else f"its Python stack, most recent call last:\n{stack}"
        )
        self._screen.line(f"worker {slot.worker} (pid {slot.child.pid}): {slot.hung}; {where}")

    def restart_in(self, slot: Slot, delay_s: float, *, quarantine: bool) -> None:
        """When a failed worker will be back."""
        if quarantine:
            self._screen.line(
                f"worker {slot.worker} has failed more than max_failures="
                f"{self._config.restart.max_failures} times in a row; the others train without "
                f"it, and it is tried again every {delay_s:.0f} s"
            )
        elif delay_s > 0:
            self._screen.line(f"worker {slot.worker} failed again; starting it in {delay_s:.1f} s")

    def coordinator_is_deaf(self, seconds: float) -> None:
        """It is ended, and its death is told next."""
        self._screen.line(
            f"the coordinator has not acknowledged a fence for {seconds:.0f} s; ending it"
        )

    def coordinator_died(self, ended: Exit) -> None:
        """All workers come back from a checkpoint."""
        saved = "the start" if self._saved is None else f"the checkpoint of step {self._saved}"
        self._screen.line(
            f"the coordinator died of {ended.signal or f'exit {ended.exit_code}'}; "
            f"starting everything again from {saved}"
        )
        self._deaths.clear()

    # What workers report.

    def fact(self, kind: str, fields: dict[str, Any]) -> None:
        """A new fact from the recorder."""
        teller = getattr(self, f"_tell_{kind}", None)
        if teller is not None:
            teller(fields)

    def _tell_commit(self, line: dict[str, Any]) -> None:
        untold = [d for d in self._deaths.values() if not d.told]
        if untold:
            self._tell_deaths(untold, line)
        if not self._begun:
            self._begun = True
            self._screen.line(f"training: step {line['step']}, workers {_ids(line['workers'])}")

    def _tell_deaths(self, deaths: list[_Death], line: dict[str, Any]) -> None:
        for death in deaths:
            death.told = True
            delay = line["t"] - death.t
            self._screen.line(
                f"worker {death.worker} (pid {death.pid}) {death.how}; "
                f"{_ids(line['workers'], 'worker')} went on with step {line['step']} "
                f"after {delay:.2f} s"
            )

    def _tell_before_return(self, death: _Death | None) -> None:
        """Tells a death that was followed by another or by its return before any commit."""
        if death is not None and not death.told:
            death.told = True
            self._screen.line(f"worker {death.worker} (pid {death.pid}) {death.how}")

    def _tell_state_synced(self, fields: dict[str, Any]) -> None:
        death = self._deaths.pop(fields["worker"], None)
        self._tell_before_return(death)
        after = f" after {fields['t'] - death.t:.1f} s" if death is not None else ""
        if self._begun:
            back = "is back" if death is not None else "has joined"
            self._screen.line(
                f"worker {fields['worker']} {back}{after}: {_size(fields['bytes'])} of state at "
                f"step {fields['step']} from worker {fields['donor']} in {fields['seconds']:.2f} s"
            )

    def _tell_step_skipped(self, fields: dict[str, Any]) -> None:
        self._screen.line(f"step {fields['step']} skipped, the state stays: {fields['what']}")

    def _tell_evaluated(self, fields: dict[str, Any]) -> None:
        values = ", ".join(f"{k} {v:.4g}" for k, v in fields["metrics"].items())
        self._screen.line(f"evaluation at step {fields['step']}: {values}")

    def _tell_checkpoint_saved(self, fields: dict[str, Any]) -> None:
        self._saved = fields["step"]
        if self._save_error:
            self._screen.line(f"saving works again: the checkpoint of step {self._saved} is there")
            self._save_error = ""

    def _tell_checkpoint_restored(self, fields: dict[str, Any]) -> None:
        what = "checkpoint" if fields["tier"] == "disk" else "snapshot in memory"
        self._screen.line(f"continuing from the {what} of step {fields['step']}")

    def _tell_parameters_loaded(self, fields: dict[str, Any]) -> None:
        kept = [("fresh", fields["fresh"]), ("unused", fields["unused"])]
        told = [f"{what}: {_few(names)}" for what, names in kept if names]
        self._screen.line(
            "; ".join([f"beginning with {fields['leaves']} leaves of {fields['source']}", *told])
        )

    def _tell_checkpoint_skipped(self, fields: dict[str, Any]) -> None:
        what = "checkpoint" if fields["tier"] == "disk" else "snapshot in memory"
        self._screen.line(
            f"{what} {fields['step']} cannot be used and is passed over: {fields['why']}"
        )

    def _tell_save_failed(self, fields: dict[str, Any]) -> None:
        if fields["error"] == self._save_error:
            return  # told already; the next save may be better
        self._save_error = fields["error"]
        stops = self._config.checkpoint.on_save_error == "stop"
        self._screen.line(
            f"the checkpoint of step {fields['step']} could not be written: {fields['error']}; "
            + ("the run stops (on_save_error: stop)" if stops else "the next save tries again")
        )

    def _tell_memory_full(self, fields: dict[str, Any]) -> None:
        self._screen.line(
            f"no snapshots in memory: {fields['error']}; they go to {fields['instead']}"
        )

    def _tell_snapshot_failed(self, fields: dict[str, Any]) -> None:
        self._screen.line(
            f"the snapshot of step {fields['step']} could not be written: {fields['error']}"
        )

    # The last lines.

    def finished(self, code: int, reason: str) -> None:
        """The last lines: what came of it, where it is, and the first cause if it failed."""
        self._screen.close()
        folder = self._config.run_dir
        if code == EXIT_OK:
            self._screen.line(
                f"done: {reason}; checkpoint in {folder}/checkpoints/{self._saved}, "
                f"metrics in {folder}/metrics.jsonl"
            )
        elif code == EXIT_TRY_AGAIN:
            saved = "nothing saved to disk" if self._saved is None else f"saved step {self._saved}"
            self._screen.line(f"stopped: {reason} ({saved}); the same command continues")
        else:
            self._screen.line(f"stopped with exit code {code}:\n{reason}")


def _ids(workers: list[int], noun: str = "") -> str:
    text = " ".join(map(str, workers))
    return f"{noun}{'s' * (len(workers) > 1)} {text}" if noun else text


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
