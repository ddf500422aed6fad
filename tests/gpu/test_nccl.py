"""nccl: a push's group comes up beside a trainer's default group that is bound to the GPU."""

from __future__ import annotations

import pytest

from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, report_of, with_engines

pytestmark = [pytest.mark.embedded, with_engines]


def test_a_group_of_its_own_broadcasts_and_waits_for_no_other_rank(gpu: Gpu) -> None:
    found = report_of("lone_rank", gpu.device)
    assert found.pop("is_same")
    record(f"nccl alone {gpu.device}", **found)
