"""The trace for Chrome and Perfetto, and the spans for OpenTelemetry."""

import json

import pytest

from rollout.observability.timeline.export import chrome_trace
from rollout.observability.timeline.span import Kind, Outcome, Span
from tests.rollout.observability.timeline.spans import engine, offload_step, rank_push


def test_every_engine_has_a_lane_of_its_own_under_its_server() -> None:
    trace = chrome_trace(offload_step())
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert [event["args"]["name"] for event in named] == ["policy", "phases", "main-0", "main-1"]
    lanes = {event["args"]["name"]: (event["pid"], event["tid"]) for event in named[1:]}
    of_main_1 = [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and (event["pid"], event["tid"]) == lanes["main-1"]
    ]
    assert [event["name"] for event in of_main_1] == [
        "pause_generation",
        "update_weights",
        "update_weights",
    ]


def test_every_rank_of_the_trainer_has_a_lane_of_its_own() -> None:
    spans = [*offload_step(), *rank_push()]
    trace = chrome_trace(spans)["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in trace if event["ph"] == "M"}
    of_rank_1 = [event for event in trace if event["ph"] == "X" and event["tid"] == lanes["rank 1"]]
    assert [(event["name"], event["cat"]) for event in of_rank_1] == [
        ("gather", "rank"),
        ("copy", "rank"),
    ]
    assert of_rank_1[1]["args"]["num_bytes"] == 200
    assert of_rank_1[1]["args"]["said"] == "bucket 1"


def test_times_are_microseconds_from_the_first_span() -> None:
    complete = [
        event for event in chrome_trace(offload_step())["traceEvents"] if event["ph"] == "X"
    ]
    assert complete[0]["ts"] == 0
    assert complete[-1]["ts"] == pytest.approx(12.9e6)
    assert complete[-1]["dur"] == pytest.approx(0.1e6)


def test_the_trace_is_json_with_the_values_of_each_span() -> None:
    failed = engine(
        "release_memory_occupation", "main-0", 1.0, 2.0, outcome=Outcome.FAILED, said="late"
    )
    failed.memory_before_bytes, failed.memory_after_bytes = 10, 4
    (event,) = [
        event
        for event in json.loads(json.dumps(chrome_trace([failed])))["traceEvents"]
        if event["ph"] == "X"
    ]
    assert event["args"]["said"] == "late"
    assert event["args"]["memory_before_bytes"] == 10


def test_an_event_is_an_instant() -> None:
    gate = Span(Kind.EVENT, "gate", "policy", 5.0, outcome=Outcome.OK, said="open")
    instants = [event for event in chrome_trace([gate])["traceEvents"] if event["ph"] == "i"]
    assert [event["args"]["said"] for event in instants] == ["open"]


def test_no_spans_make_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []


def test_opentelemetry_gets_the_tree_with_its_times_and_its_errors() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from rollout.observability.timeline.otel import export

    kept = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    child = engine(
        "pause_generation", "main-0", 10.0, 2.0, outcome=Outcome.FAILED, said="hung", parent=1
    )
    root = Span(Kind.PHASE, "pause_generation", "policy/main", 10.0, 3.0, Outcome.OK, span_id=1)
    assert export([child, root], provider) == 2
    exported = {span.name: span for span in kept.get_finished_spans()}
    engine_span, phase_span = (
        exported["engine pause_generation"],
        exported["phase pause_generation"],
    )
    assert engine_span.parent.span_id == phase_span.context.span_id
    assert (engine_span.start_time, engine_span.end_time) == (10_000_000_000, 12_000_000_000)
    assert engine_span.status.description == "hung"
    assert engine_span.attributes["rollout.engine_id"] == "main-0"
