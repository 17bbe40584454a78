"""The addresses that this host has, from the kernel (Linux, rtnetlink). No jax."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_GET_ADDRESSES, _NEW_ADDRESS, _DONE = 22, 20, 3
_REQUEST_DUMP = 0x301
_OWN_ADDRESS, _LOCAL_ADDRESS = 1, 2  # of a point-to-point link the first is the far end's


def local_addresses() -> dict[str, str]:
    """Every IPv4 and IPv6 address of this host and the interface that it is on.

    Raises:
      OSError: the kernel does not tell (a sandbox without netlink).
    """
    names = dict(socket.if_nameindex())
    found = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        request = struct.pack("=IHHIIBxxxI", 24, _GET_ADDRESSES, _REQUEST_DUMP, 1, 0, 0, 0)
        kernel.settimeout(5)
        kernel.send(request)
        while True:
            for kind, body in _messages(kernel.recv(1 << 16)):
                if kind == _DONE:
                    return found
                if kind == _NEW_ADDRESS:
                    family, index = body[0], struct.unpack_from("=I", body, 4)[0]
                    parts = dict(_attributes(body[8:]))
                    raw = parts.get(_LOCAL_ADDRESS, parts.get(_OWN_ADDRESS))
                    if raw is not None:
                        found[socket.inet_ntop(family, raw)] = names.get(index, str(index))


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 16:
        length, kind = struct.unpack_from("=IH", data)
        yield kind, data[16:length]
        data = data[(length + 3) & ~3 :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind, data[4:length]
        data = data[(length + 3) & ~3 :]
