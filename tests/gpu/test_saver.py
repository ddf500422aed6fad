"""saver: regions of the memory saver give their bytes back, and come back at the same address."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gpu.figures import record
from tests.support.gpu.machine import Gpu, need, report_of, with_engines

pytestmark = [pytest.mark.embedded, with_engines]
REGION_GIB = 4


@pytest.mark.parametrize(("backup", "retain"), [("none", "0"), ("backup", "0"), ("backup", "1")])
def test_two_regions_are_released_and_resumed(gpu: Gpu, backup: str, retain: str) -> None:
    need("torch_memory_saver", gpu)
    num_bytes = gpu.need_free(2 * REGION_GIB + 2) * REGION_GIB // (2 * REGION_GIB + 2)
    report = report_of(
        *("saver", gpu.device, str(gpu.gpu_id), str(num_bytes), backup, "3"),
        TMS_RETAIN_CPU_BACKUP=retain,
    )
    assert report["same_address"]
    assert len(report["rounds"]) == 3
    for found in report["rounds"]:
        check_round(found, num_bytes, has_backup=backup == "backup")
    last = report["rounds"][-1]
    record(
        f"saver {gpu.device} backup {backup} retained {retain}",
        seconds=last["resume_s"],
        num_bytes=num_bytes,
        **{name: last[name] for name in ("release_s", "release_kv_s", "resume_kv_s")},
        first_release_s=report["rounds"][0]["release_s"],
    )


def check_round(found: dict[str, Any], num_bytes: int, *, has_backup: bool) -> None:
    assert found["held"] - found["released"] >= 0.95 * 2 * num_bytes
    assert found["weights_only"] - found["released"] >= 0.95 * num_bytes
    assert found["held"] - found["weights_only"] >= 0.95 * num_bytes
    assert found["resumed"] >= found["held"] - num_bytes // 20
    assert found["weights_kept"] is has_backup
    assert found["cache_is_zero"]
