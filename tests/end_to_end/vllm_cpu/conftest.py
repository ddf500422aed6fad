"""Two groups of one real vLLM engine each behind the real router."""

import pytest

from tests.support.real_fixtures import known_weights_after, models, policy

__all__ = ["known_weights_after", "models", "policy"]


@pytest.fixture(scope="module")
def kind() -> str:
    return "vllm"
