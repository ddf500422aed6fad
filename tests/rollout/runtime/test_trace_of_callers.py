"""The phases that a trainer runs within a span are in its trace, from every process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.builders import push
from tests.support.otel_program import bare_program, keep_spans
from tests.support.paged import step
from tests.support.processes import wait_until
from tests.support.served_fakes import TIMEOUT_S, launched

api = pytest.importorskip("opentelemetry.trace")
pytest.importorskip("opentelemetry.sdk.trace")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with bare_program(monkeypatch):
        yield keep_spans()


@pytest.fixture
def run(tmp_path: Path, kept: Any) -> Iterator[DeploymentHandle]:
    server = {"timeline": {"otel": True}}
    with (
        api.get_tracer("trainer").start_as_current_span("setup"),
        launched(launch_local, tmp_path, server=server) as handle,
    ):
        yield handle


def test_phases_are_children_of_the_span_in_which_they_are_called(
    run: DeploymentHandle, kept: Any
) -> None:
    tracer = api.get_tracer("trainer")
    with tracer.start_as_current_span("train step") as within:
        step(run["policy"], 1)
    with tracer.start_as_current_span("transaction") as both:
        run.offload().result(TIMEOUT_S)
        run.push({"policy": push(2)}).result(TIMEOUT_S)
    run.stop()
    children = children_of(within, kept)
    assert [name for name in children if name.startswith("phase ")] == [
        *("phase pause_generation", "phase flush_cache", "phase release_memory_occupation"),
        *("phase onload_weights", "phase update_weights", "phase verify"),
        *("phase onload_kv", "phase continue_generation"),
    ]
    assert "group update_weights" in children
    assert [name for name in children_of(both, kept) if name.startswith("phase ")] == [
        name for name in children if name.startswith("phase ")
    ]


def children_of(parent: Any, kept: Any) -> Sequence[str]:
    context = parent.get_span_context()
    spans = sorted(kept.get_finished_spans(), key=lambda span: span.start_time)
    return [
        span.name
        for span in spans
        if span.parent is not None and span.parent.span_id == context.span_id
    ]


def test_a_call_outside_of_a_span_is_in_no_trace_of_the_launch(tmp_path: Path, kept: Any) -> None:
    with launched(launch_local, tmp_path, server={"timeline": {"otel": True}}) as handle:
        step(handle["policy"], 1)
    phases = [span for span in kept.get_finished_spans() if span.name.startswith("phase ")]
    assert len(phases) == 8
    assert [span.name for span in phases if span.parent is not None] == []


def test_a_handle_in_another_process_carries_the_span_of_that_process(
    run: DeploymentHandle, kept: Any
) -> None:
    """A pickled handle calls through the socket of the run."""
    policy = pickle.loads(pickle.dumps(run["policy"]))
    assert type(policy._caller).__name__ == "SocketCaller"
    with api.get_tracer("trainer").start_as_current_span("rank 3") as within:
        policy.offload().result(TIMEOUT_S)
    run.stop()
    assert {"phase pause_generation", "group pause_generation"} <= set(children_of(within, kept))


@pytest.mark.torch
@pytest.mark.parametrize("way", ["one process", "all ranks"])
def test_the_stages_of_a_push_are_in_the_trace_too(
    run: DeploymentHandle, kept: Any, way: str
) -> None:
    torch = pytest.importorskip("torch")
    policy = run["policy"]
    weights = {
        tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for tensor in DEFAULT_TENSORS
    }
    with api.get_tracer("trainer").start_as_current_span("train step") as within:
        if way == "one process":
            policy.push(weights).result(TIMEOUT_S)
        else:
            with policy.pusher() as pusher:
                pusher.push(weights)
    stages = {"rank gather", "rank copy", "rank engine"}

    def are_exported() -> bool:
        api.get_tracer_provider().force_flush()
        return stages <= set(children_of(within, kept))

    assert wait_until(are_exported, 10)
