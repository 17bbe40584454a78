"""The step protocol under random schedules: with all its rules, and without each of them.

No JAX and no processes: `tests/protocol` models the coordination service, the collectives, the
workers' loop, the supervisor and the faults. A search, not a proof; a schedule that fails here is
read with `python -m tests.protocol SEED`.
"""

import pytest

from tests.protocol.variants import AS_DESIGNED, LEFT_OUT, Variant, run, sweep

CHUNK = 10


def chunks(schedules: int, start: int = 0) -> list[range]:
    return [range(seed, seed + CHUNK) for seed in range(start, start + schedules, CHUNK)]


def cases(schedules: dict[str, int], start: int = 0) -> list:
    return [
        pytest.param(name, seeds, id=f"{name}, seeds {seeds.start}-{seeds.stop - 1}")
        for name, number in schedules.items()
        for seeds in chunks(number, start)
    ]


# A run that goes on costs 0.12 s on the machine this was written on, one that ends 0.03 s.
QUICK = dict.fromkeys(AS_DESIGNED, 30) | {"goes on": 40}
MANY = dict.fromkeys(AS_DESIGNED, 1000)


def assert_holds(name: str, seeds: range) -> None:
    for seed in seeds:
        verdict = run(seed, AS_DESIGNED[name])
        assert verdict.caught is None, f"seed {seed}: {verdict}"


@pytest.mark.parametrize(("name", "seeds"), cases(QUICK))
def test_with_all_rules_nothing_is_lost_and_everybody_comes_back(name, seeds):
    """No violation, no stall, and nobody waits for one who waits for him."""
    assert_holds(name, seeds)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seeds"), cases(MANY, start=1000))
def test_with_all_rules_in_many_more_schedules(name, seeds):
    assert_holds(name, seeds)


@pytest.mark.parametrize("variant", LEFT_OUT, ids=lambda v: f"{'+'.join(v.without)}: {v.claim}")
def test_without_a_rule_the_model_shows_what_it_is_for(variant: Variant):
    """Some schedule goes wrong as the variant says; searched until the first that does."""
    for seed in variant.seeds:
        if run(seed, variant.setting, variant.without).caught in variant.kinds:
            return
    pytest.fail(f"{variant.seeds} do not show that {variant.claim}")


def test_self_check_alone_is_not_missed():
    """R9's self check is the second line: it matters once a kill or a fence was not in order."""
    assert not sweep(range(20), AS_DESIGNED["goes on"], ["r9_self_check"]).caught


def test_schedules_contain_what_the_rules_are_for():
    """The faults bite: ghosts, failed settles, re-registrations and aborts do occur."""
    count = sweep(range(20), AS_DESIGNED["goes on"]).count
    assert count["commits"] > 10_000
    assert count["kills"] > 200
    assert count["aborts"] > 500
    assert count["reregistrations"] > 300
    assert count["settle_failures"] > 50
    assert count["ghosts"] > 5


def test_a_seed_names_one_schedule():
    """The same seed gives the same schedule, so that a failure can be read again."""
    assert run(7, AS_DESIGNED["goes on"]) == run(7, AS_DESIGNED["goes on"])
