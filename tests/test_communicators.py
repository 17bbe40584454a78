"""Cutting the data plane's connections: those on a view's ports and no others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from ftrain.communicators import Cutter, cut_connections, listening_ports
from ftrain.errors import AttemptFailedError
from ftrain.lane import LeftBehindError

DEADLINE_S = 20.0


class Network:
    """Loopback connections of this process; all are closed with the test."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    def listen(self, family: int = socket.AF_INET) -> tuple[socket.socket, int]:
        listener = socket.socket(family)
        self.sockets.append(listener)
        listener.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        listener.listen()
        return listener, listener.getsockname()[1]

    def connect(self, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
        """A connection's two ends: who connected, and who listened."""
        here = socket.create_connection(listener.getsockname()[:2], timeout=DEADLINE_S)
        there, _ = listener.accept()
        self.sockets += [here, there]
        here.settimeout(DEADLINE_S)
        there.settimeout(DEADLINE_S)
        return here, there


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    for sock in made.sockets:
        sock.close()


def is_open(here: socket.socket, there: socket.socket) -> bool:
    """Whether a byte goes through, both ways."""
    try:
        here.sendall(b"x")
        there.sendall(b"y")
    except OSError:
        return False
    return (there.recv(1), here.recv(1)) == (b"x", b"y")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_connections_on_a_given_port_are_cut(network, family):
    """At both ends that this process holds; whoever waits in one of them wakes up."""
    listener, port = network.listen(family)
    here, there = network.connect(listener)
    assert cut_connections({port}) == 2
    assert (here.recv(1), there.recv(1)) == (b"", b"")


def test_other_connections_survive(network):
    """User code's, gRPC's, the coordination service's."""
    view, port = network.listen()
    network.connect(view)
    others = [network.connect(network.listen()[0]) for _ in range(3)]
    cut_connections({port})
    assert all(is_open(*pair) for pair in others)


def test_a_port_is_the_connection_s_own_not_a_number_near_it(network):
    """Nothing is cut when no connection has the port."""
    listener, port = network.listen()
    pair = network.connect(listener)
    assert (
        cut_connections({1, port + 1 if port < 65535 else port - 1} - {pair[0].getsockname()[1]})
        == 0
    )
    assert is_open(*pair)


def test_either_end_s_port_will_do(network):
    """A member that connected to a peer, and one that was connected to."""
    listener, _ = network.listen()
    here, there = network.connect(listener)
    assert cut_connections({here.getsockname()[1]}) == 2


def test_other_sockets_are_left_alone(network):
    """A pair of Unix sockets and a UDP socket have no TCP port."""
    left, right = socket.socketpair()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    network.sockets += [left, right, udp]
    udp.bind(("127.0.0.1", 0))
    assert cut_connections({udp.getsockname()[1]}) == 0
    left.sendall(b"x")
    assert right.recv(1) == b"x"


def test_the_listening_socket_goes_on_listening(network):
    """Only connections are cut."""
    listener, port = network.listen()
    network.connect(listener)
    cut_connections({port})
    assert is_open(*network.connect(listener))


def test_a_collective_that_hangs_in_a_read_wakes_up(network):
    """That is what it is for: a thread blocked in recv on a peer that will never answer."""
    listener, port = network.listen()
    here, _ = network.connect(listener)
    woken = threading.Event()
    thread = threading.Thread(target=lambda: (here.recv(1), woken.set()))
    thread.start()
    cut_connections({port})
    assert woken.wait(DEADLINE_S)
    thread.join()


def test_listening_ports_are_those_that_this_process_listens_on(network):
    """Not those of its connections, nor of sockets that are only bound."""
    before = listening_ports()
    listener, port = network.listen()
    network.connect(listener)
    bound = socket.socket()
    network.sockets.append(bound)
    bound.bind(("127.0.0.1", 0))
    assert listening_ports() - before == {port}


def test_looking_leaves_no_descriptor_behind(network):
    """Views come and go all day."""
    network.connect(network.listen()[0])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        listening_ports()
        cut_connections(set())
    assert len(os.listdir("/proc/self/fd")) == before


def test_looking_leaves_blocking_sockets_blocking(network):
    """User code may have called socket.setdefaulttimeout; gloo's sockets are not its business."""
    listener, _ = network.listen()
    here, _ = network.connect(listener)
    here.settimeout(None)
    socket.setdefaulttimeout(5.0)
    try:
        listening_ports()
    finally:
        socket.setdefaulttimeout(None)
    assert os.get_blocking(here.fileno())


# The listener of a view.


class Failure:
    """A view's failure key, and the threads that wait for it."""

    def __init__(self) -> None:
        self.key, self.asked = threading.Event(), threading.Event()

    def wait(self) -> None:
        assert self.key.wait(DEADLINE_S)


def threads_named(name: str) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == name]


def end_of(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(DEADLINE_S)


def unreached() -> None:
    raise AssertionError("nobody is in a collective")


def test_a_failure_cuts_the_ports_of_the_view(network):
    """Own and peers'; nothing before the key is set, and nothing else."""
    failure = Failure()
    mine, own = network.listen()
    peer, theirs = network.listen()
    pairs = [network.connect(mine), network.connect(peer)]
    other = network.connect(network.listen()[0])
    Cutter(failure.wait, lambda: {theirs}, {own}, unreached)
    assert all(is_open(*pair) for pair in pairs)
    failure.key.set()
    end_of(threads_named("ftrain-cutter"))
    assert [is_open(*pair) for pair in pairs] == [False, False] and is_open(*other)


def test_a_failure_after_the_view_is_over_cuts_nothing(network):
    """Its ports may be another view's by now."""
    failure = Failure()
    listener, port = network.listen()
    pair = network.connect(listener)
    cutter = Cutter(failure.wait, lambda: {port}, {port}, unreached)
    cutter.end()
    failure.key.set()
    end_of(threads_named("ftrain-cutter"))
    assert is_open(*pair)


def test_peers_ports_are_asked_for_only_when_there_is_a_failure():
    """A view without failure costs no call to the service."""
    failure = Failure()
    cutter = Cutter(failure.wait, lambda: failure.asked.set() or set(), set(), unreached)
    assert not failure.asked.is_set()
    cutter.end()
    failure.key.set()
    end_of(threads_named("ftrain-cutter"))
    assert not failure.asked.is_set()


def test_a_service_that_goes_away_ends_the_listener_quietly():
    """`wait` raises ConnectionError when the view is over: no cut, no traceback."""

    def lost() -> None:
        raise ConnectionError("the service is gone")

    Cutter(lost, lambda: set(), set(), unreached)
    end_of(threads_named("ftrain-cutter"))
    assert threads_named("ftrain-cutter") == []


class Collective:
    """A call that goes on until it is let go, in a thread of whoever waits for it."""

    def __init__(self, cutter: Cutter) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()
        self.error: AttemptFailedError | None = None
        self.waiting = threading.Thread(target=self._wait_for, args=(cutter,), daemon=True)
        self.waiting.start()
        assert self.begun.wait(DEADLINE_S)

    def _wait_for(self, cutter: Cutter) -> None:
        try:
            cutter.run(self._go_on)
        except AttemptFailedError as error:
            self.error = error

    def _go_on(self) -> None:
        self.begun.set()
        assert self.ended.wait(DEADLINE_S)


def test_a_cancelled_collective_that_does_not_end_is_left_behind():
    """Whoever waits for it goes on, and it may end when it likes."""
    failure = Failure()
    cutter = Cutter(failure.wait, set, set())
    collective = Collective(cutter)
    failure.key.set()
    end_of([collective.waiting])
    assert isinstance(collective.error, LeftBehindError)
    cutter.end()
    end_of(threads_named("ftrain-cutter"))
    [left] = threads_named("ftrain-lane")
    collective.ended.set()
    end_of([left])
    assert threads_named("ftrain-lane") == []


def test_one_that_holds_the_device_is_told_and_nobody_let_go(monkeypatch):
    """Who was let go would meet the others again, who would wait for its device; it must end."""
    monkeypatch.setattr("ftrain.communicators.STUCK_S", 0.2)
    failure, stuck = Failure(), threading.Event()
    cutter = Cutter(failure.wait, set, set(), stuck.set)
    collective = Collective(cutter)
    failure.key.set()
    assert stuck.wait(DEADLINE_S) and collective.waiting.is_alive()
    collective.ended.set()
    end_of([collective.waiting])
    assert collective.error is None
    cutter.end()


def test_a_cancelled_collective_that_ends_is_not_told():
    """It takes a moment for the cut to be noticed."""
    failure, stuck = Failure(), threading.Event()
    cutter = Cutter(failure.wait, set, set(), stuck.set)
    with cutter.cancellable():
        failure.key.set()
        assert cutter.failed.wait(DEADLINE_S)
    end_of(threads_named("ftrain-cutter"))
    assert not stuck.is_set() and threads_named("ftrain-cutter") == []


def test_no_collective_begins_in_a_view_that_has_failed():
    """Its connections are cut already, and nobody would end it."""
    failure = Failure()
    cutter = Cutter(failure.wait, set, set())
    failure.key.set()
    end_of(threads_named("ftrain-cutter"))
    with pytest.raises(AttemptFailedError, match="has failed"):
        cutter.run(unreached)


def test_what_a_collective_returns_or_raises_comes_back():
    """From the thread of the view, one after the other."""
    failure = Failure()
    cutter = Cutter(failure.wait, set, set())
    assert [cutter.run(lambda n=n: n + 1) for n in range(3)] == [1, 2, 3]
    with pytest.raises(ValueError, match="Gloo"):
        cutter.run(lambda: (_ for _ in ()).throw(ValueError("Gloo all-reduce failed")))
    cutter.end()
    failure.key.set()
    end_of(threads_named("ftrain-cutter"))
