"""The head's view of another host: what its agent says becomes what a local process would do."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ftrain.hosts import host_of, ids_of
from ftrain.local_host import Heard
from ftrain.processes import Exit
from ftrain.remote_host import RemoteChild, RemoteHost


class FakeWire:
    """Keeps what is sent."""

    def __init__(self):
        self.sent: list[dict[str, Any]] = []
        self.closed = False

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append({"kind": kind, **fields})

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Told:
    """What was heard of one worker."""

    def __init__(self):
        self.calls: list[tuple] = []
        self.heard = Heard(
            started=lambda pid: self.calls.append(("started", pid)),
            line=lambda pipe, line: self.calls.append((pipe, line)),
            ended=lambda ended, lost: self.calls.append(("ended", ended, lost)),
            late=lambda line: self.calls.append(("late", line)),
        )


@pytest.fixture
def host() -> RemoteHost:
    host = RemoteHost(1, stop=lambda signal, again: None, log=lambda line: None)
    host.attach(FakeWire(), {"name": "b", "agent": "a1"})
    assert not host.can_start()  # its template is on its way
    host.take({"kind": "able", "able": True})
    assert host.can_start()
    return host


def start(host: RemoteHost, worker: int = 2) -> tuple[RemoteChild, Told]:
    told = Told()
    child, _ = host.start(worker, 0, "10.0.0.1:1", told.heard)
    return child, told


def test_a_worker_s_life_is_told_as_it_happens(host):
    """Started with its pid there, heard line by line, and its end as the kernel there told it."""
    child, told = start(host)
    for message in (
        {"kind": "started", "child": child.number, "pid": 77},
        {"kind": "line", "child": child.number, "pipe": "stdout", "line": "hello"},
        {"kind": "record", "seq": 1, "child": child.number, "line": "{}"},
        {"kind": "ended", "child": child.number, "exit": [None, "SIGKILL"]},
        {"kind": "line", "child": child.number, "pipe": "stdout", "line": "too late"},
    ):
        host.take(message)
    assert told.calls == [
        ("started", 77),
        ("stdout", "hello"),
        ("records", "{}"),
        ("ended", Exit(None, "SIGKILL"), ""),
    ]
    assert child.pid == 77 and not host.has_workers


def test_a_beat_is_read_on_this_host_s_clock(host):
    """Clocks of two hosts have nothing in common; how long a phase has lasted they have."""
    child, _ = start(host)
    beat = {"reading": [4, 3, "reduce", 5.0], "stopped": True, "sockets": [[1, 2, "", 3, "a", "b"]]}
    host.take({"kind": "beats", "beats": [[child.number, beat], [99, beat]]})
    reading = child.beat.read()
    assert (reading.round, reading.step, reading.phase) == (4, 3, "reduce")
    assert time.monotonic() - reading.since == pytest.approx(5.0, abs=2.0)
    assert child.is_stopped() and child.sockets()[0].peer == ("b", 2)


def test_all_workers_of_a_lost_host_end_and_what_they_said_before_is_kept(host):
    """Their records come when the agent is back, each once, and not as a living worker's."""
    child, told = start(host)
    host.take({"kind": "started", "child": child.number, "pid": 77})
    host.take({"kind": "record", "seq": 1, "child": child.number, "line": "one"})
    host.lose("the loss of host 1")
    assert not host.can_start() and host.wire is None
    child.kill()  # says nothing to nobody
    host.attach(FakeWire(), {"name": "b", "agent": "a1"})
    assert host.wire.sent == [{"kind": "welcome", "taken": 1}]
    for seq, line in ((1, "one"), (2, "two"), (2, "two")):
        host.take({"kind": "record", "seq": seq, "child": child.number, "line": line})
    assert told.calls == [
        ("started", 77),
        ("records", "one"),
        ("ended", Exit(None, "SIGKILL"), "the loss of host 1"),
        ("late", "two"),
    ]


def test_a_worker_that_ends_before_it_is_started_has_a_start_in_the_records(host):
    """Ended while it waited for the template, or lost with its host."""
    for end in (
        lambda child: host.take(
            {"kind": "ended", "child": child.number, "exit": [None, "SIGKILL"]}
        ),
        lambda child: host.lose("gone"),
    ):
        child, told = start(host)
        end(child)
        assert [call[0] for call in told.calls] == ["started", "ended"]


def test_another_agent_s_records_are_counted_anew(host):
    """Its first record has the number that the last agent's first had."""
    child, _ = start(host)
    host.take({"kind": "record", "seq": 1, "child": child.number, "line": "one"})
    host.lose("gone")
    host.attach(FakeWire(), {"name": "c", "agent": "a2"})
    child, told = start(host)
    host.take({"kind": "record", "seq": 1, "child": child.number, "line": "first"})
    assert told.calls == [("records", "first")]


def test_clocks_are_compared_by_the_quickest_answer(host):
    """And taken for equal where the way there and back leaves that open."""
    now = time.monotonic()
    host.take({"kind": "pong", "t": now - 0.01, "clock": time.time() + 30})
    assert host.clock_offset_s == pytest.approx(30, abs=1.0)
    host.take({"kind": "pong", "t": now - 10, "clock": time.time() + 40})
    assert host.clock_offset_s == pytest.approx(30, abs=1.0)


@pytest.mark.parametrize(
    ("nodes", "workers", "shares"),
    [
        (1, 4, [[0, 1, 2, 3]]),
        (2, 4, [[0, 1], [2, 3]]),
        (3, 4, [[0, 1], [2], [3]]),
        (4, 4, [[0], [1], [2], [3]]),
        (2, 5, [[0, 1, 2], [3, 4]]),
    ],
)
def test_each_host_has_neighbours_and_one_more_or_less_than_others(nodes, workers, shares):
    """And every id belongs to one host."""
    assert [ids_of(rank, nodes, workers) for rank in range(nodes)] == shares
    for rank, ids in enumerate(shares):
        assert {host_of(worker, nodes, workers) for worker in ids} == {rank}
