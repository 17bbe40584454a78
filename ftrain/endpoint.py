"""A host and a port, as a command line has them: read without asking anybody. No jax."""

from __future__ import annotations

import contextlib
import ipaddress
from typing import NamedTuple

from ftrain.errors import AddressError


class Endpoint(NamedTuple):
    """A host and a port; its text has an IPv6 address in brackets, as gRPC takes it."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, what: str) -> Endpoint:
    """Reads HOST:PORT: a name, an IPv4 address or an IPv6 address in brackets.

    Args:
      text: as given.
      what: the flag or variable that it came from, for the message.

    Raises:
      AddressError: it is none of these. A bare IPv6 address has colons too: it is never split.
    """
    host, colon, port = text.rpartition(":")
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
        if not bracket or not is_ip(host, 6):
            raise AddressError(f"{what} {text}: no IPv6 address in brackets; write [ADDRESS]:PORT")
    elif is_ip(text, 6):
        raise AddressError(
            f"{what} {text}: an IPv6 address without brackets, so where its port begins is not "
            f"known; write [{text}]:PORT"
        )
    elif ":" in host:
        raise AddressError(f"{what} {text}: more than one colon; write HOST:PORT or [IPv6]:PORT")
    if not colon or not port:
        raise AddressError(f"{what} {text}: no port; write {text.rstrip(':')}:PORT")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise AddressError(f"{what} {text}: port {port} is not 0 to 65535; write HOST:PORT")
    if not host or set(host) & set(" \t/@?#[]"):
        raise AddressError(f"{what} {text}: {host!r} is no host name; write HOST:PORT, no URL")
    return Endpoint(host, int(port))


def is_loopback(ip: str) -> bool:
    """Whether it is this host itself and nobody else's."""
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


def is_routable(ip: str) -> bool:
    """Whether another host can reach it without being told the interface."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    return not (address.is_loopback or address.is_link_local)


def is_ip(text: str, version: int | None = None) -> bool:
    """Whether it is an address and no name; of version 4 or 6, or of any."""
    with contextlib.suppress(ValueError):
        return version in (None, ipaddress.ip_address(text.partition("%")[0]).version)
    return False


def is_unspecified(host: str) -> bool:
    """Whether it is 0.0.0.0 or [::]: every address of whoever listens there."""
    return is_ip(host) and ipaddress.ip_address(host.partition("%")[0]).is_unspecified
