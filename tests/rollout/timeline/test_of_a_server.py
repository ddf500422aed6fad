"""What a server over fake engines records of a step, and of what goes wrong in it."""

from pathlib import Path

import pytest

from engines.errors import EngineUnreachable
from rollout.observation import Observation
from rollout.timeline.analysis import steps
from rollout.timeline.span import Kind, Outcome, Span
from tests.support.builders import RecordingRouter, ServerBench, push, started_server


async def seen(bench: ServerBench) -> Observation:
    return await bench.server.observe({})


def spans_of(seen: Observation) -> list[Span]:
    return [span for excerpt in seen.timelines.values() for span in excerpt.spans]


async def test_a_step_is_phases_groups_and_engines_with_versions_and_memory(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.offload()
    await bench.server.onload(push(1))
    spans = spans_of(await seen(bench))
    (step,) = steps(spans)
    assert step.weight_version == 1
    assert step.checking is not None
    assert (step.checking.num_engines, step.checking.num_bytes) == (3, None)
    proved = [one for one in spans if one.proved_by]
    assert {(one.kind, one.name, one.proved_by) for one in proved} == {
        (Kind.ENGINE, "verify", "fingerprint")
    }
    assert set(step.slowest) >= {"pause", "flush", "release", "update_weights", "verify"}
    released = [one for one in spans if (one.kind, one.name) == (Kind.ENGINE, "release")]
    assert sorted(one.engine_id for one in released) == ["shared-0", "shared-1"]
    assert all(one.freed_bytes and one.freed_bytes > 0 for one in released)
    resumed = [one for one in spans if (one.kind, one.name) == (Kind.ENGINE, "resume_weights")]
    assert all((one.freed_bytes or 0) < 0 for one in resumed)
    assert [one.said for one in spans if one.name == "gate"][-1] == "open at weight version 1"
    assert all(one.budget_s > 0 for one in spans if one.kind is Kind.PHASE)
    await bench.server.stop()


async def test_an_engine_that_fails_is_a_failed_span_and_an_event(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    bench["shared-1"].fail_next("release_memory_occupation", EngineUnreachable("it is gone"))
    await bench.server.offload()
    spans = spans_of(await seen(bench))
    (failed,) = [one for one in spans if one.outcome is Outcome.FAILED]
    assert (failed.kind, failed.name, failed.engine_id) == (Kind.ENGINE, "release", "shared-1")
    assert "it is gone" in failed.said
    (fenced,) = [one for one in spans if one.name == "fenced"]
    assert fenced.engine_id == "shared-1"
    await bench.server.stop()


async def test_a_part_that_does_not_answer_is_named_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = await started_server(tmp_path)

    async def lost(router: RecordingRouter) -> dict:
        raise ConnectionError("its actor is gone")

    monkeypatch.setattr(RecordingRouter, "stats", lost)
    told = await seen(bench)
    assert told.troubles == ("router does not answer: its actor is gone",)
    assert len(told.status.groups) == 2
    await bench.server.stop()


async def test_who_fences_by_hand_takes_the_engine_out_of_routing(tmp_path: Path) -> None:
    bench = await started_server(tmp_path)
    await bench.server.fence("shared-0", "looks wrong to me")
    assert bench.router.states["shared-0"] == "fenced"
    await bench.server.stop()
