"""The hosts of a run as its head has them: which ids belong where, who is there, who is lost.

The head is host 0. For every other rank an agent connects, proves that it has the run's token and
says hello, with nothing running. From then on both sides speak at least once a second. A host whose
connection ends, or that is silent for `heartbeat_timeout_s`, is lost: its workers count as dead. Its
agent has a clock of its own for that and ends them (see `agent`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftrain.config import Config, changed_keys
from ftrain.local_host import LocalHost
from ftrain.remote_host import RemoteHost
from ftrain.wire import Guest, Message, Wire, WireError

if TYPE_CHECKING:
    import socket

    from ftrain.ears import Ears
    from ftrain.verdict import Verdict

GUESTS = 64  # who may be at the door at once
HOST_OWN_KEYS = frozenset({"run_dir", "compile_cache"})  # may differ between hosts
TELL_S = 2.0  # for the verdict to reach a host


def ids_of(rank: int, nodes: int, workers: int) -> list[int]:
    """The workers of a host: neighbours, as many as the other hosts have or one more."""
    return [w for w in range(workers) if host_of(w, nodes, workers) == rank]


def host_of(worker: int, nodes: int, workers: int) -> int:
    """The rank of the host that a worker belongs to."""
    return worker * nodes // workers


class Hosts:
    """All hosts of a run. With one host it listens nowhere.

    Args:
      local: this host, rank 0.
      config: the run's, as it is here.
      nodes: how many hosts.
      listener: where agents call, if there are any; and
      token: what they must prove to have.
      ears: of this process.
      on_here: called as on_here(host) when an agent has come, before any worker is started there.
      on_lost: called as on_lost(host, reason) when it is lost, before its workers count as dead.
      stop: called as stop(signal, again=...) for a signal that came to an agent.
      log: takes lines for the supervisor's log.
    """

    def __init__(
        self,
        local: LocalHost,
        config: Config,
        *,
        nodes: int,
        listener: socket.socket | None,
        token: bytes,
        ears: Ears,
        on_here: Callable[[RemoteHost], None],
        on_lost: Callable[[RemoteHost, str], None],
        stop: Callable[..., None],
        log: Callable[[str], None],
    ):
        self._config, self._nodes, self._token, self._ears = config, nodes, token, ears
        self._listener, self._log = listener, log
        self._on_here, self._on_lost = on_here, on_lost
        self._guests: set[Guest] = set()
        self._callers: dict[Wire, float] = {}  # proved, and yet to say hello; and until when
        self.others = [RemoteHost(r, stop=stop, log=log) for r in range(1, nodes)]
        self._all: list[LocalHost | RemoteHost] = [local, *self.others]
        if listener is not None:
            listener.setblocking(False)
            ears.watch(listener, self._answer)

    def of(self, worker: int) -> LocalHost | RemoteHost:
        """The host that a worker belongs to."""
        return self._all[host_of(worker, self._nodes, self._config.cluster.workers)]

    def workers_of(self, host: RemoteHost) -> list[int]:
        """The ids that belong to a host."""
        return ids_of(host.rank, self._nodes, self._config.cluster.workers)

    def missing(self) -> list[int]:
        """The ranks that have no agent now."""
        return [host.rank for host in self.others if host.wire is None]

    def tick(self, now: float) -> None:
        """Says that the head lives; hangs up on who proves nothing; gives up who is silent."""
        for guest in [g for g in self._guests if now > g.give_up_at]:
            self._hang_up(guest, "it has proved nothing")
        for wire in [w for w, until in self._callers.items() if now > until]:
            self._dismiss(wire)
        for host in self.others:
            host.tick(now)
            # Read first: this process may have been stopped itself, with all of it waiting.
            if host.wire is not None and now > host.wire.heard_at + self._patience_s:
                self._hear(host, host.wire)
            if host.wire is not None and now > host.wire.heard_at + self._patience_s:
                self._lose(host, f"no word for {now - host.wire.heard_at:.1f} s")

    @property
    def _patience_s(self) -> float:
        return self._config.cluster.heartbeat_timeout_s

    # At the door.

    def _answer(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone again, or there is no descriptor left for it
            return
        if len(self._guests) >= GUESTS:
            self._hang_up(min(self._guests, key=lambda g: g.give_up_at), "others wait")
        guest = Guest(sock, self._token)
        self._guests.add(guest)
        self._ears.watch(guest, lambda: self._hear_guest(guest))

    def _hear_guest(self, guest: Guest) -> None:
        try:
            guest.hear()
        except WireError as error:
            self._hang_up(guest, str(error))
            return
        if guest.wire is not None:
            self._guests.discard(guest)
            self._ears.forget(guest)
            wire = guest.wire
            self._callers[wire] = guest.give_up_at
            self._ears.watch(wire, lambda: self._hear_caller(wire))

    def _hang_up(self, guest: Guest, why: str) -> None:
        self._guests.discard(guest)
        self._ears.forget(guest)
        guest.close()
        self._log(f"hung up on a guest at the hosts' port: {why}")

    def _hear_caller(self, wire: Wire) -> None:
        try:
            hellos = wire.take()
        except WireError:
            self._dismiss(wire)
            return
        if not hellos:
            return
        del self._callers[wire]
        self._ears.forget(wire)
        refused = self._why_not(hellos[0])
        if refused:
            self._log(f"refused {hellos[0].get('name')} ({wire.peer_host}): {refused['reason']}")
            wire.send("refused", **refused)
            wire.flush_within(0.5)
            wire.close()
            return
        host = self.others[hellos[0]["rank"] - 1]
        if host.wire is not None:  # the same agent, which saw the end of its connection first
            self._lose(host, "its agent connected anew")
        self._ears.watch(wire, lambda: self._hear(host, wire))
        host.attach(wire, hellos[0])
        self._on_here(host)
        for message in hellos[1:]:
            host.take(message)

    def _dismiss(self, wire: Wire) -> None:
        del self._callers[wire]
        self._ears.forget(wire)
        wire.close()

    def _why_not(self, hello: Message) -> dict[str, Any] | None:
        """Why an agent may not take its rank, and whether another try can help; None if it may."""
        rank, nodes = hello.get("rank"), hello.get("nodes")
        if nodes != self._nodes or rank not in range(1, self._nodes):
            reason = (
                f"host {rank} of {nodes} to itself, and the head has hosts 0 to {self._nodes - 1}; "
                "give the same --nodes on every host, and each its own --node-rank"
            )
            return {"reason": reason, "again": False}
        theirs = Config.from_json(hello["config"])
        differ = {
            key: values
            for key, values in changed_keys(self._config, theirs).items()
            if key not in HOST_OWN_KEYS
        }
        if differ:
            reason = "; ".join(f"{k} is {a!r} on the head, {b!r} here" for k, (a, b) in differ.items())
            return {"reason": f"{reason}; start all hosts with one config", "again": False}
        host = self.others[rank - 1]
        if host.wire is not None and host.agent != hello["agent"]:
            reason = f"host {rank} is there already, {host.name} ({host.wire.peer_host})"
            return {"reason": f"{reason}; give each host its own --node-rank", "again": True}
        return None

    # Agents.

    def _hear(self, host: RemoteHost, wire: Wire) -> None:
        try:
            for message in wire.take():
                host.take(message)
                if host.wire is not wire:  # lost by what it said
                    return
        except WireError as error:
            self._lose(host, str(error))

    def _lose(self, host: RemoteHost, reason: str) -> None:
        self._ears.forget(host.wire)
        reason = f"the loss of host {host.rank} ({host.name}: {reason})"
        self._on_lost(host, reason)
        host.lose(reason)

    # The end.

    def end_all(self, timeout_s: float) -> None:
        """Waits for the ends of all workers elsewhere; what is left after that counts as dead."""
        deadline = time.monotonic() + timeout_s
        while any(h.has_workers for h in self.others) and time.monotonic() < deadline:
            self._ears.wait(0.05)
            self.tick(time.monotonic())
        for host in self.others:
            if host.wire is not None and host.has_workers:
                self._lose(host, f"its workers have not ended for {timeout_s:g} s")

    def dismiss_all(self, verdict: Verdict) -> None:
        """Tells every host how the run has ended, and hangs up."""
        wires = [host.wire for host in self.others if host.wire is not None]
        for wire in wires:
            wire.send("verdict", code=verdict.exit_code, reason=verdict.reason)
        deadline = time.monotonic() + TELL_S
        for wire in wires:
            wire.flush_within(max(0.0, deadline - time.monotonic()))
            self._ears.forget(wire)
            wire.close()
        for guest in list(self._guests):
            self._hang_up(guest, "the run is over")
        for wire in list(self._callers):
            self._dismiss(wire)
        if self._listener is not None:
            self._ears.forget(self._listener)
            self._listener.close()
