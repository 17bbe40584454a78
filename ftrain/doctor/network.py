"""What the doctor looks at in the network: names, loopback, ports, proxies, the head's address."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ftrain.addresses import (
    Resolver,
    dial_addresses,
    head_address,
    listen,
    local_address_towards,
    resolve,
    system_resolver,
)
from ftrain.doctor.finding import Finding
from ftrain.endpoint import Endpoint, is_loopback
from ftrain.errors import AddressError
from ftrain.placement import Placement

PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")  # as gRPC asks them
RESOLVE_S = 2.0
CONNECT_S = 3.0
FEW_PORTS = 2000


def own_name(nodes: int, resolver: Resolver = system_resolver) -> Finding:
    """What this host's name resolves to; only hosts of a run over several need it to."""
    name, mend = socket.gethostname(), "give its address in DNS or in every host's /etc/hosts"
    over_hosts = nodes > 1
    try:
        found = resolve(name, patience_s=RESOLVE_S if over_hosts else 0, resolver=resolver)
    except AddressError:
        what = f"{name} resolves to nothing"
        if over_hosts:
            return Finding("host name", "warn", what, mend)
        return Finding("host name", "ok", f"{what}; a run on one host does not need it")
    what = f"{name} is {', '.join(found)}"
    if over_hosts and all(map(is_loopback, found)):
        return Finding("host name", "warn", f"{what}: loopback", mend)
    return Finding("host name", "ok", what)


def loopback() -> Finding:
    """Whether processes of this host reach one another, and how many ports there are for it."""
    try:
        with listen(Endpoint("127.0.0.1", 0)) as server:
            at = server.getsockname()
            with socket.create_connection(at, CONNECT_S):
                pass
    except (OSError, AddressError) as error:
        return Finding(
            "loopback",
            "fail",
            f"no connection from 127.0.0.1 to itself: {error}",
            "bring it up: ip link set lo up; and let the firewall pass what stays on lo",
        )
    try:
        with open(PORT_RANGE) as file:
            first, last = map(int, file.read().split())
    except (OSError, ValueError):  # a sandbox that does not say
        return Finding("loopback", "ok", "127.0.0.1 is reached")
    found = f"127.0.0.1 is reached; ports {first} to {last} for connections"
    if last - first < FEW_PORTS:
        mend = f"widen it: sysctl net.ipv4.ip_local_port_range='32768 60999', {FEW_PORTS} at least"
        return Finding("loopback", "warn", found, mend)
    return Finding("loopback", "ok", found)


def proxies(environ: Mapping[str, str]) -> Finding:
    """Web proxies that gRPC would ask, for the way to this very host too, if ftrain let it."""
    name = next((name for name in PROXIES if environ.get(name)), None)
    if name is None:
        return Finding("proxies", "ok", "none")
    return Finding("proxies", "ok", f"{name} is set; a run's own connections go past it")


def head(placement: Placement) -> Finding:
    """Whether this host can be the head at the address it was given, or has a way to the head."""
    given = Endpoint(placement.coordinator_host, placement.coordinator_port)
    try:
        if placement.node_rank == 0:
            own = head_address(given, patience_s=RESOLVE_S)
            listen(own).close()
            return Finding("head", "ok", f"this host, rank 0 of {placement.nodes}, at {own}")
        first = dial_addresses(given, patience_s=RESOLVE_S)[0]
        own, interface = local_address_towards(first.host, first.port)
    except AddressError as error:
        found, _, mend = str(error).rpartition("; ")
        return Finding("head", "fail", found, mend)
    place = f"rank {placement.node_rank} of {placement.nodes}"
    found = f"{place}: {first}, from {own} on {interface or 'an unnamed interface'}"
    try:
        socket.create_connection(first, CONNECT_S).close()
    except ConnectionRefusedError:
        return Finding("head", "ok", f"{found}; its host answers, nobody listens there yet")
    except OSError as error:
        mend = f"let the firewalls pass port {first.port} and see to the route"
        return Finding("head", "fail", f"{found}: {error.strerror or 'no answer'}", mend)
    return Finding("head", "ok", f"{found}; it listens")
