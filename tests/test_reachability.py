"""Who cannot reach whom, from the kernel's lists of connections."""

from __future__ import annotations

import os
import socket

from ftrain.reachability import RESENT, pairs_without_answer
from ftrain.tcp_sockets import TcpSocket, tcp_sockets


def established(local: int, peer: int, resent: int = 0) -> TcpSocket:
    return TcpSocket(local, peer, "established", resent)


def test_an_unanswered_end_names_both_workers():
    """Whichever of the two sent; worker 2's connection gets through."""
    sockets = {
        0: [established(5000, 40000), established(41000, 5002)],
        1: [established(40000, 5000, RESENT)],
        2: [established(5002, 41000)],
    }
    assert pairs_without_answer(sockets) == {(0, 1)}


def test_a_connection_that_is_not_there_yet_is_known_by_the_port_that_listens():
    """A view is being connected, and nobody takes the call."""
    sockets = {
        0: [TcpSocket(5000, 0, "listening", 0)],
        1: [TcpSocket(40000, 5000, "connecting", RESENT)],
    }
    assert pairs_without_answer(sockets) == {(0, 1)}


def test_one_loss_is_no_cut():
    """A packet that was sent again once may be answered yet."""
    sockets = {0: [established(5000, 40000)], 1: [established(40000, 5000, RESENT - 1)]}
    assert pairs_without_answer(sockets) == set()


def test_connections_to_others_are_nobody_s_fault_here():
    """A data set read over the network, and what a worker says to itself."""
    sockets = {0: [established(40000, 443, 9)], 1: [established(1, 2, 9), established(2, 1)]}
    assert pairs_without_answer(sockets) == set()


def test_sockets_of_a_process_are_read_as_they_are():
    """By descriptor, with ports and state."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as here:
            own = here.getsockname()[1]
            fds = listener.fileno(), here.fileno()
            found = tcp_sockets(os.getpid())
            assert found[fds[0]][:4] == (port, 0, "listening", 0)
            assert found[fds[1]][:4] == (own, port, "established", 0)
            assert found[fds[1]].peer == found[fds[0]].local
    assert tcp_sockets().keys().isdisjoint(fds)


def test_a_process_that_has_ended_has_no_sockets():
    """It may end while we look, and be reaped later or sooner."""
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert tcp_sockets(pid) == {}
    os.waitpid(pid, 0)
