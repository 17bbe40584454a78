"""The lease: one holder a generation, and nothing of an old head counts, whenever it goes on."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from ftrain.lease import OVER, STOPPING, DeposedError, Lease, read_claim, read_lease
from ftrain.succession import STAGGER_S, Succession, Watch, find_head
from tests.lease_model import World, run

LEFT_OUT = {
    "link": "two holders",
    "fence": "",
    "all earlier": "",
    "a file in its place": "",
    "staging before the claim": "",
    "renames out of staging": "the lease went back",
    "replaced records": "an old head's records",
}
WHO = {"name": "h", "address": "10.0.0.1:7000", "lock": "l"}


def take(run_dir: Path, generation: int, rank: int = 0, **who: str) -> Lease | None:
    return Lease.take(str(run_dir), generation, rank=rank, **{**WHO, **who})


def schedules(folder: Path, count: int, without: str = "") -> list[World]:
    return [run(seed, folder / str(seed), without) for seed in range(count)]


@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_whatever_the_order_one_head_holds_and_old_ones_write_nothing(tmp_path, count):
    """Of random schedules: takers race, heads stand still anywhere and go on after others."""
    worlds = schedules(tmp_path, count)
    assert [w.wrong for w in worlds if w.wrong] == []
    assert sum(w.deposed for w in worlds) > 2 * count  # the schedules have what the rules are for
    assert sum(w.commits for w in worlds) > 6 * count


@pytest.mark.parametrize(("rule", "wrong"), LEFT_OUT.items())
def test_without_a_rule_the_model_shows_what_it_is_for(tmp_path, rule, wrong):
    """Searched until the first schedule that goes wrong."""
    for seed in range(200):
        found = run(seed, tmp_path / str(seed), rule).wrong
        if found and (not wrong or found == wrong):
            return
    pytest.fail(f"no schedule shows what {rule} is for")


# What the rules are made of, each by itself.


def test_a_generation_has_one_holder_and_names_it(tmp_path):
    """The second taker is told at once, and leaves nothing behind."""
    first = take(tmp_path, 1, rank=1)
    assert take(tmp_path, 1, rank=2) is None
    assert read_claim(str(tmp_path), 1) == first.claim == read_lease(str(tmp_path)).claim
    assert len([n for n in os.listdir(tmp_path / "head") if n.startswith("staging")]) == 1


def test_a_head_that_was_followed_can_write_nothing(tmp_path):
    """Renewing, status, config: each fails, and leaves what the new head has written."""
    old, new = take(tmp_path, 1), take(tmp_path, 2, rank=1)
    for write in (old.renew, old.stopping, lambda: old.write(tmp_path / "status.json", b"old")):
        with pytest.raises(DeposedError):
            write()
    old.end(0, "done")  # says nothing either
    new.write(tmp_path / "status.json", b"new")
    assert (tmp_path / "status.json").read_bytes() == b"new"
    assert read_lease(str(tmp_path)).claim == new.claim


def test_a_whole_checkpoint_of_a_lost_head_gets_its_name_from_the_next(tmp_path):
    """As the saver of a run on one host does; what is not whole goes."""
    old = take(tmp_path, 1)
    for name in ("7.part", "8.part.orbax-checkpoint-tmp"):
        os.mkdir(os.path.join(old.checkpoint_staging, name))
    take(tmp_path, 2)
    assert [n for n in os.listdir(tmp_path / "checkpoints") if not n.startswith(".")] == ["7"]


def test_the_records_of_a_lost_head_go_on_in_a_file_of_the_next(tmp_path):
    """What it writes later goes nowhere; a torn last line is cut."""
    from ftrain.events import EventLog, read_lines

    old = EventLog(str(tmp_path), take(tmp_path, 1).staging)
    old("one")
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b'{"torn')
    new = EventLog(str(tmp_path), take(tmp_path, 2).staging)
    old("late")
    new("two")
    assert [r["event"] for r in read_lines(str(tmp_path / "events.jsonl"))] == ["one", "two"]


# Who follows, and when.

PATIENCE_S = 10.0


class Host:
    """An agent's view of a lease, on a clock of its own."""

    def __init__(self, run_dir: Path, rank: int, hosts: list[int], start: float):
        self.succession, self.now = Succession(str(run_dir), rank, PATIENCE_S), start
        seen = read_lease(str(run_dir))
        assert self.succession.obey(seen.claim.generation, seen.claim.holder, self.now)
        self.succession.take_hosts(hosts)

    def after(self, seconds: float) -> int | None:
        """The generation to take after so many more seconds of looking."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self.succession.look(self.now)
        return self.succession.due(self.now)


def test_a_head_that_is_silent_is_followed_and_the_lowest_goes_first(tmp_path):
    """By each host's own clock, whatever that says."""
    take(tmp_path, 1)
    first, second = Host(tmp_path, 1, [1, 2], 5.0), Host(tmp_path, 2, [1, 2], 1e6)
    assert (first.after(PATIENCE_S - 1), second.after(PATIENCE_S - 1)) == (None, None)
    assert (first.after(2), second.after(1)) == (2, None)
    assert second.after(STAGGER_S + 1) == 2  # the first has not done it


def test_a_head_that_renews_is_not_followed(tmp_path):
    """However long its agents cannot reach it."""
    lease = take(tmp_path, 1)
    host = Host(tmp_path, 1, [1], 0.0)
    for _ in range(8):
        assert host.after(PATIENCE_S / 2) is None
        lease.renew()


def test_who_has_not_looked_for_a_while_looks_first(tmp_path):
    """An agent that was stopped as long as its head would else depose it at once."""
    lease = take(tmp_path, 1)
    host = Host(tmp_path, 1, [1], 0.0)
    host.after(2)
    lease.renew()
    host.now += 1000.0
    assert host.after(1) is None
    assert host.after(PATIENCE_S) == 2


@pytest.mark.parametrize("end", ["over", "stopping", "not obeyed", "not shared"])
def test_nobody_follows_a_head_that_ended_or_that_was_never_obeyed(tmp_path, end):
    """The run was stopped, or finished; or the folder is another one than the head's."""
    lease = take(tmp_path, 1)
    if end == "not obeyed":
        succession, host = Succession(str(tmp_path), 1, PATIENCE_S), None
        succession.look(0.0)
        assert succession.due(1000.0) is None
        return
    if end == "not shared":
        take(tmp_path / "other", 1)
        host = Host(tmp_path, 1, [1], 0.0)
        host.succession.obey(1, "another", 0.0)
        assert not host.succession.shared
    else:
        host = Host(tmp_path, 1, [1], 0.0)
        lease.end(75, "SIGTERM") if end == "over" else lease.stopping()
    assert host.after(3 * PATIENCE_S) is None
    states = {"over": OVER, "stopping": STOPPING}
    verdict = host.succession.verdict()
    assert (verdict and verdict.state) == states.get(end)


def test_who_took_a_generation_and_was_never_heard_of_is_passed_over(tmp_path):
    """It died between its claim and its lease: the next generation is taken, a while later."""
    take(tmp_path, 1)
    host = Host(tmp_path, 1, [1], 0.0)
    assert host.after(PATIENCE_S + 1) == 2
    with mock.patch.object(Lease, "_fence", side_effect=DeposedError(2)):
        assert take(tmp_path, 2, rank=2) is None
    assert take(tmp_path, 2) is None
    host.succession.lost_race(2, host.now)
    assert host.after(1) is None
    assert host.after(PATIENCE_S) == 3


def test_an_agent_obeys_no_older_head_than_it_knows(tmp_path):
    """And knows of a newer one by the lease, and where to call it."""
    take(tmp_path, 1)
    host = Host(tmp_path, 2, [1, 2], 0.0)
    assert host.succession.address() == ""  # where the user said
    new = take(tmp_path, 2, rank=1, address="10.0.0.2:7000")
    assert host.after(2) is None
    assert host.succession.generation == 2
    assert host.succession.address() == "10.0.0.2:7000"
    assert not host.succession.obey(1, "old", host.now)
    assert host.succession.obey(2, new.claim.holder, host.now)


def test_a_command_finds_the_head_that_lives_and_no_other(tmp_path):
    """One that writes is joined; ended, silent, or known dead by its lock, it is followed."""
    assert find_head(str(tmp_path), "mine", 0.5) is None
    lease = take(tmp_path, 1, lock="its")
    assert find_head(str(tmp_path), "its", 60.0) is None  # this process holds the lock it held
    said: list[str] = []
    assert find_head(str(tmp_path), "mine", 2.5, said.append) is None
    assert "waiting up to 2.5 s" in said[0]
    watch = Watch(str(tmp_path))
    watch.look(0.0)
    lease.renew()
    watch.look(1.0)
    assert watch.seen.beat == 2 and watch.silent_s(4.0) == 3.0
    lease.end(0, "done")
    assert find_head(str(tmp_path), "mine", 60.0) is None
