"""Prometheus, TensorBoard and sinks of the user's: fed by the records, and no danger to the run."""

from __future__ import annotations

import collections
import json
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ftrain.config import Config
from ftrain.events import EventLog, LineFile
from ftrain.prometheus import Prometheus, reason_of
from ftrain.sink_process import Position, follow
from ftrain.tensorboard import TensorBoard
from tests.checks import check_nothing_left
from tests.runs import ENDLESS, REPOSITORY, environment, running


def config(run_dir: Path, **more) -> Config:
    values = {"trainer": "a.py:T", "run_dir": str(run_dir), "steps": 100, "batch_size": 12}
    return Config.model_validate({**values, **more})


def line(step: int, t: float, workers=(0, 1), **more) -> dict:
    own = {"loss": 1.0 / step, "samples": 12 * step, "step_time_s": 0.01}
    return {"t": t, "step": step, "workers": list(workers), **own, **more}


# Following the files.


class Kept:
    """A sink that keeps the order of what it gets."""

    def __init__(self):
        self.rows = []

    def commit(self, line):
        self.rows.append(line["step"])

    def event(self, row):
        self.rows.append(row["event"])

    def close(self):
        self.rows.append("closed")


class Records:
    """The two files, written as a supervisor does."""

    def __init__(self, folder: Path):
        self.metrics, self.events = LineFile(str(folder / "metrics.jsonl")), EventLog(str(folder))

    def commit(self, step: int, t: float, **more) -> None:
        self.metrics.append(line(step, t, **more))

    def event(self, name: str, t: float, **more) -> None:
        self.events.append({"t": t, "event": name, **more})


def take_all(sink, folder: Path, kept: str | None) -> list[str]:
    told = []
    follow(sink, Position(str(folder), kept), lambda timeout_s: True, told.append)
    return told


def test_rows_come_once_in_order_over_restarts(tmp_path):
    """What a supervisor left of a line, and a new supervisor cuts off, is no row."""
    records, sink, kept = Records(tmp_path), Kept(), str(tmp_path / "sinks" / "k.json")
    records.event("run_started", 1.0)
    records.commit(1, 2.0)
    records.event("worker_exited", 2.5)
    records.commit(2, 3.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"t": 4.0, "st')
    take_all(sink, tmp_path, kept)
    assert sink.rows == ["run_started", 1, "worker_exited", 2, "closed"]
    records, sink = Records(tmp_path), Kept()
    records.commit(3, 5.0)
    take_all(sink, tmp_path, kept)
    assert sink.rows == [3, "closed"]


def test_a_run_that_was_begun_anew_is_followed_from_its_start(tmp_path):
    records, kept = Records(tmp_path), str(tmp_path / "k.json")
    for step in range(1, 20):
        records.commit(step, step)
    take_all(Kept(), tmp_path, kept)
    (tmp_path / "metrics.jsonl").unlink()
    Records(tmp_path).commit(1, 30.0)
    take_all(sink := Kept(), tmp_path, kept)
    assert sink.rows == [1, "closed"]


# Prometheus.


def value(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"no {name} in\n{text}"
    return float(found[1])


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        return answer.read().decode()


def test_prometheus_shows_deaths_recoveries_and_rewinds_as_they_were(tmp_path):
    """A death and a return, then all at once and a checkpoint: the numbers are the rows'."""
    listener = socket.create_server(("127.0.0.1", 0))
    sink = Prometheus(config(tmp_path), listener)
    started = {
        "event": "run_started",
        "t": 0.0,
        "config": {"cluster": {"workers": 2, "min_workers": 1}},
    }
    exited = {"event": "worker_exited", "signal": "SIGKILL", "reason": "SIGKILL"}
    sink.event(started)
    sink.commit(line(1, 1.0))
    sink.event({**exited, "worker": 0, "t": 2.0})
    assert value(scrape(listener.getsockname()[1]), "ftrain_workers_live") == 1
    sink.event({"event": "step_aborted", "t": 2.1})
    sink.commit(line(2, 2.4, [1], accuracy=0.5))
    sink.commit(line(3, 5.0))
    sink.event({"event": "checkpoint_saved", "step": 1, "tier": "disk", "t": 5.5})
    for worker in (0, 1):
        sink.event({**exited, "worker": worker, "t": 6.0})
    sink.commit(line(2, 8.0, rewound=True))
    text = scrape(listener.getsockname()[1])
    for name, expected in {
        "ftrain_step": 2,
        "ftrain_loss": 0.5,
        "ftrain_up": 1,
        "ftrain_workers": 2,
        "ftrain_workers_live": 2,
        'ftrain_worker_deaths_total{reason="SIGKILL"}': 3,
        "ftrain_steps_committed_total": 4,
        "ftrain_steps_repeated_total": 1,
        "ftrain_steps_aborted_total": 1,
        'ftrain_checkpoint_step{tier="disk"}': 1,
        'ftrain_metric{name="accuracy"}': 0.5,
        "ftrain_recovery_seconds_count": 2,
        'ftrain_recovery_seconds_bucket{le="0.5"}': 1,
        "ftrain_rejoin_seconds_count": 3,
    }.items():
        assert value(text, name) == expected, name
    assert value(text, "ftrain_recovery_seconds_sum") == pytest.approx(0.4 + 2.0)
    sink.event({"event": "run_finished", "t": 9.0})
    text = scrape(listener.getsockname()[1])
    assert value(text, "ftrain_workers_live") == 0
    assert value(text, "ftrain_goodput_ratio") == pytest.approx(0.02 / 9.0)
    parts = re.findall(r"^ftrain_time_seconds{.*} (.*)$", text, re.MULTILINE)
    assert sum(map(float, parts)) == pytest.approx(9.0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"signal": "SIGKILL", "reason": "SIGKILL"}, "SIGKILL"),
        (
            {"exit_code": 13, "reason": "RuntimeError: of worker 7 at step 12"},
            "RuntimeError",
        ),
        ({"exit_code": 13, "reason": "ReplicaDivergedError: the state"}, "ReplicaDivergedError"),
        ({"signal": "SIGKILL", "reason": "the coordinator's death"}, "coordinator"),
        ({"exit_code": 9, "reason": "exit code 9"}, "exit_9"),
    ],
)
def test_reasons_are_few_words(row, reason):
    assert reason_of(row, hung=False) == reason
    assert reason_of(row, hung=True) == "hang"


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "ftrain.cli", "run", "configs/linear.yaml"]
            + ["--run-dir", str(tmp_path / "run"), "--set", f"metrics_port={port}"],
            cwd=REPOSITORY,
            env=environment(),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 2
    assert f"metrics_port={port}: 127.0.0.1:{port} cannot be opened (Address" in done.stderr
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_sink_whose_file_is_not_there_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ftrain.cli", "run", "configs/linear.yaml"]
        + ["--run-dir", str(tmp_path / "run"), "--set", "sinks=[no/such.py:Sink]"],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "sinks: no/such.py:Sink: no file no/such.py" in done.stderr


# TensorBoard.


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows: a file that begins at a step hides that and later ones before it."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    shown: dict[int, float] = {}
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            if event.session_log.status == SessionLog.START:
                shown = {s: v for s, v in shown.items() if s < event.step}
            for entry in event.summary.value:
                if entry.tag == tag:
                    assert event.step not in shown
                    shown[event.step] = entry.simple_value
    return sorted(shown.items())


def test_tensorboard_shows_each_step_once_after_a_rewind_and_a_restart(tmp_path):
    """The later line is the one that is shown."""
    sink = TensorBoard(config(tmp_path, tensorboard=True))
    for step in range(1, 6):
        sink.commit(line(step, step, eval_error=0.5))
    for step in (3, 4):
        sink.commit(line(step, 10 + step, workers=[1], rewound=True))
    sink.flush()
    again = TensorBoard(config(tmp_path, tensorboard=True))  # a process that died
    for step in (4, 5):
        again.commit(line(step, 20 + step))
    again.flush()
    folder = tmp_path / "tensorboard"
    assert [step for step, _ in scalars(folder, "loss")] == [1, 2, 3, 4, 5]
    assert scalars(folder, "workers") == [(1, 2), (2, 2), (3, 1), (4, 2), (5, 2)]
    assert [step for step, _ in scalars(folder, "eval/error")] == [1, 2]
    sink.close()
    again.close()


# Real runs.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def notes(run_dir: Path) -> list[dict]:
    return [json.loads(x) for x in (run_dir / "notes.jsonl").read_text().splitlines()]


def test_a_scrape_of_a_run_is_true_while_workers_are_killed(tmp_path):
    """And a sink, TensorBoard and the file agree at the end: each committed step, once."""
    port = free_port()
    sets = [f"metrics_port={port}", "sinks=[tests/sinks.py:Notes]", "tensorboard=true"]
    with running("tests/paced.yaml", tmp_path / "run", ENDLESS, *sets) as run:
        run.wait_for_step(20)

        def scraped(name: str) -> float:
            text = scrape(port)
            return value(text, name) if name in text else 0.0

        run.wait_until("all are seen", lambda: scraped("ftrain_workers_live") == 4)
        seen = len(run.events())
        run.kill(0)
        deaths = 'ftrain_worker_deaths_total{reason="SIGKILL"}'
        run.wait_until("the death is seen", lambda: scraped(deaths) == 1)
        run.wait_back(0, seen)
        run.wait_until("the return is seen", lambda: scraped("ftrain_rejoin_seconds_count") == 1)
        text = scrape(port)
        assert value(text, "ftrain_workers_live") == 4
        assert value(text, "ftrain_recovery_seconds_count") == 1
        assert run.metrics()[-1]["step"] >= value(text, "ftrain_step") > 20
        last = run.stop()
        check_nothing_left(run)
    got = notes(run.run_dir)
    assert [n["commit"] for n in got if "commit" in n] == run.metrics()
    assert [n["event"] for n in got if "event" in n] == [e["event"] for e in run.events()]
    assert got[-1] == {"closed": True}
    steps = [step for step, _ in scalars(run.run_dir / "tensorboard", "loss")]
    assert steps == list(range(1, last + 1))


def test_nothing_that_a_sink_does_touches_the_run(tmp_path):
    """It raises, blocks for ever, crashes, or cannot start: each told once, the run ends well."""
    kinds = "Fails", "Blocks", "Dies", "CannotStart"
    specs = ",".join(f"tests/sinks.py:{kind}" for kind in kinds)
    sets = [f"sinks=[{specs}]", "cluster.workers=1", "grace_s=4", ENDLESS]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        run.wait_until("the crash is told", lambda: "Dies failed: it ended with" in run.output)
        run.wait_for_steps(20)
        run.process.terminate()
        assert run.finish() == 75
        check_nothing_left(run)
    told = collections.Counter(re.findall(r"sinks\.py:(\w+) failed: (.*?); the run", run.output))
    assert told == {
        ("Fails", "KeyError in event: 'run_started'"): 1,
        ("Dies", "it ended with SIGABRT"): 1,
        ("CannotStart", "ModuleNotFoundError: No module named 'tracker'"): 1,
    }
    assert "tests/sinks.py:Blocks did not take the last lines" in run.output
    assert "no route to the tracker" in (run.run_dir / "logs" / "supervisor.log").read_text()
