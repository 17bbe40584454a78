"""Messages between the supervisors of a run: sealed frames over TCP, and how a guest is let in.

The head listens, and speaks first: 32 random bytes. Who connects answers with 32 of its own and a
proof that it has the run's token, and gets the head's proof. Until then nothing is parsed and
nothing told; whoever proves nothing within `PROVE_S` is hung up on. Then come frames:

    length (4 bytes, big-endian) | seal (16 bytes) | JSON

A seal is a keyed hash over direction, count and JSON, so that nobody on the way can add, change,
repeat or drop a frame unseen. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

NONCE_BYTES = 32
PROOF_BYTES = 32
PROVE_S = 5.0  # for a guest, from its connection to its proof and first message
SEE_OFF_S = 2.0
VERSION = 2  # of what is said, in the first message of a guest
MAX_FRAME_BYTES = 16 << 20  # of JSON; what workers report is kilobytes
_HEADER = struct.Struct(">I16s")

Message = dict[str, Any]


class WireError(Exception):
    """Raised when the other side is not, or no longer, one of ours; the message says in what."""


class SilentError(WireError):
    """Raised when it takes connections and says nothing: a host that is stopped does that too."""


def proof(token: bytes, side: str, head_nonce: bytes, guest_nonce: bytes) -> bytes:
    """What only a holder of the token can answer to the two nonces, as `head` or `guest`."""
    return hmac.digest(token, side.encode() + b"\0" + head_nonce + guest_nonce, hashlib.sha256)


class Wire:
    """One connection to a supervisor that has proved itself. Never blocks but in `flush_within`.

    Args:
      sock: connected.
      key: both sides', of this connection alone.
      side: `head` or `guest`, which this one is.
    """

    def __init__(self, sock: socket.socket, key: bytes, side: str):
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._key = sock, key
        self._side, self._other = side, "guest" if side == "head" else "head"
        self._sent = self._taken = 0  # frames
        self._out, self._in = bytearray(), bytearray()
        self.peer_host = sock.getpeername()[0]
        self.heard_at = time.monotonic()  # when the other side last said something

    def fileno(self) -> int:
        """Readable when there is a message, or the end."""
        return self._sock.fileno()

    @property
    def backlog(self) -> int:
        """Bytes that are yet to be sent."""
        return len(self._out)

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message, as soon as the other side takes it. One that has gone hears nothing."""
        body = json.dumps({"kind": kind, **fields}).encode()
        self._sent += 1
        self._out += _HEADER.pack(len(body), self._seal(self._side, self._sent, body)) + body
        self.flush()

    def flush(self) -> None:
        """Sends what can be sent."""
        with contextlib.suppress(OSError):  # not now; or it has gone, and reading tells
            while self._out:
                del self._out[: self._sock.send(self._out)]

    def flush_within(self, timeout_s: float, backlog: int = 0) -> None:
        """Waits until no more than `backlog` bytes are left to send, but not longer than that."""
        deadline = time.monotonic() + timeout_s
        while len(self._out) > backlog and (left_s := deadline - time.monotonic()) > 0:
            select.select([], [self._sock], [], left_s)
            before = len(self._out)
            self.flush()
            if len(self._out) == before and self._has_ended():
                return

    def _has_ended(self) -> bool:
        try:
            self._sock.send(b"")
            return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        except BlockingIOError:
            return False
        except OSError:
            return True

    def take(self) -> list[Message]:
        """The messages that have come.

        Raises:
          WireError: the connection has ended, or what came is none of the other side's. The
            messages before it are taken by an earlier call.
        """
        ended = ""
        try:
            while chunk := self._sock.recv(1 << 18):
                self._in += chunk
                self.heard_at = time.monotonic()
                if len(self._in) > MAX_FRAME_BYTES:
                    break
            else:
                ended = "its connection was closed"
        except BlockingIOError:
            pass
        except OSError as error:
            ended = f"its connection was lost: {error.strerror or error}"
        messages = self._whole_frames()
        if ended and not messages:
            raise WireError(ended)
        return messages

    def _whole_frames(self) -> list[Message]:
        messages = []
        while len(self._in) >= _HEADER.size:
            length, seal = _HEADER.unpack_from(self._in)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a message of {length} bytes, and {MAX_FRAME_BYTES} are allowed")
            if len(self._in) < _HEADER.size + length:
                break
            body = bytes(self._in[_HEADER.size : _HEADER.size + length])
            del self._in[: _HEADER.size + length]
            self._taken += 1
            if not hmac.compare_digest(seal, self._seal(self._other, self._taken, body)):
                raise WireError("a message whose seal is wrong")
            messages.append(json.loads(body))
        return messages

    def _seal(self, side: str, count: int, body: bytes) -> bytes:
        text = side.encode() + struct.pack(">Q", count) + body
        return hmac.digest(self._key, text, hashlib.sha256)[:16]

    def pass_on(self, take: Callable[[Message], None], goes_on: Callable[[], bool]) -> str:
        """Hands over what has come, a message at a time, as long as `goes_on` says so after each.

        Returns:
          Why the connection is over, or "".
        """
        try:
            for message in self.take():
                take(message)
                if not goes_on():  # over by what it said
                    break
        except WireError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Ends the connection."""
        self._sock.close()


class Guest:
    """Who has connected to the head and has proved nothing yet.

    Attributes:
      wire: once it has.
    """

    def __init__(self, sock: socket.socket, token: bytes):
        sock.setblocking(False)
        self._sock, self._token = sock, token
        self._nonce, self._heard = secrets.token_bytes(NONCE_BYTES), b""
        self.give_up_at = time.monotonic() + PROVE_S
        self.wire: Wire | None = None
        with contextlib.suppress(OSError):  # it has gone again; reading tells
            sock.send(self._nonce)

    def fileno(self) -> int:
        """Readable when it has said something, or has gone."""
        return self._sock.fileno()

    def hear(self) -> None:
        """Takes what it says until it has proved itself.

        Raises:
          WireError: it has gone, or has not the token.
        """
        wanted = NONCE_BYTES + PROOF_BYTES - len(self._heard)
        try:
            chunk = self._sock.recv(wanted)  # not a byte of what comes after the proof
        except BlockingIOError:
            return
        except OSError as error:
            raise WireError(str(error)) from None
        if not chunk:
            raise WireError("it closed the connection")
        self._heard += chunk
        if len(chunk) < wanted:
            return
        theirs, shown = self._heard[:NONCE_BYTES], self._heard[NONCE_BYTES:]
        if not hmac.compare_digest(shown, proof(self._token, "guest", self._nonce, theirs)):
            raise WireError("it has not the run's token")
        with contextlib.suppress(OSError):
            self._sock.send(proof(self._token, "head", self._nonce, theirs))
        self.wire = Wire(self._sock, proof(self._token, "frames", self._nonce, theirs), "head")

    def close(self) -> None:
        """Hangs up."""
        self._sock.close()


def see_off(wires: Iterable[Wire], timeout_s: float = SEE_OFF_S) -> None:
    """Closes connections once the last word on each has been heard.

    The other sides hang up when they have it. To do so first, with words of theirs unread, would be
    a reset, which takes the last word back.
    """
    wires = set(wires)
    deadline, waiting = time.monotonic() + timeout_s, set(wires)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for wire in select.select(list(waiting), [], [], min(left_s, 0.1))[0]:
            try:
                wire.take()
            except WireError:
                waiting.discard(wire)
        for wire in waiting:
            wire.flush()
    for wire in wires:
        wire.close()


def call_head(address: tuple[str, int], token: bytes, timeout_s: float = PROVE_S) -> Wire:
    """Connects to the head's supervisor, both proving that they have the token.

    Args:
      address: a literal IPv4 or IPv6 address, and the port.
      token: the run's.
      timeout_s: for each part of it.

    Raises:
      OSError: nobody can be reached there.
      WireError: who answers is not the head, or has another token.
    """
    sock = socket.create_connection(address, timeout=timeout_s)
    try:
        theirs = _exactly(sock, NONCE_BYTES, "what answers there is not ftrain")
        mine = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(mine + proof(token, "guest", theirs, mine))
        shown = _exactly(sock, PROOF_BYTES, "it hung up: it has another token, or is not ftrain")
        if not hmac.compare_digest(shown, proof(token, "head", theirs, mine)):
            raise WireError("it did not prove that it has the run's token")
        return Wire(sock, proof(token, "frames", theirs, mine), "guest")
    except BaseException:
        sock.close()
        raise


def _exactly(sock: socket.socket, count: int, otherwise: str) -> bytes:
    data = b""
    while len(data) < count:
        try:
            chunk = sock.recv(count - len(data))
        except TimeoutError:
            raise SilentError(f"{otherwise} (silent)") from None
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise WireError(otherwise)
        data += chunk
    return data
