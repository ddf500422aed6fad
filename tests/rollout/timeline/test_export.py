"""The trace that Chrome and Perfetto open, and the spans that OpenTelemetry gets."""

import json

import pytest

from rollout.timeline.export import chrome_trace
from rollout.timeline.span import Kind, Outcome, Span
from tests.rollout.timeline.spans import engine, offload_step


def test_every_engine_has_a_lane_of_its_own_under_its_server() -> None:
    trace = chrome_trace(offload_step())
    named = [one for one in trace["traceEvents"] if one["ph"] == "M"]
    assert [one["args"]["name"] for one in named] == ["policy", "phases", "main-0", "main-1"]
    lanes = {one["args"]["name"]: (one["pid"], one["tid"]) for one in named[1:]}
    of_main_1 = [
        one
        for one in trace["traceEvents"]
        if one["ph"] == "X" and (one["pid"], one["tid"]) == lanes["main-1"]
    ]
    assert [one["name"] for one in of_main_1] == ["pause", "update_weights", "update_weights"]


def test_times_are_microseconds_from_the_first_span() -> None:
    complete = [one for one in chrome_trace(offload_step())["traceEvents"] if one["ph"] == "X"]
    assert complete[0]["ts"] == 0
    assert complete[-1]["ts"] == pytest.approx(12.9e6)
    assert complete[-1]["dur"] == pytest.approx(0.1e6)


def test_it_is_json_and_says_what_is_known_of_each_span() -> None:
    failed = engine("release", "main-0", 1.0, 2.0, outcome=Outcome.FAILED, said="late")
    failed.memory_before_bytes, failed.memory_after_bytes = 10, 4
    (event,) = [
        one
        for one in json.loads(json.dumps(chrome_trace([failed])))["traceEvents"]
        if one["ph"] == "X"
    ]
    assert event["args"]["said"] == "late"
    assert event["args"]["memory_before_bytes"] == 10


def test_an_event_is_an_instant() -> None:
    gate = Span(Kind.EVENT, "gate", "policy", 5.0, outcome=Outcome.OK, said="open")
    instants = [one for one in chrome_trace([gate])["traceEvents"] if one["ph"] == "i"]
    assert [one["args"]["said"] for one in instants] == ["open"]


def test_nothing_makes_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_opentelemetry_gets_the_tree_with_its_times_and_its_errors() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from rollout.timeline.otel import export

    kept = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    child = engine("pause", "main-0", 10.0, 2.0, outcome=Outcome.FAILED, said="hung", parent=1)
    root = Span(Kind.PHASE, "pause", "policy/main", 10.0, 3.0, Outcome.OK, span_id=1)
    assert export([child, root], provider) == 2
    told = {one.name: one for one in kept.get_finished_spans()}
    engine_told, phase_told = told["engine pause"], told["phase pause"]
    assert engine_told.parent.span_id == phase_told.context.span_id
    assert (engine_told.start_time, engine_told.end_time) == (10_000_000_000, 12_000_000_000)
    assert engine_told.status.description == "hung"
    assert engine_told.attributes["rollout.engine_id"] == "main-0"
