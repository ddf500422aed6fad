"""What an abort ends over real vLLM, and what it leaves."""

from __future__ import annotations

import pytest

from tests.support import abort_story
from tests.support.real_policy import RealPolicy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_an_abort_ends_the_replies_of_its_call_and_no_others(policy: RealPolicy) -> None:
    abort_story.check_aborts_of_calls(policy.handle)


def test_an_abort_ends_the_request_of_its_id_and_no_other(policy: RealPolicy) -> None:
    version = policy.handle.weight_version + 1
    abort_story.check_aborts_of_ids(policy.handle, policy.next_tensors(), version)
