"""OpenTelemetry export, as a collector receives it: decoded by the official protocol classes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollout.local import launch_local
from rollout.timeline.otel import OtelSink
from rollout.timeline.span import Kind, Outcome, Span
from tests.support.paged import step
from tests.support.served_fakes import engines_of, launched

pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")


class Collector:
    """What came; ``spans`` with the attributes as a dict."""

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
                    found += [(one, values(one.attributes)) for one in scope.spans]
        return found


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[tuple[str, Collector]]:
    """Where it listens, and what comes."""
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

        def log_message(self, *told: Any) -> None:
            """Nothing: the test says what it misses."""

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
    told = collector.spans
    assert collector.services == {"ray-rollout"}
    by_id = {one.span_id: one for one, _ in told}
    names = {one.name for one, _ in told}
    assert {"phase pause", "group pause", "engine pause", "call pause_generation"} <= names
    for one, known in told:
        assert one.start_time_unix_nano <= one.end_time_unix_nano
        if one.parent_span_id:
            above = by_id[one.parent_span_id]
            assert above.trace_id == one.trace_id
            assert above.start_time_unix_nano <= one.start_time_unix_nano
            # Unix seconds as a float are exact to less than a microsecond.
            assert one.end_time_unix_nano - above.end_time_unix_nano < 1_000
        if one.name.startswith("call "):
            assert by_id[one.parent_span_id].name.startswith("engine ")
            assert known["rollout.engine_id"]
        if one.name.startswith("engine "):
            assert by_id[one.parent_span_id].name.startswith("group ")
    pushed = [known for one, known in told if one.name == "engine update_weights"]
    assert all(known["rollout.num_bytes"] > 0 for known in pushed)
    failed = [one for one, _ in told if one.status.code == trace.Status.STATUS_CODE_ERROR]
    assert any("a planned fault" in one.status.message for one in failed)


def test_a_collector_that_does_not_answer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK alone would try for ten seconds."""
    monkeypatch.setattr("rollout.timeline.otel._CLOSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        sink = OtelSink()
        sink.put(Span(Kind.PHASE, "pause", "policy", 1.0, 1.0, Outcome.OK, span_id=1))
        sink.close()
    assert "the collector has not taken all spans within 0.2 s" in caplog.text


def test_the_users_service_name_is_left_to_him(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "night-run")
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        sink = OtelSink()
        sink.put(Span(Kind.EVENT, "gate", "policy", 1.0, 0.0, Outcome.OK, span_id=1, said="open"))
        sink.close()
    ((one, known),) = collector.spans
    assert (one.name, known["rollout.said"], collector.services) == (
        "event gate",
        "open",
        {"night-run"},
    )
