"""Every test that takes ``world`` runs over the stub of Ray and over Ray itself."""

from collections.abc import Iterator

import pytest

from tests.support.ray_worlds import World, stub_world


@pytest.fixture(scope="module", params=["stub", pytest.param("ray", marks=pytest.mark.ray)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_cluster")
    else:
        with stub_world() as stub:
            yield stub


# Files of which only what runs over the stub is quick enough for the default run.
SLOW_ON_RAY = (
    "lost_actors",
    "wide_engines",
    "recovery",
    "placement_group",
    "existing_group",
    "stacked",
    "attached",
    "connect",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {f"test_{name}" for name in SLOW_ON_RAY}
    for item in items:
        if item.path.stem in slow and item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.slow)
