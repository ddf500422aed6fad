"""Real engines: after a push, no reply has anything that older weights computed."""

from __future__ import annotations

import os

import pytest

from tests.support.old_state import ROUTES, check_pairs
from tests.support.real_policy import RealPolicy

NUM_PAIRS = int(os.environ.get("ROLLOUT_OLD_STATE_PAIRS", "120"))

pytestmark = pytest.mark.timeout(300 + NUM_PAIRS)


async def test_equal_requests_before_and_after_a_push_are_each_of_their_own_weights(
    policy: RealPolicy,
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    counts = await check_pairs(policy, NUM_PAIRS)
    record_property("counts", counts)
    print(counts)
    assert all(counts[route] for route in ROUTES)
    assert counts["cached"]  # of those that are sent again
