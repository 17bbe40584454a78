"""The hosts of a run as its head has them: which ids belong where, who is there, who is lost.

The head is host 0, or has followed it. For every other rank an agent connects, proves that it has
the run's token and says hello, with nothing running. From then on both sides speak at least once a
second. A host whose connection ends, or that is silent for `heartbeat_timeout_s`, is lost: its
workers count as dead. Its agent has a clock of its own for that and ends them (see `agent`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftrain.config import HOST_OWN_KEYS, Config, changed_keys
from ftrain.door import Door
from ftrain.local_host import LocalHost
from ftrain.remote_host import RemoteHost
from ftrain.wire import VERSION, Message, Wire, see_off

if TYPE_CHECKING:
    from ftrain.ears import Ears
    from ftrain.headship import Headship
    from ftrain.verdict import Verdict

REFUSE_S = 0.5  # for that to reach a host; the run waits meanwhile


def ids_of(rank: int, nodes: int, workers: int) -> list[int]:
    """The workers of a host: neighbours, as many as the other hosts have or one more."""
    return [w for w in range(workers) if host_of(w, nodes, workers) == rank]


def host_of(worker: int, nodes: int, workers: int) -> int:
    """The rank of the host that a worker belongs to."""
    return worker * nodes // workers


class Hosts:
    """All hosts of a run. With one host it listens nowhere.

    Args:
      local: this host.
      config: the run's, as it is here.
      headship: where agents call, and what they must prove to have.
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
        headship: Headship,
        *,
        ears: Ears,
        on_here: Callable[[RemoteHost], None],
        on_lost: Callable[[RemoteHost, str], None],
        stop: Callable[..., None],
        log: Callable[[str], None],
    ):
        self._config, self._ears, self._log = config, ears, log
        self._platform = local.platform
        meeting = headship.meeting
        self._nodes, self._lease = meeting.nodes if meeting else 1, headship.lease
        self._rank = headship.rank
        self._on_here, self._on_lost = on_here, on_lost
        others = {
            r: RemoteHost(r, stop=stop, log=log) for r in range(self._nodes) if r != self._rank
        }
        self.others = list(others.values())
        self._all: dict[int, LocalHost | RemoteHost] = {self._rank: local, **others}
        self._door = Door(meeting, ears, self._on_hello, log) if meeting else None

    def of(self, worker: int) -> LocalHost | RemoteHost:
        """The host that a worker belongs to."""
        return self._all[self.rank_of(worker)]

    def rank_of(self, worker: int) -> int:
        """Its rank."""
        return host_of(worker, self._nodes, self._config.cluster.workers)

    def workers_of(self, host: RemoteHost) -> list[int]:
        """The ids that belong to a host."""
        return ids_of(host.rank, self._nodes, self._config.cluster.workers)

    def is_here(self, worker: int) -> bool:
        """Whether the host that a worker belongs to has its supervisor."""
        host = self.of(worker)
        return not isinstance(host, RemoteHost) or host.wire is not None

    def missing(self) -> list[int]:
        """The ranks that have no agent now."""
        return [host.rank for host in self.others if host.wire is None]

    def tick(self, now: float) -> None:
        """Says that the head lives, and gives up who is silent."""
        if self._door is not None:
            self._door.tick(now)
        here = [host.rank for host in self.others if host.wire is not None]
        for host in self.others:
            host.tick(now, here)
            # Read first: this process may have been stopped itself, with all of it waiting.
            if host.wire is not None and now > host.wire.heard_at + self._patience_s:
                self._hear(host, host.wire)
            if host.wire is not None and now > host.wire.heard_at + self._patience_s:
                self._lose(host, f"no word for {now - host.wire.heard_at:.1f} s")

    @property
    def _patience_s(self) -> float:
        return self._config.cluster.heartbeat_timeout_s

    # Who calls.

    def _on_hello(self, wire: Wire, messages: list[Message]) -> None:
        hello = messages[0]
        refused = self._why_not(hello)
        if refused:
            self._log(f"refused {hello.get('name')} ({wire.peer_host}): {refused['reason']}")
            wire.send("refused", **refused)
            see_off({wire}, REFUSE_S)
            return
        host = self._all[hello["rank"]]
        if host.wire is not None:  # the same agent, which saw the end of its connection first
            self._lose(host, "its agent connected anew")
        self._ears.watch(wire, lambda: self._hear(host, wire))
        host.attach(wire, hello, **self._about())
        self._on_here(host)
        for message in messages[1:]:
            host.take(message)

    def _about(self) -> dict[str, Any]:
        if self._lease is None:
            return {}
        claim = self._lease.claim
        return {"generation": claim.generation, "holder": claim.holder, "rank": claim.rank}

    def _why_not(self, hello: Message) -> dict[str, Any] | None:
        """Why an agent may not take its rank, and whether another try can help; None if it may."""
        if hello.get("version") != VERSION:
            reason = "another version of ftrain than the head's; install one on every host"
            return {"reason": reason, "again": False}
        rank, nodes = hello["rank"], hello["nodes"]
        if nodes != self._nodes or rank == self._rank or rank not in self._all:
            reason = (
                f"host {rank} of {nodes} to itself, and the head, host {self._rank}, has hosts 0 "
                f"to {self._nodes - 1}; give the same --nodes on every host, and each its own "
                "--node-rank"
            )
            return {"reason": reason, "again": False}
        if hello["platform"] != self._platform:
            reason = (
                f"platform {hello['platform']} there, {self._platform} on the head; "
                "set cluster.platform"
            )
            return {"reason": reason, "again": False}
        if self._lease is not None and hello["generation"] > self._lease.claim.generation:
            return {"reason": "another host is the head now", "again": True}
        theirs = Config.from_json(hello["config"])
        differ = {
            key: values
            for key, values in changed_keys(self._config, theirs).items()
            if key not in HOST_OWN_KEYS
        }
        if differ:
            reason = "; ".join(
                f"{k} is {a!r} on the head, {b!r} here" for k, (a, b) in differ.items()
            )
            return {"reason": f"{reason}; start all hosts with one config", "again": False}
        host = self._all[rank]
        if host.wire is not None and host.agent != hello["agent"]:
            reason = f"host {rank} is there already, {host.name} ({host.wire.peer_host})"
            return {"reason": f"{reason}; give each host its own --node-rank", "again": True}
        return None

    # Agents.

    def _hear(self, host: RemoteHost, wire: Wire) -> None:
        if why := wire.pass_on(host.take, lambda: host.wire is wire):
            self._lose(host, why)

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

    def abandon(self) -> None:
        """Hangs up without a word: another host is the head now, and the agents are its."""
        for host in self.others:
            if host.wire is not None:
                self._ears.forget(host.wire)
            host.forget()
        if self._door is not None:
            self._door.close()

    def dismiss_all(self, verdict: Verdict, *, durable: bool = False) -> None:
        """Tells every host how the run has ended, and hangs up.

        Args:
          verdict: how.
          durable: its last state is on disk, and snapshots are of no use any more.
        """
        wires = {host.wire for host in self.others if host.wire is not None}
        for wire in wires:
            self._ears.forget(wire)
            wire.send("verdict", code=verdict.exit_code, reason=verdict.reason, durable=durable)
        see_off(wires)
        if self._door is not None:
            self._door.close()
