"""Cancelling a collective on CPU cuts gloo's own connections, and nobody else's."""

from __future__ import annotations

import socketserver
import threading

import pytest

from ftrain.chaos.orders import order
from tests.checks import check_each_step_once, check_replicas_agree
from tests.runs import ENDLESS, running

CANCELLATIONS = 20


class Echo(socketserver.StreamRequestHandler):
    """Gives every line back."""

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(line)


@pytest.mark.slow
def test_a_users_connection_outlives_twenty_cancellations(tmp_path):
    """Nobody dies: each attempt fails in one worker and is cut in all, and their sockets go on."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sets = [
            "trainer=tests/trainers.py:Connected",
            f"trainer_args={{port: {server.server_address[1]}, pause_s: 0.006}}",
            ENDLESS,
        ]
        with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
            run.wait_for_step(10)
            for number in range(CANCELLATIONS):
                seen = len(run.events())
                order(run.run_dir, "attempt", ("gradient", "update")[number % 2], number % 4)
                run.wait_for_event("step_aborted", after=seen)
                run.wait_for_event("view_changed", after=seen)
                run.wait_for_steps(1)  # ten in a row at one step would end the run
            check_each_step_once(run, run.stop())
            check_replicas_agree(run)
            assert len(run.events("step_aborted")) == CANCELLATIONS
            assert {e["reason"] for e in run.events("worker_exited")} == {"the end of the run"}
        server.shutdown()
