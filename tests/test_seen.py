"""A real run with a death, as its user sees it: live, judged, accounted for and reported."""

from __future__ import annotations

import json

import pytest

from ftrain.goodput import breakdown
from ftrain.records import read_records
from ftrain.report import report
from ftrain.run_now import STATUS_FILE, RunNow
from ftrain.status import read_status
from tests.checks import check_each_step_once, check_nothing_left, check_rules
from tests.runs import ENDLESS, Run, running


def wait_for_status(run: Run, what: str, condition) -> RunNow:
    """Waits for a status that the live supervisor has written."""

    def find() -> RunNow | None:
        if not (run.run_dir / STATUS_FILE).exists():
            return None
        now = read_status(str(run.run_dir))
        return now if condition(now) else None

    return run.wait_until(what, find)


def test_a_run_with_a_death_is_seen_judged_and_accounted_for(tmp_path):
    """The status shows phases, then the fault; no rule is broken; the death has its cost."""
    sets = [ENDLESS, "cluster.workers=2", "checkpoint.every_steps=100"]
    with running("tests/paced.yaml", tmp_path / "run", *sets) as run:
        now = wait_for_status(run, "all train", lambda s: s.state == "training" and s.step)
        assert [w.pid for w in now.workers] == [run.pid(0), run.pid(1)]
        assert all(w.phase for w in now.workers) and now.target == 1_000_000
        assert now.pid == run.process.pid
        before = len(run.events())
        run.kill(1)
        seen = wait_for_status(run, "the death", lambda s: s.deaths == 1)
        assert (seen.workers[1].fault, seen.workers[0].deaths) == ("SIGKILL", 0)
        run.wait_back(1, before)
        run.wait_for_steps(100)
        stopped_at = run.stop()
        check_each_step_once(run, stopped_at)
        check_rules(run)
        check_nothing_left(run)
    end = RunNow.from_json((run.run_dir / STATUS_FILE).read_text())
    assert (end.state, end.exit_code, end.step) == ("finished", 75, stopped_at)
    records = read_records(run.run_dir)
    first, last = records.events[0].t, records.events[-1].t
    found = breakdown(records)
    assert found.wall_s == pytest.approx(last - first, abs=1e-3)
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)
    for part in ("train", "start", "compile", "sync", "stop"):
        assert found.parts[part] > 0, part
    [death] = report(records)["recoveries"]
    assert (death["worker"], death["cause"], death["survivors"]) == (1, "SIGKILL", [0])
    assert 0 < death["went_on_s"] <= death["back_s"]
    spent = [json.loads(line) for line in (run.run_dir / "events.jsonl").read_text().splitlines()]
    steps = sum(e["steps"] for e in spent if e["event"] == "time_spent")
    # Of a lowest that died in its report none is told.
    assert steps == pytest.approx(stopped_at, abs=3)
