"""A handle takes fingerprints of a push only where an engine reports comparable ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from rollout.rules.fingerprint_check import method_of_push
from rollout.runtime.local import launch_local
from tests.support.served_fakes import config

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.embedded


def as_sglang(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, fingerprints="")


def on_gpu(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint, fingerprints="sums")


def as_embedded(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return FakeEngine(spec.engine_id, endpoint=endpoint)


def one_of_two(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
    return (as_embedded if spec.engine_id == "shared-1" else as_sglang)(spec, endpoint)


@pytest.mark.parametrize(
    ("make", "server", "method"),
    [
        (as_sglang, {}, ""),
        (as_embedded, {}, "xxh3"),
        (one_of_two, {}, "xxh3"),
        (on_gpu, {}, "sums"),
        (as_embedded, {"lifecycle": {"verify_by": "canary"}}, ""),
        (as_embedded, {"weights": {"fingerprint": False}}, ""),
    ],
)
def test_a_push_is_hashed_as_its_engines_hash(
    make: Any, server: dict[str, Any], method: str, tmp_path: Path
) -> None:
    groups = {"shared": {"num_engines": 2}}
    weights = {"transport": "tensor"} | server.get("weights", {})
    chosen = config(tmp_path, groups, server=server | {"weights": weights})
    tensors = {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}
    with launch_local(chosen, launcher=HttpFakeLauncher(make)) as deployment:
        found = deployment["policy"].phases.make_push(tensors).weights.manifest.fingerprints
        deployment["policy"].serve_weights(tensors, version=2).result()
    assert {text.partition(":")[0] for text in found.values()} == ({method} if method else set())
    assert len(found) == (len(tensors) if method else 0)


def test_a_push_is_hashed_as_its_engines_are_and_for_the_store_alone() -> None:
    """Bytes of a GPU would be copied to the host while the engines wait."""
    assert method_of_push({""}, has_store=True) == "xxh3"
    assert method_of_push({"sums", ""}, has_store=True) == "sums"
    assert method_of_push({"sums", "xxh3"}, has_store=True) == "xxh3"
    assert method_of_push({"sums", ""}, has_store=False) == "sums"
    assert method_of_push({"sums", "xxh3"}, has_store=False) == "xxh3"
    assert method_of_push(set(), has_store=False) == ""
