"""The report: what it says of a run, that it asks nobody for anything, and that it stays small."""

from __future__ import annotations

import json
import re

import pytest

from ftrain.cli import main
from ftrain.lanes import lanes
from ftrain.records import read_records
from ftrain.recoveries import recoveries
from ftrain.report import POINTS, render, report
from tests.written import BATCH, T0, Written, good_run


def read(run: Written, tmp_path):
    return read_records(run.write(tmp_path / "run"))


def begun() -> Written:
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(3)
    return run


# Recoveries.


def test_a_death_is_followed_to_the_next_step_and_to_the_return(tmp_path):
    """Half a second into step 4, at 7.0: the other commits it 1.6 s later."""
    run = begun()
    run.die_and_return(1)
    run.steps(8)
    [death] = recoveries(read(run, tmp_path).sessions[0])
    assert (death.worker, death.incarnation, death.cause) == (1, 0, "SIGKILL")
    assert (death.took_part, death.survivors) == (True, (0,))
    assert (death.went_on.step, death.went_on_s) == (4, pytest.approx(1.6))
    assert (death.back.step, death.back_s) == (6, pytest.approx(4.1))
    assert death.synced["donor"] == 0


def test_those_who_die_together_do_not_survive_one_another(tmp_path):
    """Whoever's end is seen first."""
    run = begun()
    run.lose_all(restored=0)
    run.steps(1)
    first, *others = recoveries(read(run, tmp_path).sessions[0])
    assert first.worker is None and first.back is None
    assert [d.survivors for d in others] == [(), ()]
    assert [d.back.step for d in others] == [1, 1]


def test_one_that_dies_on_its_way_back_was_not_back(tmp_path):
    """And took no part as it died the second time."""
    run = begun()
    run.exit(1)
    run.view(0)
    run.start_worker(1)
    run.wait(1.0)
    run.exit(1)
    run.steps(4)
    first, second = recoveries(read(run, tmp_path).sessions[0])
    assert (first.back, second.back) == (None, None)
    assert first.took_part


def test_how_long_it_was_stuck_is_said_of_the_life_that_was(tmp_path):
    """Not of the one after."""
    run = begun()
    run.die_and_return(1, stuck_s=20.5)
    run.die_and_return(1)
    found = recoveries(read(run, tmp_path).sessions[0])
    assert [d.stuck_s for d in found] == [20.5, 0.0]


# Lanes.


def test_a_lane_is_what_the_worker_did_without_gap_or_overlap(tmp_path):
    """From its first start to its end; a pause between two supervisors is a gap."""
    records = read(good_run(), tmp_path)
    for lane in lanes(records).values():
        assert all(span.start < span.end for span in lane)
        assert all(a.end <= b.start + 1e-6 for a, b in zip(lane, lane[1:], strict=False))
    states = [s.state for s in lanes(records)[1]]
    assert states[:6] == ["starting", "training", "down", "starting", "syncing", "training"]
    assert states[-2:] == ["starting", "training"]


def test_a_stuck_worker_is_stuck_from_when_it_was(tmp_path):
    """What it seemed to do then is taken back."""
    run = begun()
    run.die_and_return(1, stuck_s=20.0)
    lane = lanes(read(run, tmp_path))[1]
    [stuck] = [s for s in lane if s.state == "stuck"]
    assert stuck.end - stuck.start == pytest.approx(20.0)
    assert stuck.what == "in update"
    before = lane[lane.index(stuck) - 1]
    assert (before.state, before.end) == ("training", pytest.approx(stuck.start))


def test_the_last_span_of_a_live_run_reaches_to_now(tmp_path):
    """Of one that has ended, to its last record."""
    run = begun()
    assert lanes(read(run, tmp_path), now=run.t + 9)[0][-1].end == pytest.approx(run.t + 9)
    assert lanes(read(run, tmp_path))[0][-1].end == pytest.approx(run.t)


# The page's numbers.


def test_the_report_says_what_the_records_say(tmp_path):
    """Facts, faults, checkpoints, sessions and verdict of the good run."""
    data = report(read(good_run(), tmp_path))
    assert data["facts"]["step"] == 20 and data["facts"]["exit_code"] == 0
    assert data["verdict"]["ok"] and len(data["sessions"]) == 2
    assert len(data["faults"]) == len(data["recoveries"]) == 5  # and one is the coordinator's
    assert [(c["step"], c["what"]) for c in data["checkpoints"]] == [
        (10, "saved"),
        (10, "restored"),
        (10, "restored"),
        (20, "saved"),
    ]
    assert sum(s for _, s, _ in data["parts"]) == pytest.approx(data["wall_s"])
    assert data["loss"][0] == [4.5, 1, 1.0, 1.0, 1.0]
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_a_long_run_s_series_are_cut_and_lose_no_extreme(tmp_path):
    """Ten thousand steps are a few hundred points, with the least and most of what is behind."""
    run = Written(digest_every_steps=0, steps=10_000)
    run.start()
    run.view(0, 1)
    run.steps(10_000)
    run.metrics[5_003]["loss"] = 77.0
    run.metrics[7_003]["loss"] = None
    data = report(read(run, tmp_path))
    assert len(data["loss"]) <= POINTS and len(data["rate"]) <= POINTS
    assert max(most for *_, most in data["loss"]) == 77.0
    assert data["loss"][-1][1] == 10_000
    assert sum(rate for _, rate in data["rate"]) / len(data["rate"]) == pytest.approx(
        BATCH, rel=0.05
    )


def test_a_run_that_never_trained_has_a_report(tmp_path):
    """Whoever looks wants to know why."""
    run = Written()
    run.start()
    run.event("run_finished", step=0, exit_code=2, reason="the same on 2 of 2 workers\nTraceback")
    data = report(read(run, tmp_path))
    assert (data["loss"], data["rate"], data["facts"]["loss"]) == ([], [], None)
    assert data["facts"]["reason"] == "the same on 2 of 2 workers"
    render(data)


# The page.


def test_the_page_asks_nobody_for_anything(tmp_path):
    """It opens offline, from a mail or a stick; the name of SVG's namespace is no address."""
    page = render(report(read(good_run(), tmp_path)))
    outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", page)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:link|img|iframe)|\bsrc=|@import|url\(|fetch\(", page)


def test_no_text_of_a_run_gets_out_of_its_place(tmp_path):
    """An exception may say anything."""
    run = begun()
    run.exit(1, "ValueError: </script><script>alert(1)</script> & __TITLE__")
    data = report(read(run, tmp_path))
    data["name"] = "<b>run</b>"
    page = render(data)
    assert page.count("</script>") == 1 and "<b>run" not in page
    held = re.search(r"const D = (.*);\n", page)[1]
    assert json.loads(held)["recoveries"][0]["cause"].startswith("ValueError: </script><script>")


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    """Into the run's folder, or where it is told to."""
    run_dir = good_run().write(tmp_path / "run")
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir}/report.html\n"
    assert main(["report", str(run_dir), "-o", str(tmp_path / "r.html")]) == 0
    assert "<title>run · ftrain</title>" in (tmp_path / "r.html").read_text()
    assert main(["report", str(run_dir), "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert "give a file that can be written" in capsys.readouterr().err
    assert (
        T0
        == json.loads(re.search(r"const D = (.*);\n", (tmp_path / "r.html").read_text())[1])[
            "began"
        ]
    )
