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
