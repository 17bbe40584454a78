"""Which workers cannot reach one another, from the kernel's view of their connections. No jax.

When the network between two workers is broken, all members of a collective wait, none of them is at
work, and every one reaches the coordinator: nothing that they say tells the two from the others.
But TCP sends again what is not acknowledged, and the kernel counts how often. A stopped or slow
process is no such case: its kernel acknowledges for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftrain.tcp_sockets import TcpSocket

RESENT = 2  # times: at 0.6 s on a short way; a single loss gets through at the first


def pairs_without_answer(sockets: Mapping[int, list[TcpSocket]]) -> set[tuple[int, int]]:
    """The pairs of workers of which one sends to the other and gets no acknowledgement.

    Args:
      sockets: of each worker, on whatever host.

    Returns:
      Pairs of ids, the lower first.
    """
    listener = {s.local: w for w, own in sockets.items() for s in own if s.listens}
    # The far end of a connection is the socket with the same two ends, the other way round.
    end = {(s.local, s.peer): w for w, own in sockets.items() for s in own if not s.listens}
    pairs = set()
    for worker, own in sockets.items():
        for s in own:
            peer = end.get((s.peer, s.local), listener.get(s.peer))
            if s.resent >= RESENT and peer not in (None, worker):
                pairs.add((min(worker, peer), max(worker, peer)))
    return pairs
