"""What the proof of weights cost: measured, or said to be unknown."""

from __future__ import annotations

import json
import logging

import pytest

from engines.fake import FakeEngine
from engines.protocol import WeightsReport
from rollout.checking_cost import Read, cost_of
from rollout.types import EngineReport, PhaseReport, StepReport
from tests.support.builders import push, started_group

GIB = 2**30


def test_the_cost_is_per_gib() -> None:
    cost = cost_of([Read(0.5, GIB, 0.4), Read(0.3, GIB, 0.2)], wall_s=0.5)
    assert cost is not None
    assert cost.gib_per_s == pytest.approx(4.0)
    assert cost.s_per_gib == pytest.approx(0.4)
    assert cost.cpu_s_per_gib == pytest.approx(0.3)
    assert str(cost) == (
        "fingerprints of 2 engines in 0.500 s: 2.00 GiB, 4.00 GiB/s, 0.400 s per GiB, "
        "CPU 0.300 s per GiB"
    )


def test_what_one_does_not_tell_is_unknown_of_all() -> None:
    cost = cost_of([Read(0.5, GIB, 0.4), Read(0.3)], wall_s=0.5)
    assert cost is not None
    assert (cost.num_bytes, cost.gib_per_s, cost.s_per_gib, cost.cpu_s_per_gib) == (None,) * 4
    assert str(cost) == "fingerprints of 2 engines in 0.500 s, bytes unknown"
    assert "CPU unknown" in str(cost_of([Read(0.5, GIB)], wall_s=0.5))
    assert json.loads(json.dumps(cost.to_dict()))["said"] == str(cost)


def test_where_nothing_was_read_there_is_no_cost() -> None:
    assert cost_of([], wall_s=0.5) is None
    by_version = PhaseReport("main", "verify", "verified", 0.1, (EngineReport("e", 0.1),))
    assert StepReport({"verify": 0.1}, reports=(by_version,)).checking is None


def test_a_step_adds_its_groups_up_over_the_seconds_of_the_phase() -> None:
    def group(name: str, elapsed_s: float) -> PhaseReport:
        engine = EngineReport(f"{name}-0", elapsed_s, proved_by="fingerprint", read_bytes=GIB)
        return PhaseReport(name, "verify", "verified", elapsed_s, (engine,))

    cost = StepReport({"verify": 2.0}, reports=(group("a", 1.0), group("b", 2.0))).checking
    assert cost is not None
    assert (cost.num_engines, cost.gib_per_s, cost.s_per_gib) == (2, 1.0, 1.5)


async def test_a_group_logs_what_its_proof_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = FakeEngine.weights_checker

    async def telling(self: FakeEngine, action: str = "checksum") -> WeightsReport:
        report = await read(self, action)
        return WeightsReport(report.checksum, report.tensors, num_bytes=GIB // 2, cpu_s=0.25)

    for is_told, said in ((False, "bytes unknown"), (True, "1.00 GiB, ")):
        if is_told:
            monkeypatch.setattr(FakeEngine, "weights_checker", telling)
        group, _ = await started_group(2)
        await group.pause()
        await group.flush()
        await group.update_weights(push(1))
        with caplog.at_level(logging.INFO, "rollout.group_commands"):
            report = await group.verify(1)
        assert {one.proved_by for one in report.engines} == {"fingerprint"}
        assert said in caplog.messages[-1]
        assert caplog.messages[-1].startswith("group main: verify -> verified in ")
    assert report.checking is not None
    assert report.checking.cpu_s_per_gib == pytest.approx(0.5)
