"""Every test that takes ``world`` runs over the stub of Ray and over Ray itself."""

from collections.abc import Iterator

import pytest

from tests.support.ray_worlds import RayWorld, World, ray_world, stub_world


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayWorld]:
    """One cluster for all: starting it is the slow part."""
    with ray_world() as world:
        yield world


@pytest.fixture(scope="module", params=["stub", pytest.param("ray", marks=pytest.mark.ray)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_cluster")
    else:
        with stub_world() as stub:
            yield stub
