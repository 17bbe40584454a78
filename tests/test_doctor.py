"""`ftrain doctor`: a healthy host has nothing to mend; what is broken is named, with its mend."""

from __future__ import annotations

import collections
import json
import os
import resource
import shutil
import socket
import subprocess
import sys

import pytest

from ftrain.doctor import host, network
from ftrain.doctor.finding import shown_bytes
from ftrain.placement import Placement
from tests.runs import REPOSITORY, environment
from tests.test_addresses import HAS_NAMESPACES


def doctor(*arguments: str, prefix: tuple[str, ...] = (), **env: str) -> tuple[int, dict]:
    """Its exit code and, by check, what it found."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "ftrain.cli", "doctor", "--json", *arguments],
        cwd=REPOSITORY,
        env={**environment(), **env},
        text=True,
        capture_output=True,
        timeout=110,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {row["check"]: row for row in json.loads(done.stdout)}


def test_a_healthy_host_passes_and_nothing_is_left_behind(tmp_path):
    """Also with a proxy that no run asks; two workers add their numbers by a run's own path."""
    run_dir = tmp_path / "deep" / "run"
    code, found = doctor(
        "configs/linear.yaml", "--run-dir", str(run_dir), http_proxy="http://127.0.0.1:9"
    )
    assert code == 0, found
    assert {row["level"] for row in found.values()} <= {"ok", "warn"}
    assert found["sum of two"]["found"].startswith("right, by gloo, in ")
    assert "http_proxy is set; a run's own connections go past it" in found["proxies"]["found"]
    assert os.listdir(tmp_path) == []


def test_what_a_start_would_refuse_is_told_with_all_the_rest():
    """The config, the placement and the flags, each on its line; the checks go on without them."""
    code, found = doctor(
        "no_such.yaml", "--nodes", "2", XLA_FLAGS="--xla_force_host_platform_device_count=3"
    )
    assert code == 1
    assert found["config"]["found"].startswith("no_such.yaml: No such file")
    assert "--nodes 2 without --node-rank" in found["placement"]["found"]
    assert "take the flag out of XLA_FLAGS" in found["environment"]["mend"]
    assert found["clock"]["level"] == "ok"


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="no user and network namespaces here")
def test_a_host_whose_loopback_is_down_is_told_so(tmp_path):
    """The sum over two workers cannot work there, and is not waited for for ever."""
    code, found = doctor("--run-dir", str(tmp_path), prefix=("unshare", "-Urn"))
    assert code == 1
    assert found["loopback"]["level"] == "fail" and "ip link set lo up" in found["loopback"]["mend"]
    assert found["sum of two"]["level"] == "fail"


# Single checks, on surroundings made for them.


def test_a_run_directory_that_cannot_be_made_is_a_failure(tmp_path):
    """A file in its place, or above it."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        (finding,) = host.run_directory(str(path))
        assert finding.level == "fail" and finding.found.startswith(f"{path}: ")
        assert "--run-dir" in finding.mend


def test_a_full_or_slow_disk_is_a_warning(tmp_path, monkeypatch):
    """With what is left of it."""
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 5e6))
    (finding,) = host.run_directory(str(tmp_path))
    assert finding.level == "warn" and "5 MB free" in finding.found
    monkeypatch.setattr(host, "SLOW_BYTES_S", 1e15)
    monkeypatch.setattr(host, "FREE_BYTES", 0)
    (finding,) = host.run_directory(str(tmp_path))
    assert finding.level == "warn" and "save less often" in finding.mend
    assert os.listdir(tmp_path) == []


def test_a_file_server_with_another_clock_is_a_warning(tmp_path, monkeypatch):
    """Files are dated by it."""
    monkeypatch.setattr(host, "_use", lambda folder: (1e9, -65.0))
    findings = host.run_directory(str(tmp_path))
    assert [f.level for f in findings] == ["ok", "warn"]
    assert "dated -65.0 s from this host's clock" in findings[1].found


def test_shared_memory_that_is_small_or_not_there_is_told(tmp_path, monkeypatch):
    """Of a container without --shm-size."""
    assert host.shared_memory(str(tmp_path / "none")).level == "fail"
    monkeypatch.setattr(host, "SMALL_SHARED_MEMORY", 1e15)
    finding = host.shared_memory(str(tmp_path))
    assert finding.level == "warn" and "--shm-size" in finding.mend


def test_too_few_descriptors_for_the_workers_is_a_failure(monkeypatch):
    """With the number that is enough."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert host.descriptors(8).level == "ok"
    finding = host.descriptors(64)
    assert finding.level == "fail" and "ulimit -n 2304" in finding.mend
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert host.descriptors(640).found.startswith("unlimited open files")


def test_a_clock_that_jumps_is_a_warning(monkeypatch):
    """Against the one that never does."""
    assert host.clock(0.05).level == "ok"
    times = iter([1.8e9, 1.8e9 + 3600])
    monkeypatch.setattr(host.time, "time", lambda: next(times))
    assert "moved by +3" in host.clock(0.05).found


def test_a_host_name_matters_only_to_a_run_over_hosts():
    """There it must be more than loopback."""

    def unknown(host: str) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert network.own_name(1, unknown).level == "ok"
    assert network.own_name(2, lambda host: ["127.0.1.1"]).level == "warn"
    assert network.own_name(2, lambda host: ["127.0.1.1", "10.0.0.1"]).level == "ok"


def test_the_head_s_port_is_tried_on_both_sides():
    """Rank 0 must be able to listen there, others reach its host; both name the address."""

    def head(rank: int, host: str, port: int):
        place = Placement(nodes=2, node_rank=rank, coordinator_host=host, coordinator_port=port)
        return network.head(place)

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert head(
            0, "127.0.0.1", port
        ).found == f"cannot listen on 127.0.0.1:{port}: the port " + (
            "is in use (`ss -ltnp` says by whom)"
        )
        assert head(1, "127.0.0.1", port).found.endswith("on lo; it listens")
    assert head(0, "127.0.0.1", port).level == "ok"
    assert "nobody listens there yet" in head(1, "127.0.0.1", port).found
    assert head(0, "203.0.113.9", 5).found.startswith("203.0.113.9:5 is 203.0.113.9, and this host")


def test_bytes_are_shown_as_people_read_them():
    """Three digits and a unit."""
    sizes = {0: "0 B", 999: "999 B", 64e6: "64 MB", 1.25e9: "1.25 GB", 5e15: "5e+03 TB"}
    assert {size: shown_bytes(size) for size in sizes} == sizes
