"""Addresses: read, resolved, and told from one another by what this host has."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from ftrain.addresses import (
    dial_addresses,
    head_address,
    listen,
    outgoing_address,
    resolve,
)
from ftrain.endpoint import Endpoint, parse_endpoint
from ftrain.errors import AddressError
from ftrain.interfaces import local_addresses
from tests.runs import REPOSITORY, environment

ELSEWHERE = "203.0.113.9"  # for documentation: no host has it


def names(**table: str):
    """A resolver that knows these names; an address resolves to itself."""

    def resolver(host: str) -> list[str]:
        if host in table:
            return table[host].split()
        if set(host) <= set("0123456789.:abcdef"):
            return [host]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    return resolver


def head(text: str, **table: str) -> str:
    given = parse_endpoint(text, "--coordinator")
    return str(head_address(given, patience_s=0, resolver=names(**table)))


def dial(text: str, **table: str) -> list[str]:
    given = parse_endpoint(text, "--coordinator")
    return [str(e) for e in dial_addresses(given, patience_s=0, resolver=names(**table))]


# Reading.


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("head:5000", "head", 5000),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[::1]:12345", "::1", 12345),
        ("[::1]:0", "::1", 0),
        ("[fe80::1%eth0]:5", "fe80::1%eth0", 5),
    ],
)
def test_an_endpoint_is_read_and_written_back(text, host, port):
    """An IPv6 address in brackets, whole."""
    assert parse_endpoint(text, "x") == (host, port)
    assert str(parse_endpoint(text, "x")) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("::1", r"without brackets.*write \[::1\]:PORT"),
        ("fd00::1:5000", r"without brackets.*write \[fd00::1:5000\]:PORT"),
        ("[::1]", "no port"),
        ("[::1:5", r"no IPv6 address in brackets; write \[ADDRESS\]:PORT"),
        ("[head]:5", "no IPv6 address in brackets"),
        ("head", "no port; write head:PORT"),
        ("head:", "no port; write head:PORT"),
        ("head:99999", "port 99999 is not 0 to 65535"),
        ("head:-1", "port -1 is not"),
        ("a:b:5", "more than one colon"),
        ("http://head:5", "more than one colon"),
        ("user@head:5", "'user@head' is no host name"),
        (":5", "'' is no host name"),
    ],
)
def test_what_is_no_endpoint_is_refused(text, said):
    """With what was given and how to write it; a bare IPv6 address is never split."""
    with pytest.raises(AddressError, match=said) as refused:
        parse_endpoint(text, "--coordinator")
    assert str(refused.value).startswith(f"--coordinator {text}: ")


# Resolving.


def test_a_name_that_resolves_to_nothing_is_told_with_the_host_that_asked():
    """The system's reason with it."""
    with pytest.raises(AddressError, match="nowhere does not resolve on .*: Name or service.*give"):
        resolve("nowhere", patience_s=0, resolver=names())


def test_a_name_that_appears_late_is_waited_for():
    """Under Kubernetes a pod's name comes after the pod."""
    calls = []

    def late(host: str) -> list[str]:
        calls.append(host)
        return ["10.0.0.1"] if len(calls) == 2 else names()(host)

    assert resolve("pod-0.job", patience_s=5, resolver=late) == ["10.0.0.1"]


def test_a_resolver_that_does_not_answer_is_not_waited_for():
    """Dead name servers take the system's resolver up to minutes."""
    over = threading.Event()

    def dead(host: str) -> list[str]:
        over.wait(30)
        return []

    start = time.monotonic()
    with pytest.raises(AddressError, match="head does not resolve.*no answer from the resolver"):
        resolve("head", patience_s=0.1, resolver=dead)
    over.set()
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("name", ["a..b", "x" * 64, "ü" * 64])
def test_a_name_that_no_resolver_takes_is_refused_as_any(name):
    """Python's own codec raises another error for these."""
    with pytest.raises(AddressError, match="does not resolve"):
        resolve(name, patience_s=0)


# The head's own address.


def test_the_head_takes_the_address_that_it_has():
    """Of several that its name resolves to."""
    own = outgoing_address() or "127.0.0.1"
    assert head("head:5000", head=f"{ELSEWHERE} {own}") == str(Endpoint(own, 5000))


@pytest.mark.parametrize("text", ["127.0.0.1:5000", "[::1]:5000"])
def test_loopback_by_its_address_stays(text):
    """All hosts may be on this machine."""
    if text.startswith("[") and "::1" not in local_addresses():
        pytest.skip("this host has no IPv6")
    assert head(text) == text
    assert dial(text) == [text]


def test_an_address_that_this_host_has_not_is_refused_with_those_it_has():
    """Before anything listens or retries."""
    with pytest.raises(
        AddressError, match=rf"{ELSEWHERE}:5000 is {ELSEWHERE}, and this host"
    ) as no:
        head(f"{ELSEWHERE}:5000")
    own = outgoing_address()
    assert own is None or own in str(no.value)


def test_a_host_that_is_not_the_head_dials_all_that_the_name_resolves_to():
    """In the resolver's order, without a loopback that is this host's."""
    assert dial("head:5", head=f"127.0.1.1 {ELSEWHERE} fd00::9") == [
        f"{ELSEWHERE}:5",
        "[fd00::9]:5",
    ]


def test_a_name_that_is_loopback_elsewhere_than_on_the_head_is_refused():
    """It would dial itself."""
    with pytest.raises(AddressError, match="head:5 is 127.0.1.1 here, loopback.*not the head"):
        dial("head:5", head="127.0.1.1")


def test_an_address_to_listen_on_is_not_dialled():
    """Linux would connect 0.0.0.0 to this host."""
    with pytest.raises(AddressError, match="0.0.0.0:5 is an address to listen on, not one to dial"):
        dial("0.0.0.0:5")


# In a network of this test's own.

HAS_NAMESPACES = (
    shutil.which("unshare") is not None
    and shutil.which("ip") is not None
    and subprocess.run(["unshare", "-Urn", "true"], capture_output=True).returncode == 0
)
namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="no user and network namespaces here")


IMPORTS = """
from ftrain.addresses import local_address_towards
from tests.test_addresses import AddressError, head
"""


def in_network(setup: str, code: str) -> str:
    """What Python prints in a network that has what `setup` makes; loopback is up."""
    done = subprocess.run(
        ["unshare", "-Urn", "sh", "-ec", f'ip link set lo up\n{setup}\nexec "$@"', "sh"]
        + [sys.executable, "-c", f"{IMPORTS}\n{code}"],
        cwd=REPOSITORY,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


TWO_NICS = """
ip link add dc type veth peer name dc-end && ip link set dc-end up
ip link add ib type veth peer name ib-end && ip link set ib-end up
ip addr add 10.1.0.5/24 dev dc && ip link set dc up
ip addr add 10.2.0.5/24 dev ib && ip link set ib up
ip addr add fd00:2::5/64 dev ib nodad
ip route add default via 10.1.0.1
"""


@namespaces
def test_what_others_dial_is_the_address_on_the_way_out():
    """For 0.0.0.0, [::], and a name that is this host's loopback, as Debian has its own."""
    code = "print(head('0.0.0.0:5'), head('[::]:5'), head('me:5', me='127.0.1.1'))"
    assert in_network(TWO_NICS, code) == "10.1.0.5:5 [fd00:2::5]:5 10.1.0.5:5"


@namespaces
def test_the_interface_is_the_one_towards_the_head():
    """What gloo and NCCL are to use, where a host has several."""
    code = "for ip in ('10.2.0.9', 'fd00:2::9', '10.9.0.1'): print(*local_address_towards(ip))"
    assert in_network(TWO_NICS, code) == "10.2.0.5 ib\nfd00:2::5 ib\n10.1.0.5 dc"


@namespaces
def test_a_host_without_a_network_is_told_so():
    """The head's, on its way out, and another host's towards the head."""
    code = """
for way in (lambda: head('0.0.0.0:5'), lambda: head('me:5', me='127.0.1.1'),
            lambda: local_address_towards('10.2.0.9')):
    try:
        print(way())
    except AddressError as error:
        print(error)
"""
    lines = in_network("", code).splitlines()
    assert "no address but loopback (nothing but loopback)" in lines[0]
    assert "me:5 is 127.0.1.1 here, loopback, and this host has no other" in lines[1]
    assert "no route to 10.2.0.9 from" in lines[2] and "connect the hosts" in lines[2]


# Listening.


def test_a_port_in_use_is_told_with_its_address():
    """And how to find by whom."""
    with listen(Endpoint("127.0.0.1", 0)) as taken:
        at = Endpoint("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(
            AddressError, match=f"cannot listen on {at}: the port is in use.*ss -lt"
        ):
            listen(at)
    listen(at).close()


def test_an_address_of_another_host_cannot_be_listened_on():
    """Told with the addresses that this one has."""
    with pytest.raises(AddressError, match=f"cannot listen on {ELSEWHERE}:0: this host, .*, has "):
        listen(Endpoint(ELSEWHERE, 0))
