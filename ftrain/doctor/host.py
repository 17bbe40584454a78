"""What the doctor looks at on this host: versions, memory, descriptors, clock, run directory."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

from ftrain.doctor.finding import Finding, shown_bytes
from ftrain.errors import ConfigError
from ftrain.versions import JAX_RULE, check_versions

SHARED_MEMORY = "/dev/shm"
SMALL_SHARED_MEMORY = 256e6  # bytes; containers have 64 MB unless told otherwise
DESCRIPTORS = 256, 32  # the supervisor's own and per worker: pipes, logs, process handles
FREE_BYTES = 1e9
PROBE_BYTES = 1 << 25
SLOW_BYTES_S = 20e6
CLOCK_SKEW_S = 2.0


def versions() -> Finding:
    """Python, jax and jaxlib, as every other command asks them first."""
    try:
        check_versions()
    except ConfigError as error:
        found, _, mend = str(error).rpartition("; ")
        return Finding("versions", "fail", found, mend)
    jax, jaxlib = (importlib.metadata.version(name) for name in ("jax", "jaxlib"))
    python = ".".join(str(n) for n in sys.version_info[:3])
    return Finding("versions", "ok", f"Python {python}, jax {jax}, jaxlib {jaxlib} ({JAX_RULE})")


def shared_memory(folder: str = SHARED_MEMORY) -> Finding:
    """Room for NCCL's buffers and for what is kept in memory for a restart."""
    name = "shared memory"
    mend = "mount a tmpfs there: docker run --shm-size=8g, Kubernetes a volume of medium: Memory"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            space = os.statvfs(folder)
    except OSError as error:
        return Finding(name, "fail", f"{folder} cannot be written: {error.strerror}", mend)
    free = space.f_bavail * space.f_frsize
    found = f"{folder} has {shown_bytes(free)} free"
    if free < SMALL_SHARED_MEMORY:
        return Finding(name, "warn", f"{found}, little for NCCL and snapshots", mend)
    return Finding(name, "ok", found)


def descriptors(workers: int) -> Finding:
    """The limit of open files that this process would pass on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS[0] + DESCRIPTORS[1] * workers
    found = f"{_limit(soft)} open files (at most {_limit(hard)}), {needed} are enough"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding("descriptors", "ok", found)
    return Finding("descriptors", "fail", found, f"ulimit -n {needed}, or raise it for the service")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def clock(seconds: float = 0.2) -> Finding:
    """Whether wall time goes as fast as the monotonic clock, by which timeouts are counted."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(seconds)
    drift_s = (time.time() - wall) - (time.monotonic() - steady)
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if abs(drift_s) > seconds / 10:
        return Finding(
            "clock",
            "warn",
            f"the wall clock moved by {drift_s:+.3f} s within {seconds:g} s",
            "records will look odd: see to the host's time service",
        )
    if time.time() < 1.7e9:
        return Finding("clock", "warn", f"it is {now} here", "set the clock: records carry it")
    return Finding("clock", "ok", now)


def run_directory(run_dir: str) -> list[Finding]:
    """Whether it can be written, renamed in and locked; its space, speed and clock."""
    name = "run directory"
    try:
        # Made as a run would, and only what was made here is taken away again.
        with _existing(run_dir) as folder, tempfile.TemporaryDirectory(dir=folder) as probe:
            bytes_s, skew_s = _use(probe)
            free = shutil.disk_usage(probe).free
    except OSError as error:
        why = f"{run_dir}: {error.strerror or error}"
        return [Finding(name, "fail", why, "give a folder that this user may write: --run-dir DIR")]
    found = f"{run_dir}: {shown_bytes(bytes_s)}/s, {shown_bytes(free)} free"
    level, mend = "ok", ""
    if bytes_s < SLOW_BYTES_S:
        level, mend = "warn", "checkpoints will take long: a faster disk, or save less often"
    if free < FREE_BYTES:
        level, mend = "warn", "make room, or lower checkpoint.keep"
    findings = [Finding(name, level, found, mend)]
    if abs(skew_s) > CLOCK_SKEW_S:
        findings.append(
            Finding(
                "file clock",
                "warn",
                f"files in {run_dir} are dated {skew_s:+.1f} s from this host's clock",
                "set the clocks of this host and of the file server by one time service",
            )
        )
    return findings


@contextlib.contextmanager
def _existing(folder: str) -> Iterator[str]:
    """The folder, made with its parents if need be; what was made is removed."""
    made = []
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        made.append(path)
        path = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
        yield folder
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _use(folder: str) -> tuple[float, float]:
    """Writes durably, renames and locks; returns bytes a second and the server's clock, ahead."""
    part, whole = os.path.join(folder, "part"), os.path.join(folder, "whole")
    block = os.urandom(PROBE_BYTES)
    start = time.monotonic()
    with open(part, "wb") as file:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.monotonic() - start
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(part, whole)
    os.utime(whole)
    skew_s = os.stat(whole).st_mtime - time.time()
    return PROBE_BYTES / max(seconds, 1e-6), skew_s
