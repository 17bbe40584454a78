"""Connections between supervisors: who is let in, who is not, and what cannot be slipped in."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ftrain.door import Door
from ftrain.ears import Ears
from ftrain.endpoint import Endpoint
from ftrain.errors import ConfigError
from ftrain.meeting_point import MeetingPoint
from ftrain.run_token import given_token, make_token, read_token
from ftrain.wire import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Wire,
    WireError,
    call_head,
    proof,
)

TOKEN = b"the token of this run"


class Head:
    """A door that is answered in a thread; who is let in, and what was said about the others."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.address = "127.0.0.1", self.port
        self.let_in: list[tuple[Wire, list]] = []
        self.told: list[str] = []
        self._ears, self._over = Ears(), threading.Event()
        meeting = MeetingPoint(2, Endpoint(*self.address), self.listener, TOKEN)
        self._door = Door(
            meeting, self._ears, lambda w, m: self.let_in.append((w, m)), self.told.append
        )
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        while not self._over.is_set():
            self._ears.wait(0.02)
            self._door.tick(time.monotonic())
        self._door.close()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        for wire, _ in self.let_in:
            wire.close()


@pytest.fixture
def head(monkeypatch) -> Iterator[Head]:
    monkeypatch.setattr("ftrain.wire.PROVE_S", 1.0)
    head = Head()
    yield head
    head.end()


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def heard(sock: socket.socket) -> bytes:
    """All that comes until the other side hangs up."""
    sock.settimeout(20)
    data = b""
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(1 << 16):
            data += chunk
    return data


def call(head: Head) -> Wire:
    """Somebody with the token, let in."""
    wire = call_head(head.address, TOKEN, 10)
    count = len(head.let_in)
    wire.send("hello", rank=1)
    wait_for(lambda: len(head.let_in) > count)
    return wire


def test_who_has_the_token_is_let_in_and_both_understand_one_another(head):
    """Whatever is said, in any order, of any size that is allowed."""
    with contextlib.closing(call(head)) as wire:
        [(other, messages)] = head.let_in
        assert messages == [{"kind": "hello", "rank": 1}]
        other.send("welcome", text="é" * 1_000_000)  # more than the kernel takes at once
        got = []
        while not got:
            other.flush()
            got = wire.take()
        assert got == [{"kind": "welcome", "text": "é" * 1_000_000}]
        wire.send("a")
        wire.send("b", n=[1, None])
        got = []
        wait_for(lambda: got.extend(other.take()) or len(got) == 2)
        assert got == [{"kind": "a"}, {"kind": "b", "n": [1, None]}]


def test_another_token_is_told_to_its_owner_and_opens_nothing(head):
    """Neither side believes the other."""
    with pytest.raises(WireError, match="it hung up: it has another token"):
        call_head(head.address, b"another token", 10)
    wait_for(lambda: head.told)
    assert head.let_in == [] and "it has not the run's token" in head.told[0]


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x" * 10_000,
        bytes(NONCE_BYTES + PROOF_BYTES),
        os.urandom(1 << 20),
    ],
)
def test_an_outsider_gets_a_random_number_and_is_hung_up_on_within_seconds(head, said):
    """Whatever it says, or nothing; and others are let in meanwhile."""
    with socket.create_connection(head.address) as outsider:
        with contextlib.suppress(ConnectionError):
            outsider.sendall(said)
        call(head).close()
        assert len(heard(outsider)) <= NONCE_BYTES  # a reset may take even that back
    assert len(head.let_in) == 1


def test_a_proof_that_was_overheard_is_of_no_use(head):
    """The head asks for another one each time."""
    with socket.create_connection(head.address) as sock:
        nonce, mine = sock.recv(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        overheard = mine + proof(TOKEN, "guest", nonce, mine)
        sock.sendall(overheard)
        assert sock.recv(PROOF_BYTES) == proof(TOKEN, "head", nonce, mine)
    with socket.create_connection(head.address) as sock:
        sock.sendall(overheard)
        assert len(heard(sock)) <= NONCE_BYTES
    assert head.let_in == []


def test_a_head_without_the_token_is_not_believed():
    """It may only repeat what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(bytes(NONCE_BYTES))
                said = sock.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
                sock.sendall(said[NONCE_BYTES:])

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(WireError, match="did not prove"):
            call_head(("127.0.0.1", listener.getsockname()[1]), TOKEN, 10)
        thread.join()


def pair() -> tuple[socket.socket, socket.socket, Wire]:
    """A wire to the guest, and both ends of what it goes over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    return ours, theirs, Wire(theirs, b"key", "guest")


def frames_of(*kinds: str, key: bytes = b"key", side: str = "head") -> list[bytes]:
    """What a side with that key sends, each message by itself."""
    ours, theirs, other = pair()
    with ours, contextlib.closing(other):
        wire = Wire(ours, key, side)
        frames = []
        for kind in kinds:
            wire.send(kind)
            theirs.setblocking(True)
            frames.append(theirs.recv(1 << 16))
    return frames


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b: a.replace(b'"first"', b'"forst"') + b,  # changed
        lambda a, b: a + a,  # repeated
        lambda a, b: b,  # one taken out
        lambda a, b: frames_of("x", side="guest")[0],  # its own sent back
        lambda a, b: frames_of("x", key=b"another")[0],  # made by somebody else
        lambda a, b: (MAX_FRAME_BYTES + 1).to_bytes(4, "big") + bytes(16),  # of any size
    ],
)
def test_what_was_changed_on_the_way_ends_the_connection(change):
    """No message that the other side has not said in that place is taken."""
    first, second = frames_of("first", "second")
    ours, _, wire = pair()
    with ours, contextlib.closing(wire):
        ours.sendall(change(first, second))
        with pytest.raises(WireError):
            while True:
                assert wire.take() in ([], [{"kind": "first"}])
                time.sleep(0.005)


def test_the_end_of_a_connection_is_told_after_all_that_was_said():
    """A verdict is read although the head has hung up."""
    ours, _, wire = pair()
    with contextlib.closing(wire):
        with ours:
            ours.sendall(b"".join(frames_of("first", "second")))
        got = []
        with pytest.raises(WireError, match="closed"):
            while True:
                got += wire.take()
        assert [m["kind"] for m in got] == ["first", "second"]


def test_a_token_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    """A host that continues the run has the same."""
    assert read_token(str(tmp_path)) is None
    token = make_token(str(tmp_path))
    assert make_token(str(tmp_path)) == read_token(str(tmp_path)) == token
    assert len(token) == 64
    assert [p.name for p in tmp_path.iterdir()] == ["token"]
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_given_token_is_taken_from_the_file_or_else_the_environment(tmp_path):
    """A short one is refused, and so is a file that is not there, each with what to do."""
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    environ = {"FTRAIN_TOKEN": "fedcba9876543210"}
    assert given_token(environ, str(file)) == b"0123456789abcdef"
    assert given_token(environ, None) == b"fedcba9876543210"
    assert given_token({}, None) is None
    with pytest.raises(ConfigError, match="FTRAIN_TOKEN: a token of 3 bytes .*openssl"):
        given_token({"FTRAIN_TOKEN": "abc"}, None)
    with pytest.raises(ConfigError, match="No such file or directory; write 16 bytes or more"):
        given_token({}, str(tmp_path / "none"))
