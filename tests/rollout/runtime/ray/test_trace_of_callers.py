"""The phases that a trainer runs within a span are in its trace, also those of actors."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.config.run_dir import RunFolder
from rollout.observability.timeline.span import Kind
from rollout.observability.timeline.span_file import read_spans
from tests.support.otel_program import bare_program, collecting, keep_spans, traceparent_of
from tests.support.ray_worlds import World
from tests.support.served_fakes import TIMEOUT_S, launched

api = pytest.importorskip("opentelemetry.trace")
pytest.importorskip("opentelemetry.sdk.trace")

ONE = {"main": {"num_engines": 1}}


def test_the_span_of_a_caller_reaches_server_and_group(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = world.load("launch").launch_ray
    with bare_program(monkeypatch), launched(launch, tmp_path, ONE) as handle:
        keep_spans()
        with api.get_tracer("trainer").start_as_current_span("train step") as within:
            handle["policy"].offload().result(TIMEOUT_S)
        handle["policy"].phases.onload_weights().result(TIMEOUT_S)
        folder = RunFolder.of(handle.config).path
        handle.stop()
    spans = [span for span in read_spans(folder) if span.kind in (Kind.PHASE, Kind.GROUP)]
    callers = {(span.kind, span.name): span.traceparent for span in spans}
    for name in ("pause_generation", "flush_cache", "release_memory_occupation"):
        assert callers[Kind.PHASE, name] == traceparent_of(within)
        assert callers[Kind.GROUP, name] == traceparent_of(within)
    assert callers[Kind.PHASE, "onload_weights"] == ""


@pytest.mark.ray
@pytest.mark.slow
def test_the_actors_export_as_the_environment_of_the_launch_says(
    ray_cluster: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = ray_cluster.load("launch").launch_ray
    with collecting() as (url, collector), bare_program(monkeypatch):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "night-run")
        server = {"timeline": {"otel": True}}
        with launched(launch, tmp_path, ONE, server=server) as handle:
            handle["policy"].offload().result(TIMEOUT_S)
        names = {span.name for span, _ in collector.spans}
    assert {"phase release_memory_occupation", "group release_memory_occupation"} <= names
    assert collector.services == {"night-run"}
