"""The address that lets gloo's connecting go: of the kind of a member's, and nobody's."""

from __future__ import annotations

import socket
import struct

import pytest

from ftrain.communicators import address_of_nobody


def published(host: str, port: int, name: bytes = b"node-17") -> bytes:
    """What gloo publishes for a member there, as jaxlib 0.10.2 and 0.12.0.1 have it."""
    if ":" in host:
        sockaddr = struct.pack("<H", socket.AF_INET6) + struct.pack(">HI", port, 0)
        sockaddr += socket.inet_pton(socket.AF_INET6, host)
    else:
        sockaddr = struct.pack("<H", socket.AF_INET) + struct.pack(">H", port)
        sockaddr += socket.inet_pton(socket.AF_INET, host)
    rest = sockaddr + bytes(range(136 - len(sockaddr)))
    return struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(rest)) + rest


@pytest.mark.parametrize(
    ("host", "loopback"), [("10.77.0.2", "127.0.0.1"), ("fd77::2", "::1"), ("127.0.0.1",) * 2]
)
@pytest.mark.parametrize("name", [b"vm", b"a-host.of.a.long.name.example.org", b""])
def test_a_member_s_address_becomes_one_that_refuses(host, loopback, name):
    """Whatever its host is called: one that is lost would let the connecting wait."""
    given = published(host, 50123, name)
    assert address_of_nobody(given) == published(loopback, 1, name)
