"""What goes wrong: kills, stops, gloo timeouts, local errors, heartbeats, hangs, SIGTERM.

The faults leave one running worker with state (or two blank ones before the first commit), so
that a rewind or a loss is always the protocol's doing. They come at any time, in a recovery and
in the end of a run as in a step.
"""

from typing import TYPE_CHECKING

from .calls import Collective, LocalFailure
from .process import Process

if TYPE_CHECKING:
    from .world import World

LOCAL_ERROR_RATE = 0.004  # each side of a step's collective
HANG_TICKS = 1500  # in a collective: gloo's own deadline, or the watchdog's on gpu


class Faults:
    def __init__(self, world: "World"):
        self.world = world
        self.rng = world.rng
        self.rate = self.rng.choice([0.001, 0.003, 0.008])
        self.stop_request_at = self.rng.randrange(200, 3000)

    @property
    def stop_was_requested(self) -> bool:
        return self.world.setting.stop_request and self.world.time >= self.stop_request_at

    def tick(self) -> None:
        if not self.world.quiet:
            self._strike()
        self._stopped_workers()
        self._stop_request()
        if self.world.time % 4 == 0:
            self._heartbeats()
            self._hangs()

    def _strike(self) -> None:
        x = self.rng.random() / self.rate
        if x < 1.0:
            if self.world.setting.kills:
                self._kill()
        elif x < 1.4:
            self._stop()
        elif x < 2.0 and self.world.style == "cpu" and self.rng.random() < 0.4:
            self._time_out()

    def _can_spare(self, process: Process) -> bool:
        others = [other for other in self.world.holders() if other is not process]
        return process.last_holder or any(not other.stopped for other in others)

    def _kill(self) -> None:
        candidates = [p for p in self.world.processes if p.alive]
        if not candidates:
            return
        if self.rng.random() < 0.15:
            victims = [p for p in candidates if self.rng.random() < 0.6]
        else:
            victims = [self.rng.choice(candidates)]
        for victim in victims:
            nothing_to_lose = not self.world.checks.any_commit and len(self.world.alive()) > 1
            durable = self.world.checks.finished is not None
            if self._can_spare(victim) or nothing_to_lose or durable:
                self.world.count["kills"] += 1
                self.world.kill(victim, "SIGKILL")

    def _stop(self) -> None:
        candidates = [p for p in self.world.alive() if not p.stopped and self._can_spare(p)]
        if candidates:
            process = self.rng.choice(candidates)
            process.stopped = True
            self.world.note("STOP", process)

    def _time_out(self) -> None:
        candidates = [p for p in self.world.alive() if isinstance(p.waiting, Collective)]
        if candidates:
            self.world.data.time_out(self.rng.choice(candidates), "timeout, nobody dead")

    def local_error(self, process: Process) -> None:
        """Called by a worker before and after its step's collective."""
        if self.world.quiet or not self.world.setting.kills:
            return
        if self.rng.random() < LOCAL_ERROR_RATE and self._can_spare(process):
            raise LocalFailure("out of memory")

    def _stopped_workers(self) -> None:
        """A stopped worker goes on, or misses its heartbeats."""
        quiet = self.world.quiet
        for process in self.world.processes:
            if not (process.stopped and process.alive):
                continue
            if self.rng.random() >= (0.05 if quiet else 0.004):
                continue
            if self.rng.random() < 0.5 or quiet and not process.zombie:
                process.stopped = False
                self.world.note("CONT", process)
            elif self.world.service.is_connected_as(process.id, process.incarnation):
                self._declare_dead(process)

    def _declare_dead(self, process: Process) -> None:
        self.world.note("HEARTBEAT TIMEOUT of", process)
        self.world.service.disconnect(process.id)
        if self.world.rules.r9_kill_first:
            self.world.kill(process, "declared dead")
        else:
            process.zombie = True
            self.world.count["zombies"] += 1
            self.world.current[process.id] = None
            self.world.supervisor.forget(process.id)

    def _stop_request(self) -> None:
        if not self.stop_was_requested:
            return
        for process in self.world.processes:
            if process.alive and not process.stopped and not process.stop_requested:
                if self.rng.random() < 0.004:
                    process.stop_requested = True
                    self.world.note("SIGTERM at", process)

    def _heartbeats(self) -> None:
        """Every fourth tick, with four times the rate."""
        service = self.world.service
        living = {(p.id, p.incarnation) for p in self.world.processes if p.alive}
        for task, connected in list(service.connected.items()):
            # The backstop for a dead task that nobody has fenced yet.
            if connected and (task, service.incarnation[task]) not in living:
                if self.rng.random() < 0.008:
                    self.world.note("HEARTBEAT TIMEOUT of task", task)
                    service.disconnect(task)
        for process in self.world.alive():
            # A task that the service took for dead is ended by its own client, unless it has been
            # replaced meanwhile: then its heartbeats count as the replacement's (rule R9).
            if process.stopped or not process.registered or service.connected.get(process.id):
                continue
            if self.rng.random() < (0.04 if process.zombie else 0.012):
                self.world.kill(process, "client abort: heartbeat refused")

    def _hangs(self) -> None:
        now = self.world.time
        waiting = [p for p in self.world.alive() if isinstance(p.waiting, Collective)]
        hung = [p for p in waiting if not p.stopped and now - p.waiting_since > HANG_TICKS]
        if not hung:
            return
        self.world.count["hangs"] += 1
        if self.world.style == "cpu":
            self.world.data.time_out(hung[0], "collective deadline")
            return
        # R9: one at a time, never one that waits in the barrier, those without state first.
        victim = max(waiting, key=lambda p: (not p.state, p.id))
        self.world.kill(victim, "hang")
        for process in waiting:
            process.waiting_since = now
