"""JAX as in-process tests see it: the CPU, as four devices.

Set in the environment, before any test imports jax, so that tests without it do not pay for it.
Runs that tests start must not have these: `tests.runs.environment` takes them out again. Type
promotion stays standard: optax's Adam does not pass under the strict one (optax 0.2.8).
"""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from ftrain.memory_tier import MEMORY, RUN


def pytest_configure() -> None:
    # A shell has what it starts in the background ignore this, and runs would inherit it.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")


@pytest.fixture(scope="session", autouse=True)
def no_snapshots_left(tmp_path_factory):
    """Runs that tests killed and did not continue leave theirs in memory."""
    yield
    top = str(tmp_path_factory.getbasetemp())
    for file in MEMORY.glob(f"ftrain-{os.getuid()}-*/{RUN}"):
        if file.exists() and file.read_text().startswith(top):
            shutil.rmtree(file.parent, ignore_errors=True)
