"""What the log files keep, and what a library that repeats itself costs."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ftrain.worker_logs import MESSAGES, Logs

GLOG = "W1130 06:44:{:02d}.123456  {:5d} se_gpu_pjrt_client.cc:1060] {}"
ABSL = "E0000 00:00:17644850{:02d}.1{:05d}  4242 pjrt_client.cc:99] {}"
FLOOD = "Incarnation for task 1 not found"


def lines(folder: Path) -> list[str]:
    return (folder / "logs" / "worker-0.log").read_text().splitlines()


def test_a_native_message_that_repeats_is_counted_not_written(tmp_path):
    """100 000 warnings in either format are six lines, whatever time and thread they came from."""
    for form in (GLOG, ABSL):
        with contextlib.closing(Logs(str(tmp_path / form[0]))) as logs:
            for i in range(100_000):
                logs.worker(0, form.format(i % 60, i, FLOOD))
        written = lines(tmp_path / form[0])
        assert len(written) == 6 and written[0] == form.format(0, 0, FLOOD)
        assert [int(line.split("[")[1].split()[0]) for line in written[1:]] == [
            10**n for n in range(1, 6)
        ]


def test_messages_are_counted_by_themselves_and_by_worker(tmp_path):
    """Two that alternate, and another worker's."""
    with contextlib.closing(Logs(str(tmp_path))) as logs:
        for i in range(5):
            for message in (FLOOD, "something else"):
                logs.worker(0, GLOG.format(i, i, message))
        logs.worker(1, GLOG.format(0, 0, FLOOD))
    assert len(lines(tmp_path)) == 2
    assert len((tmp_path / "logs" / "worker-1.log").read_text().splitlines()) == 1


def test_what_user_code_prints_is_kept_however_often_it_comes(tmp_path):
    """Every line, whole."""
    with contextlib.closing(Logs(str(tmp_path))) as logs:
        for _ in range(100):
            logs.worker(0, "Warning: the same again")
    assert lines(tmp_path) == ["Warning: the same again"] * 100


def test_native_messages_that_all_differ_are_kept_and_memory_is_bounded(tmp_path):
    """A message with a number that changes is another message."""
    with contextlib.closing(Logs(str(tmp_path))) as logs:
        for i in range(3 * MESSAGES):
            logs.worker(0, GLOG.format(0, 1, f"buffer {i}"))
    assert len(lines(tmp_path)) == 3 * MESSAGES
    assert len(logs._seen["worker-0"]) <= MESSAGES
