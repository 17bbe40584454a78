"""Each rule of `verify` holds for a good run with faults, and finds a record that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ftrain.cli import main
from ftrain.findings import FAIL, NOTE, UNKNOWN
from ftrain.records import NoRunError, read_records
from ftrain.recoveries import END_OF_RUN
from ftrain.verify import RULES, Verdict, verify
from tests.written import BATCH, Written, good_run


def judged(run: Written, tmp_path: Path) -> Verdict:
    return verify(run.write(tmp_path / "run"))


def found(verdict: Verdict, severity: str) -> list[tuple[str, str]]:
    return [(f.rule, f.message) for f in verdict.findings if f.severity == severity]


def test_a_good_run_is_good_whatever_died_in_it(tmp_path):
    """A death, a hang, a rewind, a supervisor that died: all is explained, nothing is unknown."""
    verdict = judged(good_run(), tmp_path)
    assert verdict.failures == [] and verdict.ok
    assert found(verdict, UNKNOWN) == []
    assert found(verdict, NOTE) == [
        ("lineage", "step 11: 3 steps again from checkpoint 10"),
        ("lineage", "step 11: 2 steps again from checkpoint 10"),
        ("deaths", "the supervisor of session 1 ended without a word, its workers with it"),
        ("exit", "session 1 has no exit code: its supervisor died"),
    ]
    assert (verdict.steps, verdict.sessions, verdict.deaths) == (20, 2, 4)


def line(run: Written, step: int) -> dict:
    return next(row for row in run.metrics if row["step"] == step)


def remove_event(name: str, nth: int = 0) -> Callable[[Written], None]:
    return lambda run: run.events.remove(run.named(name)[nth])


def change_event(name: str, nth: int = 0, **fields) -> Callable[[Written], None]:
    return lambda run: run.named(name)[nth].update(fields)


def change_line(step: int, **fields) -> Callable[[Written], None]:
    return lambda run: line(run, step).update(fields)


def without_rewound(run: Written) -> None:
    for row in run.metrics:
        row.pop("rewound", None)


def twice(run: Written) -> None:
    run.metrics.insert(4, dict(run.metrics[3], t=run.metrics[3]["t"] + 0.1, rewound=True))


def delay_after_death(run: Written) -> None:
    """Nothing for a minute after the first death: the watchdog allows 20 s and a little."""
    death = run.named("worker_exited")[0]["t"]
    for row in run.events + run.metrics:
        if row["t"] > death:
            row["t"] += 60.0


def never_back(run: Written) -> None:
    """The replacement of worker 1 starts, and trains no step for the rest of a long session."""
    view = run.named("view_changed")[2]
    synced = run.named("state_synced")[0]
    for row in run.metrics:
        if row["t"] > view["t"]:
            row["workers"] = [0]
    for row in run.events:
        if row["event"] in ("view_changed", "digest_agreed") and row["t"] >= view["t"]:
            row["workers"] = [0]
        if row["t"] > run.named("worker_exited")[1]["t"]:
            row["t"] += 1000.0
    for row in run.metrics:
        if row["t"] > run.named("hang_detected")[0]["t"] - 1000.0:
            row["t"] += 1000.0
    run.events.remove(synced)


def outlives(run: Written) -> None:
    run.events.remove(run.named("worker_exited")[-1])


def differ(run: Written, step: int) -> None:
    agreed = next(e for e in run.named("digest_agreed") if e["step"] == step)
    agreed.pop("workers")
    agreed.pop("digest")
    agreed.update(event="replicas_differ", digests={"0": "a" * 64, "1": "b" * 64})


BREAKERS = {
    "lineage: a step missing": ("lineage", lambda run: run.metrics.remove(line(run, 4))),
    "lineage: a step twice": ("lineage", twice),
    "lineage: back without a restore": ("lineage", remove_event("checkpoint_restored")),
    "lineage: a rewind that does not say so": ("lineage", without_rewound),
    "lineage: a rewind while one lived": (
        "lineage",
        change_event("worker_exited", 3, worker=0, pid=102),
    ),
    "cursor: a batch skipped": ("cursor", change_line(18, samples=19 * BATCH)),
    "cursor: a batch read again": ("cursor", change_line(18, samples=17 * BATCH)),
    "cursor: a short batch that ends nothing": ("cursor", change_line(20, samples=20 * BATCH - 1)),
    "members: one that does not exist": ("members", change_line(3, workers=[0, 2])),
    "members: one that was dead": ("members", remove_event("worker_started", 2)),
    "members: one that was not back yet": ("members", change_line(8, workers=[0, 1])),
    "members: named twice": ("members", change_line(3, workers=[0, 0])),
    "digests: none where one is due": ("digests", lambda run: line(run, 15).pop("digest")),
    "digests: another than was agreed": ("digests", change_line(15, digest="f" * 64)),
    "digests: not compared, and nobody died": (
        "digests",
        lambda run: run.events.remove(
            next(e for e in run.named("digest_agreed") if e["step"] == 15)
        ),
    ),
    "digests: differ, and nobody was replaced": ("digests", lambda run: differ(run, 15)),
    "deaths: without a reason": ("deaths", change_event("worker_exited", reason="")),
    "deaths: not fenced before the next start": ("deaths", remove_event("worker_fenced")),
    "deaths: of a process that never started": ("deaths", change_event("worker_exited", pid=7)),
    "deaths: two processes at once": ("deaths", remove_event("worker_exited")),
    "deaths: one outlives the run": ("deaths", outlives),
    "hangs: found late": ("hangs", change_event("hang_detected", seconds=40.0)),
    "recoveries: nothing for a minute": ("recoveries", delay_after_death),
    "recoveries: never back": ("recoveries", never_back),
    "checkpoints: restored, never committed": (
        "checkpoints",
        change_event("checkpoint_restored", step=15),
    ),
    "checkpoints: named, not there": ("checkpoints", lambda run: run.saved.discard(20)),
    "exit: 0 short of the target": ("exit", change_event("target_known", 1, steps=21)),
    "exit: 0 with nothing saved": ("exit", change_event("checkpoint_saved", 1, step=19)),
    "exit: names another step": ("exit", change_event("run_finished", step=19)),
}


@pytest.mark.parametrize("name", BREAKERS)
def test_a_record_that_breaks_a_rule_is_found(tmp_path, name):
    """By the rule it breaks."""
    rule, spoil = BREAKERS[name]
    run = good_run()
    spoil(run)
    run.saved |= {19} if "nothing saved" in name else set()
    verdict = judged(run, tmp_path)
    assert rule in {f.rule for f in verdict.failures}, str(verdict)
    assert not verdict.ok


def test_every_rule_has_a_record_that_breaks_it():
    """But for whole lines that are none, which have a test of their own."""
    assert {rule for rule, _ in BREAKERS.values()} | {"records"} == {rule.name for rule in RULES}


def test_a_line_that_is_no_record_is_found_and_a_torn_last_one_is_not(tmp_path):
    """Each is whole or was never written: half a line at the end is a supervisor's death."""
    run_dir = good_run().write(tmp_path / "run")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"t": 1, "step": 21, "lo')
    assert verify(run_dir).ok
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write("\n")
    verdict = verify(run_dir)
    assert [f.rule for f in verdict.failures] == ["records"]
    assert "metrics.jsonl:" in verdict.failures[0].message


def test_a_worker_that_died_before_its_report_leaves_the_digest_unknown(tmp_path):
    """As Jepsen has it: nobody can tell, so it is no failure."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(5)
    run.events.remove(run.named("digest_agreed")[0])
    run.die_and_return(1)
    verdict = judged(run, tmp_path)
    assert verdict.ok
    assert (
        "digests",
        "step 5: worker 1 ended right after it, so not all of its digests were compared",
    ) in found(verdict, UNKNOWN)


def test_lines_that_a_supervisor_took_with_it_are_unknown(tmp_path):
    """The checkpoint shows that the steps were committed; their lines were in a pipe."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(10)
    run.saved.add(10)
    run.metrics = [row for row in run.metrics if row["step"] <= 8]
    run.wait(5.0)
    run.start()
    run.restore(10)
    run.steps(11)
    verdict = judged(run, tmp_path)
    assert verdict.ok, str(verdict)
    unknown = dict(found(verdict, UNKNOWN))
    assert "steps 9 to 10 are missing: committed" in unknown["lineage"]
    assert "step 10 was restored" in unknown["checkpoints"]


def test_a_checkpoint_whose_writer_died_before_it_could_say_so_is_unknown(tmp_path):
    """It is there, and of a committed step; of snapshots in memory nothing more is recorded."""
    run = good_run()
    run.events.remove(run.named("checkpoint_saved")[0])
    verdict = judged(run, tmp_path)
    assert verdict.ok and {rule for rule, _ in found(verdict, UNKNOWN)} == {"checkpoints"}
    for event in run.named("checkpoint_restored"):
        event["tier"] = "memory"
    assert found(judged(run, tmp_path), UNKNOWN) == []


def test_replicas_that_differed_and_were_mended_are_a_note(tmp_path):
    """The worker that is not like most ends itself before the next step."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(5)
    differ(run, 5)
    run.die_and_return(1)
    verdict = judged(run, tmp_path)
    assert verdict.ok
    assert ("digests", "step 5: the state of worker 1 differed; it was replaced") in found(
        verdict, NOTE
    )


def test_the_end_of_the_run_soon_after_is_no_replacement(tmp_path):
    """It ends the others too: they are not taken for those that differed."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(5)
    differ(run, 5)
    run.exit(1)
    run.event("step_aborted", step=6, failed=[1], seconds=0.1)
    run.view(0)
    run.steps(6)
    run.exit(0, END_OF_RUN)
    run.event("run_finished", step=6, exit_code=75, reason="SIGTERM")
    verdict = judged(run, tmp_path)
    assert not [f for f in verdict.failures if f.rule == "digests"]
    assert ("digests", "step 5: the state of worker 1 differed; it was replaced") in found(
        verdict, NOTE
    )


def test_too_few_members_are_found(tmp_path):
    """A step may not be committed below `min_workers`."""
    run = Written(cluster={"workers": 2, "min_workers": 2})
    run.start()
    run.view(0, 1)
    run.steps(2)
    run.die_and_return(1)
    assert {f.rule for f in judged(run, tmp_path).failures} == {"members"}


def test_epochs_may_end_in_a_smaller_batch(tmp_path):
    """There alone: the cursor is then the target's."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(4)
    run.metrics[-1]["samples"] -= 5
    run.named("target_known")[0].update(steps=4, samples=run.metrics[-1]["samples"])
    run.save()
    run.finish()
    assert judged(run, tmp_path).ok


def test_a_run_whose_supervisor_died_has_an_unknown_exit_code(tmp_path):
    """Nobody wrote it; the same command continues."""
    run = Written()
    run.start()
    run.view(0, 1)
    run.steps(4)
    verdict = judged(run, tmp_path)
    assert verdict.ok and [rule for rule, _ in found(verdict, UNKNOWN)] == ["exit"]


def test_the_command_prints_the_verdict_and_exits_with_it(tmp_path, capsys):
    """0 for a good run, 1 for a bad one, 2 where no run is."""
    run = good_run()
    assert main(["verify", str(run.write(tmp_path / "good"))]) == 0
    assert "good; 20 steps, 2 sessions, 4 deaths" in capsys.readouterr().out
    run.metrics.remove(line(run, 4))
    assert main(["verify", str(run.write(tmp_path / "bad")), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["findings"][0]["severity"] == FAIL
    assert main(["verify", str(tmp_path)]) == 2
    assert "it is not a run directory" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path):
    """With what it lacks."""
    with pytest.raises(NoRunError, match="has no events.jsonl"):
        read_records(tmp_path)
    with pytest.raises(NoRunError, match="is not a folder"):
        read_records(tmp_path / "nothing")
