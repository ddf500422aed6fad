"""When a request that had no reply is sent again."""

import pytest

from rollout.driver.client.generation_client import FailureKind, GenerationError
from rollout.driver.client.retry import RetryPolicy, RetryState


def test_a_refusal_is_never_retried() -> None:
    assert wait(RetryState(), FailureKind.REFUSED) is None


def wait(retry_state: RetryState, kind: FailureKind, now_s: float = 0.0, after_s: float = 0.0):
    policy = RetryPolicy(max_lost=3, unavailable_s=60.0, max_empty_aborts=4)
    error = GenerationError("", kind=kind, retry_after_s=after_s)
    return retry_state.wait_s(error, now_s=now_s, policy=policy)


def test_the_wait_after_a_lost_engine_doubles_until_the_limit_is_reached() -> None:
    retry_state = RetryState()
    assert [wait(retry_state, FailureKind.LOST) for _ in range(4)] == [0.1, 0.2, 0.4, None]


def test_empty_aborts_fail_at_their_limit_and_progress_resets_their_count() -> None:
    retry_state = RetryState()
    for _ in range(4):
        assert wait(retry_state, FailureKind.ABORTED) is not None
    retry_state.has_progressed()
    assert wait(retry_state, FailureKind.ABORTED) == 0.1
    assert [wait(retry_state, FailureKind.ABORTED) for _ in range(4)][-1] is None


@pytest.mark.parametrize(
    ("now_s", "after_s", "expected"),
    [(0.0, 2.0, 2.0), (0.0, 0.0, 1.0), (0.0, 500.0, 10.0), (59.0, 5.0, 1.0), (60.0, 2.0, None)],
)
def test_an_unavailable_server_is_retried_until_the_limit(now_s, after_s, expected) -> None:
    retry_state = RetryState(unavailable_since_s=0.0)
    assert wait(retry_state, FailureKind.UNAVAILABLE, now_s, after_s) == expected


def test_another_failure_resets_the_time_of_an_unavailable_server() -> None:
    retry_state = RetryState(unavailable_since_s=0.0)
    wait(retry_state, FailureKind.LOST)
    assert wait(retry_state, FailureKind.UNAVAILABLE, now_s=100.0, after_s=2.0) == 2.0
