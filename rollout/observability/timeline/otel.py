"""Export of spans through the OpenTelemetry SDK.  Needs the extra ``otel``.

Always true: an exported span has its recorded times, its error and, if known, its parent, so the
spans of a phase form one trace, which is that of the caller if the caller had one; a collector that
does not answer delays the end of a run by a few seconds at most.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from rollout.observability.timeline.otel_provider import (
    CLOSE_S,
    SCOPE,
    ends_in_time,
    tracer_provider,
)
from rollout.observability.timeline.sink import SpanSink
from rollout.observability.timeline.span import Kind, Outcome, Span

logger = logging.getLogger(__name__)

_MAX_PARENTS = 4096
_ATTRIBUTES = (
    *("source", "engine_id", "outcome", "num_bytes", "budget_s", "weight_version"),
    *("verified_by", "read_bytes", "rank"),
)


class OtelSink(SpanSink):
    """Exports spans through a tracer provider.

    Spans arrive when they end, so children come before their parents.  A child is kept until its
    parent has arrived; then both are exported.

    Args:
        provider: of ``opentelemetry.sdk.trace``; None: that of this process.

    Raises:
        ConfigError: see ``tracer_provider``.
    """

    thread_name = "otel"

    def __init__(self, provider: Any = None) -> None:
        super().__init__()
        self._provider: Any = provider or tracer_provider()
        self._children: OrderedDict[tuple[str, int], list[Span]] = OrderedDict()

    def close(self) -> None:
        super().close()
        while self._children:
            self._export_oldest()
        # The provider goes on: other timelines and the program itself may use it.
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None and not ends_in_time(flush):
            logger.warning(
                "OpenTelemetry: the collector has not taken all spans within %g s; the rest is "
                "only in the files of the run",
                CLOSE_S,
            )

    def process(self, span: Span) -> None:
        """Keep a child until its parent has ended; export a root with all its descendants."""
        if not span.parent:
            self._export(span, None)
            return
        self._children.setdefault((span.source, span.parent), []).append(span)
        if len(self._children) > _MAX_PARENTS:
            self._export_oldest()

    def _export_oldest(self) -> None:
        """Export the children that have waited longest, without their parent."""
        for orphan in self._children.popitem(last=False)[1]:
            self._export(orphan, None)

    def _export(self, span: Span, parent: Any) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if parent is None:  # in a new context: that of this thread may be of another trace
            caller = {"traceparent": span.traceparent}
            context = TraceContextTextMapPropagator().extract(caller, Context())
        else:
            context = set_span_in_context(parent)
        tracer = self._provider.get_tracer(SCOPE)
        exported = tracer.start_span(
            f"{span.kind.value} {span.name}",
            context=context,
            start_time=int(span.start_s * 1e9),
            attributes=_attributes(span),
        )
        if span.outcome in (Outcome.FAILED, Outcome.CANCELLED):
            exported.set_status(Status(StatusCode.ERROR, span.said or span.outcome.value))
        for child in self._children.pop((span.source, span.span_id), ()):
            self._export(child, exported)
        exported.end(end_time=int(span.end_s * 1e9))


def export(spans: Iterable[Span], provider: Any = None) -> int:
    """Export recorded spans and return their number; errors are those of ``OtelSink``."""
    sink = OtelSink(provider)
    num = 0
    for span in spans:
        sink.put(span)
        num += 1
    sink.close()
    return num


def _attributes(span: Span) -> dict[str, Any]:
    values = span.to_dict()
    attributes = {f"rollout.{name}": values[name] for name in _ATTRIBUTES if name in values}
    if span.freed_bytes is not None:
        attributes["rollout.freed_bytes"] = span.freed_bytes
    if span.kind is Kind.EVENT and span.said:
        attributes["rollout.said"] = span.said
    return attributes
