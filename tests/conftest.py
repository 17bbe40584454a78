"""JAX as in-process tests see it: the CPU, as four devices.

Set in the environment, before any test imports jax, so that tests without it do not pay for it.
Runs that tests start must not have these: `tests.runs.environment` takes them out again. Type
promotion stays standard: optax's Adam does not pass under the strict one (optax 0.2.8).
"""

from __future__ import annotations

import os


def pytest_configure() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
