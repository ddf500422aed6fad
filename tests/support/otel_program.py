"""A program with OpenTelemetry, and a collector that it exports to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@contextmanager
def bare_program(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that has set no provider, in a bare environment; what it has set ends with it."""
    from opentelemetry import trace
    from opentelemetry.util._once import Once

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        patch.delenv(name)
    patch.setattr(trace, "_TRACER_PROVIDER", None)
    patch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())
    yield
    if shutdown := getattr(trace.get_tracer_provider(), "shutdown", None):
        shutdown()


def keep_spans() -> Any:
    """The spans of this program from now on: an ``InMemorySpanExporter``."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    return kept


def traceparent_of(span: Any) -> str:
    """The header of a request within this span."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


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
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service

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
