"""Every test that takes ``world`` runs over the stub of Ray and over Ray itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ray_worlds import World, stub_world


@pytest.fixture(scope="module", params=["stub", pytest.param("ray", marks=pytest.mark.ray)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_cluster")
    else:
        with stub_world() as stub:
            yield stub


# Of the files here this one also runs over Ray itself by default, to compare the stub with it.
QUICK_ON_RAY = {"test_ray_semantics"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        if is_here and item.path.stem not in QUICK_ON_RAY and item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.slow)
