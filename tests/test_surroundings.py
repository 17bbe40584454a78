"""Runs on machines that are set up badly, in ways that a run on one host need not mind."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.runs import running

HAS_NAMES = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-Ur", "--uts", "true"], capture_output=True).returncode == 0
)


@pytest.mark.skipif(not HAS_NAMES, reason="no user and host name namespaces here")
def test_a_run_minds_neither_an_unknown_host_name_nor_a_dead_proxy(tmp_path):
    """The machine's own name resolves to nothing, and no web proxy answers."""
    script = 'hostname no-such-host-xyz; exec "$@"'
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    with running(
        "configs/linear.yaml",
        tmp_path / "run",
        "steps=20",
        prefix=["unshare", "-Ur", "--uts", "sh", "-c", script, "sh"],
        env=proxies,
    ) as run:
        assert run.finish() == 0
        assert len(run.metrics()) == 20
