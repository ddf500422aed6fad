"""The record of all engines' health, without engines."""

from typing import Any

import pytest

from rollout.config import HealthConfig
from rollout.control.group.probe import EngineProbe, GroupProbe
from rollout.control.recovery.health_tracker import HealthTracker
from rollout.rules.health import ProbeResult


class CountingTerms:
    """The terms of a group that count how often the group as a whole is considered."""

    needs_offload = False
    has_processes = True
    num_reads = 0

    @property
    def min_engines(self) -> int:
        self.num_reads += 1
        return 1


@pytest.mark.parametrize(
    ("finding", "num_reads"),
    [(ProbeResult.ANSWERED, 0), (ProbeResult.FAILED, 0), (ProbeResult.EXITED, 8)],
)
def test_a_round_of_probes_considers_the_group_only_for_engines_that_may_be_dead(
    finding: ProbeResult, num_reads: int
) -> None:
    terms: Any = CountingTerms()
    record = HealthTracker(HealthConfig(), {"main": terms}, dict, lambda: 0.0)
    names = [f"main-{index}" for index in range(8)]
    record.add_all({"main": names})
    probe = GroupProbe(True, tuple(EngineProbe(name, finding) for name in names))
    record.apply_probe("main", probe, record.snapshot()["main"])
    assert terms.num_reads == num_reads
