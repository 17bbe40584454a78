"""Addresses of hosts: read, resolved, checked against what this host has. No jax.

Whatever cannot work is told within `RESOLVE_S` and a little, with the address and what to give
instead: JAX's own clients retry for minutes and then name neither.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ftrain.endpoint import Endpoint, is_ip, is_loopback, is_routable, is_unspecified
from ftrain.errors import AddressError, UnresolvedError
from ftrain.interfaces import local_addresses

RESOLVE_S = 10.0  # for a name to resolve; a pod's may take longer, see `placement`
RETRY_S = 0.5
MAX_SHOWN = 6  # addresses in a message

Resolver = Callable[[str], Sequence[str]]


def system_resolver(host: str) -> list[str]:
    """The addresses of a name or an address, each once, in the system's order of preference.

    Raises:
      OSError: there is none.
    """
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def resolve(
    host: str, *, patience_s: float = RESOLVE_S, resolver: Resolver = system_resolver
) -> list[str]:
    """The IP addresses of a host; asked again until there is one, for `patience_s` at most.

    Raises:
      UnresolvedError: there is none yet, or the resolver itself has not answered.
    """
    answers: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    end, why = time.monotonic() + patience_s, [f"no answer from the resolver in {patience_s:g} s"]

    def ask() -> None:
        while True:
            try:
                answers.put(list(resolver(host)))
                return
            except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63
                why[0] = getattr(error, "strerror", None) or str(error)
            if time.monotonic() + RETRY_S > end:
                answers.put([])
                return
            time.sleep(RETRY_S)

    # In a thread: the resolver has timeouts of its own, up to minutes with dead name servers.
    threading.Thread(target=ask, name="ftrain-resolver", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        found = answers.get(timeout=patience_s + 1)
        if found:
            return found
    raise UnresolvedError(
        f"{host} does not resolve on {socket.gethostname()}: {why[0]}; correct the name, add it to "
        "DNS or /etc/hosts on every host, or give the IP address"
    )


def head_address(
    given: Endpoint, *, patience_s: float = RESOLVE_S, resolver: Resolver = system_resolver
) -> Endpoint:
    """Where the head, this host, listens and is dialled when it was given the address `given`.

    The first of the name's addresses that this host has. A name that is this host's loopback alone
    (Debian gives a host's own name 127.0.1.1), and 0.0.0.0 or [::], become the address that this
    host has on its way out, since the others have to reach it; an address of loopback and
    `localhost` stay, for hosts that are all on this machine.

    Raises:
      AddressError: this host has none of the addresses, so nothing could listen there.
    """
    if is_unspecified(given.host):
        own = outgoing_address(6 if ":" in given.host else 4)
        if own is None:
            raise AddressError(
                f"{given}: this host has no address but loopback ({_shown_local()}), so the "
                "other hosts could not reach it; give the head's name or address"
            )
        return Endpoint(own, given.port)
    found = resolve(given.host, patience_s=patience_s, resolver=resolver)
    meant = [ip for ip in found if not is_loopback(ip)] or found
    own = next((ip for ip in meant if _can_bind(ip)), None)
    if own is None:
        raise AddressError(
            f"{given} is {_shown(found)}, and this host, {socket.gethostname()}, has none of it "
            f"but {_shown_local()}; give an address of the host of rank 0, or start rank 0 there"
        )
    if is_loopback(own) and not is_ip(given.host) and given.host != "localhost":
        outgoing = outgoing_address()
        if outgoing is None:
            raise AddressError(
                f"{given} is {_shown(found)} here, loopback, and this host has no other address "
                f"({_shown_local()}); the other hosts could not reach it: connect it to their "
                "network, or give localhost if all are on this machine"
            )
        return Endpoint(outgoing, given.port)
    return Endpoint(own, given.port)


def dial_addresses(
    given: Endpoint, *, patience_s: float = RESOLVE_S, resolver: Resolver = system_resolver
) -> list[Endpoint]:
    """What a host that is not the head dials, in this order, to reach the head at `given`.

    Raises:
      AddressError: nothing to dial: no such name, or one that is this host itself.
    """
    if is_unspecified(given.host):
        raise AddressError(
            f"{given} is an address to listen on, not one to dial; give the head's name or address"
        )
    found = resolve(given.host, patience_s=patience_s, resolver=resolver)
    beyond = [ip for ip in found if not is_loopback(ip)]
    if not beyond and not is_ip(given.host) and given.host != "localhost":
        raise AddressError(
            f"{given} is {_shown(found)} here, loopback, which is this host, "
            f"{socket.gethostname()}, and not the head; correct /etc/hosts, or give the head's IP "
            "address"
        )
    return [Endpoint(ip, given.port) for ip in beyond or found]


def listen(at: Endpoint) -> socket.socket:
    """A TCP socket that listens there and nowhere else.

    Raises:
      AddressError: the port is taken or not permitted, or the address is not this host's.
    """
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        # The port of a run that has just ended can be taken again at once; one in use cannot.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((at.host, at.port))
        server.listen()
    except OSError as error:
        server.close()
        raise AddressError(f"cannot listen on {at}: {_why(error, at)}") from None
    return server


def _why(error: OSError, at: Endpoint) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                "the port is in use (`ss -ltnp` says by whom); end that process, or give another "
                "port with --coordinator HOST:PORT on every host"
            )
        case errno.EACCES:
            return "ports below 1024 need privileges; give one from 1024 on"
        case errno.EADDRNOTAVAIL:
            return f"this host, {socket.gethostname()}, has {_shown_local()}; give one of these"
        case _:
            return f"{error.strerror}; give another address with --coordinator"


def local_address_towards(host: str, port: int = 1) -> tuple[str, str]:
    """This host's own address on the way to `host`, an IP address, and that address's interface.

    What gloo is to listen on, and what NCCL_SOCKET_IFNAME is to name. Sends nothing: connecting a
    UDP socket only looks the route up.

    Raises:
      AddressError: there is no route.
    """
    own = _source_address(host, port or 1)
    if own is None:
        raise AddressError(
            f"no route to {host} from {socket.gethostname()}, which has {_shown_local()}; connect "
            "the hosts, or give the head's address on a network that they share"
        )
    return own, local_addresses().get(own, "")


def outgoing_address(version: int | None = None) -> str | None:
    """This host's address on its default route, else its first one that is not loopback."""
    for target in ("192.0.2.1", "2001:db8::1"):  # for documentation: nobody has them
        if version in (None, 4 if "." in target else 6):
            own = _source_address(target, 1)
            if own is not None and not is_loopback(own):
                return own
    own = [ip for ip in local_addresses() if is_ip(ip, version) and is_routable(ip)]
    return own[0] if own else None


def _source_address(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
    return None


def _can_bind(ip: str) -> bool:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((ip, 0))
        return True
    return False


def _shown_local() -> str:
    return _shown([ip for ip in local_addresses() if is_routable(ip)]) or "nothing but loopback"


def _shown(addresses: Sequence[str]) -> str:
    more = len(addresses) - MAX_SHOWN
    return ", ".join(addresses[:MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
