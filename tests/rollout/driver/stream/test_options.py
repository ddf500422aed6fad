"""Settings of a rollout: capacity and staleness; seeds of samples."""

import pytest

from engines.protocol import VersionSpan
from rollout.core.samples import Sample
from rollout.driver.stream.group_runner import seed_of
from rollout.driver.stream.options import RolloutOptions, capacity, is_stale


@pytest.mark.parametrize(
    ("mode", "lag", "is_requested", "most"),
    [
        ("sync", None, True, 12),
        ("sync", None, False, 0),
        ("one_ahead", None, True, 12),
        ("one_ahead", 4, False, 12),
        ("async", None, False, 20),
        ("async", 0, True, 20),
        ("async", 3, False, 36),
    ],
)
def test_capacity_is_bounded_in_every_mode(mode, lag, is_requested: bool, most: int) -> None:
    options = RolloutOptions(mode=mode, over_sampling=1.5, max_version_lag=lag)
    assert capacity(options, 8, is_requested=is_requested) == most


def sample(*versions: str) -> Sample:
    spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions))
    return Sample([1], [0] * len(spans), [0.0] * len(spans), weight_versions=spans)


@pytest.mark.parametrize(
    ("current", "max_lag", "versions", "is_old"),
    [
        (5, 1, ("4", "5"), False),
        (5, 1, ("3", "5"), True),
        (5, 1, ("5", "6"), False),
        (5, 1, ("5", "7"), True),
        (5, 0, ("5",), False),
        (5, None, ("0",), False),
        (None, 0, ("0",), False),
        (5, 0, (), False),
        (5, 0, ("default",), False),
    ],
)
def test_a_sample_is_as_old_as_its_oldest_token(current, max_lag, versions, is_old: bool) -> None:
    options = RolloutOptions(max_version_lag=max_lag)
    assert is_stale(options, sample(*versions), current) is is_old


def test_seeds_are_distinct_31_bit_integers() -> None:
    seeds = {seed_of(1, serial, index, 0) for serial in range(100) for index in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(1, 2, 3, 0) == seed_of(1, 2, 3, 0) != seed_of(1, 2, 3, 1)
