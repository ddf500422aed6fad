"""The recording of spans, what is kept of them, and how running spans appear."""

import asyncio
import threading
from pathlib import Path

import psutil
import pytest

from engines.protocol.errors import EngineRejected
from rollout.core.fanout import fan_out
from rollout.observability.timeline.recorder import Timeline, current_span, record_event
from rollout.observability.timeline.span import Cursor, Kind, Outcome, Span
from rollout.observability.timeline.span_file import SpanFile, read_lines
from tests.support.asking import asking


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_fan_out_within_a_span_records_each_engine_and_each_call() -> None:
    timeline = Timeline("policy/main")
    async with asking({"success": True}, engine_id="main-0") as (client, _):

        async def update() -> None:
            await client.update_weights_from_tensor(["x" * 100])

        with timeline.span(Kind.PHASE, "update_weights"):
            await fan_out({"main-0": update}, operation="update_weights", budget_s=5.0)
    call, engine, phase = timeline.since().spans
    assert (call.kind, call.name, call.parent) == (
        Kind.CALL,
        "update_weights_from_tensor",
        engine.span_id,
    )
    assert (engine.kind, engine.engine_id, engine.parent) == (
        Kind.ENGINE,
        "main-0",
        phase.span_id,
    )
    assert engine.num_bytes == call.num_bytes > 100
    assert {span.outcome for span in (call, engine, phase)} == {Outcome.OK}


async def test_an_engine_that_refuses_is_a_failed_call_with_its_message() -> None:
    timeline = Timeline("policy/main")
    async with asking("no such luck", status=502, engine_id="main-0") as (client, _):
        with (
            timeline.span(Kind.ENGINE, "pause_generation", engine_id="main-0"),
            pytest.raises(EngineRejected),
        ):
            await client.pause_generation()
    call = timeline.since().spans[0]
    assert call.outcome is Outcome.FAILED
    assert "no such luck" in call.said


async def test_outside_of_a_span_nothing_is_recorded() -> None:
    timeline = Timeline("policy/main")

    async def nothing() -> None:
        record_event("something")
        assert current_span() is None

    await fan_out({"main-0": nothing}, operation="pause_generation", budget_s=5.0)
    assert timeline.since().spans == ()


async def test_a_cancelled_call_has_that_outcome() -> None:
    timeline = Timeline("policy/main")
    entered = asyncio.Event()

    async def wait() -> None:
        with timeline.span(Kind.PHASE, "pause_generation"):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert timeline.since().spans[0].outcome is Outcome.CANCELLED


def test_a_running_span_is_visible_with_its_seconds_so_far() -> None:
    clock = Clock()
    timeline = Timeline("policy", clock=clock)
    with timeline.span(Kind.PHASE, "release_memory_occupation", budget_s=60.0):
        clock.now_s += 12.0
        (running,) = timeline.since().running
        assert (running.name, running.elapsed_s, running.budget_s) == (
            "release_memory_occupation",
            12.0,
            60.0,
        )
        assert running.outcome is Outcome.RUNNING
    assert timeline.since().running == ()


def test_a_cursor_returns_only_new_spans() -> None:
    timeline = Timeline("policy")
    timeline.event("gate", "open")
    first = timeline.since()
    timeline.event("gate", "closed")
    assert [span.said for span in timeline.since(first.cursor).spans] == ["closed"]
    assert timeline.since(timeline.since().cursor).spans == ()


def test_memory_is_bounded_and_an_old_cursor_gets_the_spans_that_remain() -> None:
    timeline = Timeline("policy", capacity=3)
    timeline.event("tick", "0")
    first = timeline.since().cursor
    for number in range(1, 5):
        timeline.event("tick", str(number))
    assert [span.said for span in timeline.since(first).spans] == ["2", "3", "4"]


@pytest.mark.parametrize("num_before", [1, 5, 30])
def test_a_cursor_of_another_timeline_skips_no_span(num_before: int) -> None:
    """A group in the place of a lost one records from its first span on."""
    lost, group = Timeline("policy/main"), Timeline("policy/main")
    for number in range(num_before):
        lost.event("tick", str(number))
    for number in range(5):
        group.event("tick", str(number))
    excerpt = group.since(lost.since().cursor)
    assert [span.said for span in excerpt.spans] == ["0", "1", "2", "3", "4"]
    assert group.since(excerpt.cursor).spans == ()


@pytest.mark.parametrize("text", ["", "0", "7", "-", "a-b", "-1", "a-1" + "0" * 40, "a-\u0661"])
def test_a_text_that_is_no_cursor_is_the_start(text: str) -> None:
    assert Cursor.of_text(text).timeline == ""  # which no timeline has
    assert Cursor.of_text(str(Cursor("a", 12))) == Cursor("a", 12)


def test_values_can_be_added_to_the_current_span() -> None:
    timeline = Timeline("policy/main")
    with timeline.span(Kind.ENGINE, "release_memory_occupation", engine_id="main-0"):
        span = current_span()
        assert span is not None
        span.memory_before_bytes, span.memory_after_bytes = 100, 30
    assert timeline.since().spans[0].freed_bytes == 70


async def test_spans_come_back_from_the_file_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "run" / "policy.spans.jsonl"
    timeline = Timeline("policy", sinks=[SpanFile(path)])
    with timeline.span(Kind.PHASE, "pause_generation", budget_s=60.0) as span:
        span.weight_version = 3
    timeline.event("fenced", "it hangs", engine_id="main-1")
    await timeline.aclose()
    lines = path.read_text().splitlines()
    kept = [span.to_dict() for span in timeline.since().spans]
    assert [span.to_dict() for span in read_lines(lines)] == kept


def test_a_line_that_a_crash_cut_short_hides_no_other() -> None:
    whole = '{"kind": "event", "name": "gate", "source": "policy", "start_s": 1, "outcome": "ok"}'
    assert [span.name for span in read_lines([whole[:40], whole, ""])] == ["gate"]


async def test_a_full_file_is_kept_aside_and_a_new_one_begun(tmp_path: Path) -> None:
    path = tmp_path / "policy.spans.jsonl"
    timeline = Timeline("policy", sinks=[SpanFile(path, max_bytes=300)])
    for number in range(7):
        timeline.event("tick", str(number))
    await timeline.aclose()
    older = path.with_name(path.name + ".1")
    kept = [
        line for file in (older, path) if file.exists() for line in file.read_text().splitlines()
    ]
    messages = [span.said for span in read_lines(kept)]
    assert messages[-1] == "6"
    assert older.stat().st_size < 600


async def test_a_failing_disk_is_logged_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("no directory")
    timeline = Timeline("policy", sinks=[SpanFile(taken / "policy.spans.jsonl")])
    timeline.event("one")
    timeline.event("two")
    await timeline.aclose()
    assert (
        len([record for record in caplog.records if "what follows is lost" in record.message]) == 1
    )
    assert len(timeline.since().spans) == 2


def test_a_span_of_a_later_version_is_read_without_what_is_new() -> None:
    values = Span(Kind.EVENT, "gate", "policy", 1.0, outcome=Outcome.OK).to_dict()
    assert Span.from_dict(values | {"color": "red"}).name == "gate"


def test_spans_that_another_process_measured_are_recorded_as_its_own() -> None:
    timeline = Timeline("policy")
    timeline.event("first")
    cursor = timeline.since().cursor
    timeline.add([Span(Kind.RANK, "gather", "", 5.0, 0.5, Outcome.OK, span_id=1, rank=3)])
    (span,) = timeline.since(cursor).spans
    assert (span.source, span.span_id, span.rank) == ("policy", 2, 3)
    assert Span.from_dict(span.to_dict()) == span


@pytest.mark.parametrize("has_written", [True, False])
async def test_a_span_after_the_close_is_dropped_and_nothing_stays_open(
    tmp_path: Path, *, has_written: bool
) -> None:
    path = tmp_path / "policy.spans.jsonl"
    of_others = set(threading.enumerate())
    timeline = Timeline("policy", sinks=[SpanFile(path)])
    if has_written:
        timeline.event("in time")
    await timeline.aclose()
    timeline.event("late")
    await timeline.aclose()
    written = path.read_text().splitlines() if path.exists() else []
    assert [span.name for span in read_lines(written)] == ["in time"] * has_written
    assert "spans" not in {thread.name for thread in set(threading.enumerate()) - of_others}
    assert [file for file in psutil.Process().open_files() if file.path == str(path)] == []
