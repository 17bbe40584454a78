"""`metrics_port`: the run's state for Prometheus, made of its records. docs/metrics.md lists it."""

from __future__ import annotations

import re
import socket
import threading
import time
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    MetricsHandler,
    disable_created_metrics,
)

from ftrain.goodput import PARTS, Goodput
from ftrain.records import commit_of, event_of

if TYPE_CHECKING:
    from ftrain.config import Config

RECOVERY_BUCKETS_S = (0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
OWN = {"t", "step", "loss", "samples", "workers", "step_time_s", "digest", "rewound"}
_ERROR = re.compile(r"(\w+(?:Error|Exception|Exit|Interrupt)):? ")


class Prometheus:
    """Serves `/metrics` on a socket that listens already; a sink, see `sink_process`."""

    def __init__(self, config: Config, listener: socket.socket):
        disable_created_metrics()  # a second series beside each counter, which nobody asks for
        self._training: set[int] = set()
        self._hung: set[int] = set()
        self._down: dict[int, float] = {}  # worker -> when it ended
        self._disturbed_at: float | None = None
        self._highest = 0
        registry = self._registry = CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"ftrain_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ftrain_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            buckets = RECOVERY_BUCKETS_S
            return Histogram(f"ftrain_{name}", text, buckets=buckets, registry=registry)

        self._up = gauge("up", "1 while the run's supervisor lives and the run is not over")
        self._step = gauge("step", "newest committed step")
        self._loss = gauge("loss", "loss of the newest committed step")
        self._samples = gauge("samples", "samples consumed up to the newest committed step")
        self._step_time = gauge("step_time_seconds", "duration of the newest committed step")
        self._committed_at = gauge("last_commit_timestamp_seconds", "when it was committed")
        self._metric = gauge("metric", "a metric of the trainer's, newest value", "name")
        self._workers = gauge("workers", "workers that the run has when all are there")
        self._live = gauge("workers_live", "workers that train: in the newest step, and not dead")
        self._saved = gauge("checkpoint_step", "step of the newest checkpoint", "tier")
        self._saved_at = gauge("checkpoint_timestamp_seconds", "when it was saved", "tier")
        self._commits = counter("steps_committed", "committed steps, those repeated included")
        self._again = counter("steps_repeated", "committed again after a checkpoint was restored")
        self._aborts = counter("steps_aborted", "attempts at a step that were given up")
        self._deaths = counter("worker_deaths", "worker processes that died", "reason")
        self._coordinators = counter("coordinator_deaths", "coordinator processes that died")
        self._faults = counter("faults_injected", "faults injected by ftrain chaos", "kind")
        self._failed = counter("checkpoint_failures", "checkpoints that could not be saved")
        self._recovery = histogram(
            "recovery_seconds", "from a worker's or the coordinator's death to the next commit"
        )
        self._rejoin = histogram(
            "rejoin_seconds", "from a worker's death to the first step that it commits again"
        )
        self._workers.set(config.cluster.workers)
        self._account = Goodput()
        goodput = gauge("goodput_ratio", "committed compute time over wall time, 0 to 1")
        spent = gauge("time_seconds", "the run's wall time by where it went", "part")
        # Asked at each scrape: while nothing is committed time goes on.
        goodput.set_function(lambda: self._account.at(time.time()).goodput)
        for part in PARTS:
            spent.labels(part).set_function(
                lambda part=part: self._account.at(time.time()).parts[part]
            )
        self._serve(listener)

    def _serve(self, listener: socket.socket) -> None:
        handler = MetricsHandler.factory(self._registry)
        server = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
        server.socket.close()
        server.socket, server.daemon_threads = listener, True
        server.server_address = listener.getsockname()
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def commit(self, line: dict[str, Any]) -> None:
        """A committed step."""
        self._account.commit(commit_of(line))
        self._step.set(line["step"])
        for name, key in ((self._loss, "loss"), (self._step_time, "step_time_s")):
            name.set(_number(line[key]))
        self._samples.set(line["samples"])
        self._committed_at.set(line["t"])
        self._commits.inc()
        self._again.inc(bool(line.get("rewound")))
        for key in line.keys() - OWN:
            self._metric.labels(key).set(_number(line[key]))
        self._training = set(line["workers"])
        self._live.set(len(self._training))
        if self._disturbed_at is not None and line["t"] > self._disturbed_at:
            self._recovery.observe(line["t"] - self._disturbed_at)
            self._disturbed_at = None
        for worker in self._training & self._down.keys():
            if line["t"] > self._down[worker]:
                self._rejoin.observe(line["t"] - self._down.pop(worker))

    def event(self, row: dict[str, Any]) -> None:
        """Something that happened."""
        self._account.event(event_of(row))
        handler = getattr(self, f"_on_{row['event']}", None)
        if handler is not None:
            handler(row)

    def close(self) -> None:
        """The run is over."""
        self._up.set(0)

    def _on_run_started(self, row: dict[str, Any]) -> None:
        self._up.set(1)
        self._workers.set(row["config"]["cluster"]["workers"])
        self._nobody_trains()
        self._down.clear()  # with the supervisor before: no deaths of this run
        self._disturbed_at = None

    def _on_run_finished(self, row: dict[str, Any]) -> None:
        self._up.set(0)
        self._nobody_trains()

    def _on_hang_detected(self, row: dict[str, Any]) -> None:
        self._hung.add(row["worker"])

    def _on_worker_exited(self, row: dict[str, Any]) -> None:
        worker = row["worker"]
        self._training.discard(worker)
        self._live.set(len(self._training))
        if row["reason"] == "the end of the run":
            return
        self._deaths.labels(reason_of(row, hung=worker in self._hung)).inc()
        self._hung.discard(worker)
        self._down.setdefault(worker, row["t"])
        self._disturb(row["t"])

    def _on_coordinator_exited(self, row: dict[str, Any]) -> None:
        self._coordinators.inc()
        self._nobody_trains()
        self._disturb(row["t"])

    def _on_step_aborted(self, row: dict[str, Any]) -> None:
        self._aborts.inc()

    def _on_checkpoint_saved(self, row: dict[str, Any]) -> None:
        self._saved.labels(row["tier"]).set(row["step"])
        self._saved_at.labels(row["tier"]).set(row["t"])

    def _on_save_failed(self, row: dict[str, Any]) -> None:
        self._failed.inc()

    def _on_fault_injected(self, row: dict[str, Any]) -> None:
        self._faults.labels(row["kind"]).inc()

    def _nobody_trains(self) -> None:
        self._training = set()
        self._live.set(0)

    def _disturb(self, t: float) -> None:
        if self._disturbed_at is None:
            self._disturbed_at = t


def reason_of(row: dict[str, Any], *, hung: bool) -> str:
    """Few words for why a worker died: a label must not have a value for every death.

    `hang`, `coordinator`, the name of an exception, of a signal, or `exit_<code>`.
    """
    if hung:
        return "hang"
    if "the coordinator" in row["reason"]:
        return "coordinator"
    if found := _ERROR.match(row["reason"] + " "):
        return found[1]
    return row.get("signal") or f"exit_{row['exit_code']}"


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
