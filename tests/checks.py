"""What must be true of any run's records, whatever died: the rules of `ftrain verify`, by name."""

from __future__ import annotations

from ftrain.verify import RULES, verify
from tests.runs import Run


def check_rules(run: Run, *rules: str) -> None:
    """No rule of those names is broken, or none at all if no name is given."""
    assert set(rules) <= {rule.name for rule in RULES}
    failures = verify(run.run_dir).failures
    assert [f for f in failures if not rules or f.rule in rules] == []


def check_each_step_once(run: Run, last: int, first: int = 1) -> None:
    """Every step from `first` to `last` has one line, in order, and the cursor fits."""
    assert [r["step"] for r in run.metrics()] == list(range(first, last + 1))
    check_rules(run, "records", "cursor", "members")


def check_history(run: Run) -> None:
    """Steps count up by one; where they do not, a checkpoint was restored and the lines say so."""
    assert run.metrics()[0]["step"] == 1
    check_rules(run, "records", "lineage", "cursor", "members")


def check_replicas_agree(run: Run) -> None:
    """Every digest that was due was reported alike by every worker that committed the step."""
    assert any("digest" in r for r in run.metrics())
    check_rules(run, "digests")


def check_deaths_explained(run: Run) -> None:
    """Each death has a reason, each dead worker was fenced before its next start, all in time."""
    check_rules(run, "deaths", "hangs", "recoveries")


def check_nothing_left(run: Run) -> None:
    """No process of the run is alive."""
    assert run.process.poll() is not None
    assert run.processes() == []


def check_nothing_lost(run: Run, last: int) -> None:
    """It has ended with step `last`, and whatever died cost no committed step and no state."""
    check_each_step_once(run, last)
    check_replicas_agree(run)
    check_deaths_explained(run)
    check_nothing_left(run)
    assert run.events("checkpoint_restored") == []
