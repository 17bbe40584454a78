"""What must be true of any run's records, whatever died."""

from __future__ import annotations

from tests.runs import Run


def check_each_step_once(run: Run, last: int, first: int = 1) -> None:
    """Every step from `first` to `last` has one line, in order, and the cursor fits."""
    rows = run.metrics()
    assert [r["step"] for r in rows] == list(range(first, last + 1))
    size = run.events("run_started")[-1]["config"]["batch_size"]
    assert all(r["samples"] == r["step"] * size for r in rows)


def check_history(run: Run) -> None:
    """Steps count up by one; where they do not, a checkpoint was restored and the lines say so."""
    rows = run.metrics()
    size = run.events("run_started")[-1]["config"]["batch_size"]
    assert all(r["samples"] == r["step"] * size for r in rows)
    assert rows[0]["step"] == 1
    highest, restored = 1, {e["step"] for e in run.events("checkpoint_restored")} | {0}
    for before, after in zip(rows, rows[1:], strict=False):
        if after["step"] != before["step"] + 1:
            assert after["step"] - 1 in restored, f"{before} is followed by {after}"
        assert after.get("rewound", False) == (after["step"] <= highest)
        highest = max(highest, after["step"])


def check_replicas_agree(run: Run) -> None:
    """Every digest that was due was reported alike by every worker that committed the step."""
    due = {r["step"]: r for r in run.metrics() if "digest" in r}
    agreed = {e["step"]: e for e in run.events("digest_agreed")}
    assert due
    for step, row in due.items():
        # A worker that died between the commit and its report leaves the comparison open.
        if step in agreed:
            assert agreed[step]["digest"] == row["digest"]
            assert agreed[step]["workers"] == row["workers"]
    assert len(agreed) >= len(due) - len(run.events("worker_exited"))


def check_deaths_explained(run: Run) -> None:
    """Each death has a reason, and each dead worker was fenced before its next start."""
    events = run.events()
    for i, event in enumerate(events):
        if event["event"] != "worker_exited" or event["reason"] == "the end of the run":
            continue
        assert event["reason"]
        later = [e["event"] for e in events[i + 1 :] if e.get("worker") == event["worker"]]
        if "worker_started" in later:
            assert later.index("worker_fenced") < later.index("worker_started")


def check_nothing_left(run: Run) -> None:
    """No process of the run is alive."""
    assert run.process.poll() is not None
    assert run.processes() == []
