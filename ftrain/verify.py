"""`ftrain verify RUN_DIR`: judges a run by its records alone. Never jax.

A rule that is broken is a failure. What the records cannot tell, because who would have written it
died between the fact and its line, is unknown and no failure, as in Jepsen. The rules are in
`step_rules` and `fault_rules`, one function each; docs/records.md says them in words.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ftrain import fault_rules, step_rules
from ftrain.findings import FAIL, UNKNOWN, Finding
from ftrain.records import Records, read_records
from ftrain.recoveries import is_death

SHOWN = 5  # findings of a rule, on the screen


class Rule(NamedTuple):
    """A claim about every run, and what finds where it does not hold."""

    name: str
    claim: str
    check: Callable[[Records], Iterable[Finding]]


RULES = (
    Rule("records", "every whole line is a record", step_rules.records),
    Rule(
        "lineage",
        "one history: no step missing, none twice but after a restore",
        step_rules.lineage,
    ),
    Rule("cursor", "each step took one batch, in order", step_rules.cursor),
    Rule("members", "only live members committed, and enough of them", step_rules.members),
    Rule("digests", "replicas equal bit for bit wherever that was due", step_rules.digests),
    Rule("deaths", "each explained, and fenced before its replacement started", fault_rules.deaths),
    Rule("hangs", "whoever was stuck was ended in time", fault_rules.hangs),
    Rule("recoveries", "after each fault the run went on in time", fault_rules.recoveries),
    Rule(
        "checkpoints",
        "those named are there, and what was restored was of this run",
        fault_rules.checkpoints,
    ),
    Rule("exit", "the exit code is what the records say", fault_rules.exit_code),
)


class Verdict(NamedTuple):
    """What `verify` finds.

    Attributes:
      run_dir: of the run.
      findings: of all rules, in their order.
      steps: committed, in the history that counts.
      sessions: supervisors' lives.
      deaths: of workers, but for the end of the run.
    """

    run_dir: str
    findings: tuple[Finding, ...]
    steps: int
    sessions: int
    deaths: int

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        """The broken ones."""
        return [f for f in self.findings if f.severity == FAIL]

    def as_dict(self) -> dict:
        """As plain JSON."""
        return {
            "ok": self.ok,
            "run_dir": self.run_dir,
            "steps": self.steps,
            "sessions": self.sessions,
            "deaths": self.deaths,
            "rules": [rule.name for rule in RULES],
            "findings": [f._asdict() for f in self.findings],
        }

    def __str__(self) -> str:
        """For a reader: the verdict, then each rule with what was found."""
        by_rule = collections.defaultdict(list)
        for finding in self.findings:
            by_rule[finding.rule].append(finding)
        lines = [
            f"{self.run_dir}: {'good' if self.ok else 'BAD'}; {_count(self.steps, 'step')}, "
            f"{_count(self.sessions, 'session')}, {_count(self.deaths, 'death')}"
        ]
        for rule in RULES:
            found = by_rule[rule.name]
            lines.append(f"  {_word(found):7} {rule.name:11} {rule.claim}")
            lines += [f"          {f.severity}: {f.message}" for f in found[:SHOWN]]
            if len(found) > SHOWN:
                lines.append(f"          and {len(found) - SHOWN} more (--json has them all)")
        return "\n".join(lines)


def verify(run_dir: str | os.PathLike[str]) -> Verdict:
    """Judges a run, finished or not, by its records.

    Raises:
      NoRunError: there is no run in that folder.
    """
    return judge(read_records(run_dir))


def judge(records: Records) -> Verdict:
    """Judges records that have been read."""
    found = tuple(finding for rule in RULES for finding in rule.check(records))
    deaths = [e for e in records.events if e.name == "worker_exited" and is_death(e)]
    return Verdict(records.run_dir, found, len(records.history), len(records.sessions), len(deaths))


def main(arguments: argparse.Namespace) -> int:
    """The command: 0 if no rule is broken, else 1."""
    verdict = verify(arguments.run_dir)
    text = json.dumps(verdict.as_dict(), indent=1) if arguments.json else str(verdict)
    sys.stdout.write(text + "\n")
    return 0 if verdict.ok else 1


def _word(found: list[Finding]) -> str:
    severities = {f.severity for f in found}
    return "BROKEN" if FAIL in severities else "unknown" if UNKNOWN in severities else "ok"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
