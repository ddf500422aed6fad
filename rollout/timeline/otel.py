"""Spans through the OpenTelemetry SDK.  Needs the extra ``otel``.

Always true: a span is handed over with its own times and its error; its parent goes along where
it is known, so the tree of a phase is one trace; a collector that does not answer delays the end of
a run by a few seconds at most.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from rollout.extras import extra
from rollout.timeline.span import Kind, Outcome, Span
from rollout.timeline.worker import Worker

logger = logging.getLogger(__name__)

_CLOSE_S = 3.0
_MAX_PARENTS = 4096
_SCOPE = "ray-rollout"


class OtelSink:
    """A ``Sink`` that hands each span to a tracer provider.

    Spans reach it when they end, children before their parents, so a child's parent is named by an
    id that is fixed in advance.

    Args:
        provider: of ``opentelemetry.sdk.trace``; None makes one that exports over OTLP/HTTP, set
            up by the ``OTEL_*`` variables of the environment.

    Raises:
        ConfigError: the SDK is not installed.
    """

    def __init__(self, provider: Any = None) -> None:
        with extra("otel", "OpenTelemetry is not installed"):
            from opentelemetry.sdk.trace import TracerProvider
        self._owns = provider is None
        self._provider: Any = provider or _exporting(TracerProvider(resource=_resource()))
        self._kept: OrderedDict[tuple[str, int], list[Span]] = OrderedDict()
        self._worker = Worker("otel", self._take)

    def put(self, span: Span) -> None:
        self._worker.put(span)

    def close(self) -> None:
        self._worker.close()
        for orphans in self._kept.values():
            for orphan in orphans:
                self._hand_over(orphan, None)
        self._kept.clear()
        if self._owns:
            # In a thread: where no collector answers, the SDK tries again for longer than anybody
            # who ends a run wants to wait.
            ending = threading.Thread(target=self._provider.shutdown, name="otel-end", daemon=True)
            ending.start()
            ending.join(_CLOSE_S)
            if ending.is_alive():
                logger.warning(
                    "OpenTelemetry: the collector has not taken all spans within %g s; what is "
                    "left is lost (the files of the run have it)",
                    _CLOSE_S,
                )

    def _take(self, span: Span) -> None:
        """Keep a child until its parent has ended; hand over a root with all below it."""
        if span.parent:
            key = (span.source, span.parent)
            self._kept.setdefault(key, []).append(span)
            if len(self._kept) > _MAX_PARENTS:
                for orphan in self._kept.popitem(last=False)[1]:
                    self._hand_over(orphan, None)
        else:
            self._hand_over(span, None)

    def _hand_over(self, span: Span, above: Any) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        tracer = self._provider.get_tracer(_SCOPE)
        told = tracer.start_span(
            f"{span.kind.value} {span.name}",
            context=None if above is None else set_span_in_context(above),
            start_time=int(span.start_s * 1e9),
            attributes=_attributes(span),
        )
        if span.outcome in (Outcome.FAILED, Outcome.CANCELLED):
            told.set_status(Status(StatusCode.ERROR, span.said or span.outcome.value))
        for child in self._kept.pop((span.source, span.span_id), ()):
            self._hand_over(child, told)
        told.end(end_time=int(span.end_s * 1e9))


def export(spans: Iterable[Span], provider: Any = None) -> int:
    """Hand over recorded spans; how many there were.

    Raises:
        ConfigError: the SDK is not installed.
    """
    sink = OtelSink(provider)
    num = 0
    for span in spans:
        sink.put(span)
        num += 1
    sink.close()
    return num


def _resource() -> Any:
    """What the environment says of the service, and a name where it says none."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource

    named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME)
    return Resource.create({SERVICE_NAME: named or _SCOPE})


def _exporting(provider: Any) -> Any:
    with extra("otel", "OpenTelemetry's OTLP exporter is not installed"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _attributes(span: Span) -> dict[str, Any]:
    values = span.to_dict()
    names = ("source", "engine_id", "outcome", "num_bytes", "budget_s", "weight_version")
    told = {f"rollout.{name}": values[name] for name in names if name in values}
    if span.proved_by:
        told["rollout.proved_by"] = span.proved_by
    if span.read_bytes is not None:
        told["rollout.read_bytes"] = span.read_bytes
    if span.freed_bytes is not None:
        told["rollout.freed_bytes"] = span.freed_bytes
    if span.kind is Kind.EVENT and span.said:
        told["rollout.said"] = span.said
    return told
