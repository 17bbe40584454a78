"""The protocol as designed in several settings, and the protocol without one rule.

Shared by the test, which looks for the first schedule that catches each variant, and by
`python -m tests.protocol --sweep`, which counts them.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .rules import Rules, Setting
from .world import Verdict, World

ENDS = Setting(steps=40)
STOPS = Setting(stop_request=True)

AS_DESIGNED = {
    "goes on": Setting(),
    "ends at step 40": ENDS,
    "ends at step 3": Setting(steps=3),
    "goes on, lean": Setting(lean=True),
    "ends at step 40, lean": Setting(steps=40, lean=True),
    "goes on, 4 steps a commit": Setting(steps_per_commit=4),
    "ends at step 40, 3 steps a commit": Setting(steps=40, steps_per_commit=3),
    "is stopped, 4 steps a commit": Setting(stop_request=True, steps_per_commit=4),
    "is stopped": STOPS,
    "is stopped, min_workers 2": Setting(stop_request=True, min_workers=2),
    "is stopped, the dead are not replaced": Setting(stop_request=True, replace_after_stop=False),
}


class Variant(NamedTuple):
    """What goes wrong without some rules, and the seeds among which it is seen to."""

    claim: str
    without: tuple[str, ...]
    setting: Setting
    seeds: range
    kinds: set[str]  # as `Verdict.caught` names them


LEFT_OUT = [
    Variant(
        "a cancelled collective completes with garbage, and the survivor commits it",
        ("r1_commit_on_barriers_word",),
        Setting(),
        range(20),
        {"GARBAGE"},
    ),
    Variant(
        "gradients of a state that was not committed go into a step of the one that was",
        ("r1_ahead_is_of_committed_state",),
        Setting(),
        range(20),
        {"DIVERGED"},
    ),
    Variant(
        "whoever got its SIGTERM first meets the others while they take the next step",
        ("r1_steps_of_a_commit_end_alike",),
        Setting(stop_request=True, steps_per_commit=4),
        range(40),
        {"DEADLOCK", "SPLIT", "FORK", "RECOMMIT"},
    ),
    Variant(
        "a worker that restarts quickly is taken for its former life",
        ("r2_view_is_incarnations",),
        Setting(),
        range(40),
        {"SPLIT", "STALL", "IMPOSTOR", "MISMATCH"},
    ),
    Variant(
        "with nobody dead a failed worker retries alone what the others have committed",
        ("r3_failure_reregisters",),
        Setting(),
        range(40),
        {"RECOMMIT", "FORK", "STALL"},
    ),
    Variant(
        "a local error waits in the barrier for peers who wait for it in a collective",
        ("r3_local_error_ends_process",),
        Setting(),
        range(20),
        {"DEADLOCK"},
    ),
    Variant(
        "whoever got its SIGTERM first finishes while the others step",
        ("r3_stop_travels_in_buffer",),
        STOPS,
        range(40),
        {"SPLIT"},
    ),
    Variant(
        "the view holds one who is not there, and who holds the state is not yet told",
        ("r4_settle_before_collective",),
        Setting(),
        range(20),
        {"LOST"},
    ),
    Variant(
        "a blank lowest worker restores while others hold newer state",
        ("r5_donor_is_furthest_ahead",),
        Setting(),
        range(10),
        {"LOST"},
    ),
    Variant(
        "a key that is overwritten is read late, its writer taken for blank",
        ("r5_ranks_under_view_name",),
        ENDS,
        range(90, 150),
        {"LOST"},
    ),
    Variant(
        "a view that comes back reads that it is not stopping, and trains on after the end",
        ("r5_recurring_view_publishes_again",),
        STOPS,
        range(100),
        {"TRAINS AFTER THE END", "LOST", "FINISHED EARLY"},
    ),
    Variant(
        "a worker that joins a stopping view steps while the others finish",
        ("r5_stopping_published",),
        STOPS,
        range(40),
        {"SPLIT"},
    ),
    Variant(
        "a sync that was cancelled leaves garbage, which is taken for the state",
        ("r6_digest_is_checked",),
        Setting(),
        range(40),
        {"GARBAGE"},
    ),
    Variant(
        "the donor dies in the step after the sync, and the state with it",
        ("r6_verified_sync_is_kept",),
        Setting(),
        range(40),
        {"REWIND"},
    ),
    Variant(
        "a worker is told that the view is stopping, forgets it with the block, and trains on",
        ("r6_stopping_is_kept",),
        STOPS,
        range(90, 150),
        {"TRAINS AFTER THE END", "FINISHED EARLY"},
    ),
    Variant(
        "a gloo group that failed once stays dead for these ids",
        ("r7_new_communicators",),
        Setting(style="cpu"),
        range(20),
        {"STALL"},
    ),
    Variant(
        "the one who saves dies after the others have left",
        ("r8_leaving_is_agreed",),
        ENDS,
        range(40),
        {"REWIND", "LOST AT THE END"},
    ),
    Variant(
        "a late worker without state restores a run that is over",
        ("r8_finished_is_looked_at_first",),
        ENDS,
        range(60),
        {"RESTORED AFTER THE END"},
    ),
    Variant(
        "a fence that comes late hits the replacement: the last with state ends itself",
        ("r9_fence_before_start",),
        Setting(),
        range(80),
        {"REWIND", "LOST"},
    ),
    Variant(
        "... and without the self check two processes are one worker",
        ("r9_fence_before_start", "r9_self_check"),
        Setting(),
        range(20),
        {"IMPOSTOR", "REWIND", "LOST", "FORK", "ZOMBIE"},
    ),
    Variant(
        "a replaced worker wakes up and arrives at the barrier in its replacement's place",
        ("r9_kill_first",),
        Setting(),
        range(20),
        {"DEADLOCK"},
    ),
    Variant(
        "a replaced worker with old state wakes up, fails, and takes its id back by re-registering",
        ("r9_kill_first",),
        Setting(kills=False),
        range(20, 60),
        {"REWIND", "RECOMMIT", "FORK"},
    ),
    Variant(
        "... and without the self check takes part in its replacement's place",
        ("r9_kill_first", "r9_self_check"),
        Setting(),
        range(20),
        {"IMPOSTOR", "REWIND", "LOST", "FORK", "STALL", "RECOMMIT"},
    ),
    Variant(
        "a view below min_workers never learns that the run is over",
        ("r9_min_workers_after_sync",),
        Setting(steps=40, min_workers=2),
        range(40),
        {"STALL"},
    ),
]


def run(seed: int, setting: Setting, without: Iterable[str] = ()) -> Verdict:
    return World(seed, Rules(**dict.fromkeys(without, False)), setting).run()


class Sweep(NamedTuple):
    schedules: int
    caught: Counter[str]
    first: dict[str, int]  # the lowest seed of each kind
    count: Counter[str]


def sweep(seeds: range, setting: Setting, without: Iterable[str] = ()) -> Sweep:
    total = Sweep(len(seeds), Counter(), {}, Counter())
    for seed in seeds:
        verdict = run(seed, setting, without)
        total.count.update(verdict.count)
        if verdict.caught:
            total.caught[verdict.caught] += 1
            total.first.setdefault(verdict.caught, seed)
    return total
