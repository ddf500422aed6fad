"""Two groups of one real engine each behind the real router, of each kind."""

import pytest

from tests.support.real_fixtures import known_weights_after, models, policy

__all__ = ["known_weights_after", "models", "policy"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("vllm", marks=pytest.mark.vllm),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
