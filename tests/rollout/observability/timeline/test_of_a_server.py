"""The spans that a server over fake engines records of a step and its failures."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines.fake import FakeEngine
from engines.protocol import WeightsReport
from engines.protocol.errors import EngineUnreachable
from rollout.observability.server_snapshot import ServerSnapshot
from rollout.observability.timeline.analysis import steps
from rollout.observability.timeline.span import Kind, Outcome, Span
from tests.support.builders import RecordingRouter, ServerBench, push, started_server


async def snapshot_of(bench: ServerBench) -> ServerSnapshot:
    return await bench.server.observe({})


def spans_of(snapshot: ServerSnapshot) -> list[Span]:
    return [span for excerpt in snapshot.timelines.values() for span in excerpt.spans]


async def test_a_step_is_phases_groups_and_engines_with_versions_and_memory(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    await bench.server.push(push(1))
    spans = spans_of(await snapshot_of(bench))
    (step,) = steps(spans)
    assert step.weight_version == 1
    verified = [span for span in spans if span.verified_by]
    assert {(span.kind, span.name, span.verified_by) for span in verified} == {
        (Kind.ENGINE, "verify", "fingerprint")
    }
    assert [span.read_bytes for span in verified] == [None] * 3
    assert set(step.slowest) >= {
        "pause_generation",
        "flush_cache",
        "release_memory_occupation",
        "update_weights",
        "verify",
    }
    released = [
        span
        for span in spans
        if (span.kind, span.name) == (Kind.ENGINE, "release_memory_occupation")
    ]
    assert sorted(span.engine_id for span in released) == ["shared-0", "shared-1"]
    assert all(span.freed_bytes and span.freed_bytes > 0 for span in released)
    resumed = [span for span in spans if (span.kind, span.name) == (Kind.ENGINE, "onload_weights")]
    assert all((span.freed_bytes or 0) < 0 for span in resumed)
    assert [span.said for span in spans if span.name == "gate"][-1] == "open at weight version 1"
    assert all(span.budget_s > 0 for span in spans if span.kind is Kind.PHASE)
    await bench.server.stop()


async def test_a_verification_has_the_bytes_that_its_engine_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FakeEngine.weights_checker

    async def reporting(self: FakeEngine, action: str = "checksum") -> WeightsReport:
        return replace(await read(self, action), num_bytes=1024)

    monkeypatch.setattr(FakeEngine, "weights_checker", reporting)
    bench = await started_server(tmp_path)
    await bench.server.offload()
    await bench.server.push(push(1))
    spans = [span for span in spans_of(await snapshot_of(bench)) if span.name == "verify"]
    assert [span.read_bytes for span in spans if span.kind is Kind.ENGINE] == [1024] * 3
    await bench.server.stop()


async def test_an_engine_that_fails_is_a_failed_span_and_an_event(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    bench["shared-1"].fail_next("release_memory_occupation", EngineUnreachable("it is gone"))
    await bench.server.offload()
    spans = spans_of(await snapshot_of(bench))
    (failed,) = [span for span in spans if span.outcome is Outcome.FAILED]
    assert (failed.kind, failed.name, failed.engine_id) == (
        Kind.ENGINE,
        "release_memory_occupation",
        "shared-1",
    )
    assert "it is gone" in failed.said
    (fenced,) = [span for span in spans if span.name == "fenced"]
    assert fenced.engine_id == "shared-1"
    await bench.server.stop()


async def test_a_part_that_does_not_answer_is_named_and_the_rest_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path)

    async def lost(router: RecordingRouter) -> dict:
        raise ConnectionError("its actor is gone")

    monkeypatch.setattr(RecordingRouter, "stats", lost)
    snapshot = await snapshot_of(bench)
    assert snapshot.troubles == ("router does not answer: its actor is gone",)
    assert len(snapshot.status.groups) == 2
    await bench.server.stop()


async def test_a_manual_fence_takes_the_engine_out_of_routing(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.fence("shared-0", "looks wrong to me")
    assert bench.router.states["shared-0"] == "fenced"
    await bench.server.stop()
