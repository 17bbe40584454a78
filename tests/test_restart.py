"""When a failed worker is started again, and when that is given up."""

from __future__ import annotations

import pytest

from ftrain.config import Restart
from ftrain.errors import RestartLimitError
from ftrain.restart import LocalErrors, RestartBudget

RULES = Restart(max_failures=5, renew_after_steps=10, backoff_s=0.5, backoff_max_s=3.0)


def delays(budget: RestartBudget, *commits: int, worker: int = 0) -> list[float]:
    """The waits after failures that each came so many commits after the start before them."""
    return [budget.delay_after_failure(worker, n, "SIGKILL") for n in commits]


def test_the_first_restart_is_at_once_then_the_wait_doubles_up_to_its_limit():
    """0, then backoff_s, twice that, and so on, never more than backoff_max_s."""
    assert delays(RestartBudget(RULES), 0, 0, 0, 0, 0) == [0, 0.5, 1, 2, 3]


def test_one_failure_too_many_gives_up_with_worker_count_rule_and_cause():
    """The message says what to look at and what to do."""
    budget = RestartBudget(RULES)
    delays(budget, 0, 0, 0, 0, 0, worker=3)
    with pytest.raises(RestartLimitError) as caught:
        budget.delay_after_failure(3, 0, "SIGSEGV")
    assert str(caught.value) == (
        "worker 3 failed 6 times in a row, restart.max_failures=5, last by SIGSEGV; "
        "see logs/worker-3.log, mend the cause and run the same command again"
    )


def test_enough_commits_of_its_own_end_a_row():
    """A worker that has worked for a while is restarted at once again."""
    assert delays(RestartBudget(RULES), 0, 0, 10, 0) == [0, 0.5, 0, 0.5]


def test_too_few_commits_do_not_end_a_row():
    """One short of renew_after_steps."""
    assert delays(RestartBudget(RULES), 0, 9, 9) == [0, 0.5, 1]


def test_commits_of_several_short_lives_do_not_add_up():
    """Nine and nine are not eighteen: it is a crash loop with a long period."""
    assert delays(RestartBudget(RULES), 9, 9, 9, 9, 9) == [0, 0.5, 1, 2, 3]


def test_workers_have_budgets_of_their_own():
    """A flaky machine does not use up the others' restarts."""
    budget = RestartBudget(RULES)
    delays(budget, 0, 0, 0, worker=1)
    assert delays(budget, 0, worker=2) == [0]


def test_without_any_failures_allowed_the_first_ends_the_run():
    """max_failures=0, whatever the others do."""
    budget = RestartBudget(RULES.model_copy(update={"max_failures": 0}))
    with pytest.raises(RestartLimitError):
        budget.delay_after_failure(0, 0, "SIGKILL", others_train=True)


def test_many_failures_do_not_overflow_the_wait():
    """2**1000 seconds is no number of seconds."""
    rules = Restart(max_failures=3000, renew_after_steps=1, backoff_s=0.5, backoff_max_s=30.0)
    assert max(delays(RestartBudget(rules), *[0] * 1000)) == 30


# Local errors.


def test_one_error_is_bad_luck():
    """The worker may try again."""
    assert LocalErrors(4, 10).crash_loop(0, 7, 0, "OSError: disk", "Traceback 0") is None


def test_the_same_error_at_another_step_is_bad_luck_too():
    """A flaky disk, twice on one worker."""
    errors = LocalErrors(4, 10)
    errors.crash_loop(0, 7, 0, "OSError: disk", "")
    assert errors.crash_loop(0, 8, 0, "OSError: disk", "") is None


def test_another_error_at_the_same_step_is_bad_luck_too():
    """Only the same error again is told from chance."""
    errors = LocalErrors(4, 10)
    errors.crash_loop(0, 7, 0, "OSError: disk", "")
    assert errors.crash_loop(1, 7, 0, "ValueError: bad", "") is None


def test_the_same_error_again_at_the_same_step_is_a_crash_loop():
    """A bad record: whoever reads it fails. The first traceback comes with it."""
    errors = LocalErrors(4, 10)
    errors.crash_loop(0, 7, 0, "ValueError: bad", "Traceback of worker 0")
    why = errors.crash_loop(2, 7, 1, "ValueError: bad", "Traceback of worker 2")
    assert why == ("the same error came again at step 7; the first was\nTraceback of worker 0")


def test_a_worker_over_its_budget_is_in_quarantine_while_the_others_train():
    """Not a reason to stop them: it is tried again after the longest wait."""
    budget = RestartBudget(RULES)
    delays(budget, 0, 0, 0, 0, 0, worker=3)
    assert not budget.in_quarantine(3)
    for _ in range(3):
        assert budget.delay_after_failure(3, 0, "SIGSEGV", others_train=True) == 3.0
        assert budget.in_quarantine(3)
    with pytest.raises(RestartLimitError):
        budget.delay_after_failure(3, 0, "SIGSEGV", others_train=False)


def test_a_worker_leaves_quarantine_with_enough_commits():
    """Whatever it was has passed."""
    budget = RestartBudget(RULES)
    delays(budget, 0, 0, 0, 0, 0, worker=3)
    budget.delay_after_failure(3, 0, "SIGSEGV", others_train=True)
    assert budget.delay_after_failure(3, 10, "SIGKILL", others_train=True) == 0
    assert not budget.in_quarantine(3)


def test_the_same_error_on_every_worker_is_a_crash_loop():
    """At steps that are near one another."""
    errors = LocalErrors(3, 10)
    assert errors.crash_loop(0, 1, 0, "E", "first") is None
    assert errors.crash_loop(1, 2, 0, "E", "second") is None
    assert errors.crash_loop(2, 3, 0, "E", "third") == (
        "the same error came on all 3 workers; the first was\nfirst"
    )


def test_the_same_error_on_every_worker_far_apart_is_bad_luck():
    """A share that was away for a moment, three times in a long run."""
    errors = LocalErrors(3, 10)
    for worker, step in ((0, 1), (1, 20), (2, 40)):
        assert errors.crash_loop(worker, step, step, "OSError: share", "") is None


def test_a_single_worker_may_fail_once():
    """It is every worker there is, and still deserves its second try."""
    errors = LocalErrors(1, 10)
    assert errors.crash_loop(0, 1, 0, "E", "") is None
    assert "again at step 1" in errors.crash_loop(0, 1, 0, "E", "")


def test_an_error_without_traceback_is_told_by_its_message():
    """ftrain's own errors come without one."""
    errors = LocalErrors(2, 10)
    errors.crash_loop(0, 1, 0, "DatasetError: sample 3", "")
    assert errors.crash_loop(0, 1, 0, "DatasetError: sample 3", "").endswith(
        "DatasetError: sample 3"
    )


def test_two_workers_in_one_attempt_may_have_met_something_passing():
    """A share that was away for a second: both are replaced, and the step is tried again."""
    errors = LocalErrors(4, 10)
    errors.crash_loop(0, 7, 3, "OSError: share", "")
    assert errors.crash_loop(1, 7, 3, "OSError: share", "") is None
    assert "again at step 7" in errors.crash_loop(2, 7, 4, "OSError: share", "")
