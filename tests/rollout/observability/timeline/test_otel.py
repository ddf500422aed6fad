"""OpenTelemetry export, as a collector receives it: decoded by the official protocol classes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout.observability.timeline.otel import OtelSink
from rollout.observability.timeline.span import Kind, Outcome, Span
from rollout.runtime.local import launch_local
from tests.support.paged import step
from tests.support.served_fakes import engines_of, launched

pytest.importorskip("opentelemetry.sdk.trace")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")


class Collector:
    """The received requests; ``spans`` has their spans, with the attributes as a dict."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.services: set[str] = set()

    @property
    def spans(self) -> list[tuple[Any, dict[str, Any]]]:
        found = []
        for request in self.requests:
            for of_resource in request.resource_spans:
                self.services.add(values(of_resource.resource.attributes)["service.name"])
                for scope in of_resource.scope_spans:
                    assert scope.scope.name == "ray-rollout"
                    found += [(span, values(span.attributes)) for span in scope.spans]
        return found


def values(attributes: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in attributes
    }


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """A listening collector and its URL."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests.append(trace_service.ExportTraceServiceRequest.FromString(body))
            answer = trace_service.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            """Log nothing: the assertions name what is missing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_step_of_a_server_reaches_a_collector_as_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with launched(launch_local, tmp_path, server={"timeline": {"otel": True}}) as handle:
            policy = handle["policy"]
            with engines_of(policy) as engines:
                engines["shared-1"].fail_next("flush_cache", "a planned fault")
            step(policy, 1)
    received = collector.spans
    assert collector.services == {"ray-rollout"}
    by_id = {span.span_id: span for span, _ in received}
    names = {span.name for span, _ in received}
    assert {
        "phase pause_generation",
        "group pause_generation",
        "engine pause_generation",
        "call pause_generation",
    } <= names
    for span, known in received:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            parent = by_id[span.parent_span_id]
            assert parent.trace_id == span.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            # Unix seconds as a float are exact to less than a microsecond.
            assert span.end_time_unix_nano - parent.end_time_unix_nano < 1_000
        if span.name.startswith("call "):
            assert by_id[span.parent_span_id].name.startswith("engine ")
            assert known["rollout.engine_id"]
        if span.name.startswith("engine "):
            assert by_id[span.parent_span_id].name.startswith("group ")
    pushed = [known for span, known in received if span.name == "engine update_weights"]
    assert all(known["rollout.num_bytes"] > 0 for known in pushed)
    failed = [span for span, _ in received if span.status.code == trace.Status.STATUS_CODE_ERROR]
    assert any("a planned fault" in span.status.message for span in failed)


def test_a_collector_that_does_not_answer_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK alone would try for ten seconds.  Nothing tries on in the background either."""
    before = set(threading.enumerate())
    monkeypatch.setattr("rollout.observability.timeline.otel._CLOSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        sink = OtelSink()
        sink.put(Span(Kind.PHASE, "pause_generation", "policy", 1.0, 1.0, Outcome.OK, span_id=1))
        sink.close()
    assert "the collector has not taken all spans within 0.2 s" in caplog.text
    # The attempt under way ends with the socket that it waits for.
    started = set(threading.enumerate()) - before
    for thread in started:
        thread.join(2)
    assert [thread for thread in started if thread.is_alive()] == []


def test_the_service_name_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "night-run")
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        sink = OtelSink()
        sink.put(Span(Kind.EVENT, "gate", "policy", 1.0, 0.0, Outcome.OK, span_id=1, said="open"))
        sink.close()
    ((span, known),) = collector.spans
    assert (span.name, known["rollout.said"], collector.services) == (
        "event gate",
        "open",
        {"night-run"},
    )
