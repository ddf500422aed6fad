"""A handle takes fingerprints of a push only where an engine reports comparable ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rollout
from engines.fake import FakeEngine
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from rollout.rules.fingerprint_check import method_of_push
from rollout.runtime.local import launch_local
from rollout.weights.format.pushed_files import why_damaged
from rollout.weights.push import weight_push
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
        (as_embedded, {"verify": {"by": "canary"}}, ""),
        (as_embedded, {"verify": {"fingerprints": False}}, ""),
        (as_sglang, {"weights": {"transport": "shared_memory"}}, "xxh3"),
        (on_gpu, {"weights": {"transport": "shared_memory"}}, "sums"),
        (
            as_sglang,
            {"weights": {"transport": "shared_memory"}, "verify": {"fingerprints": False}},
            "",
        ),
    ],
)
def test_a_push_is_hashed_as_its_engines_hash(
    make: Any, server: dict[str, Any], method: str, tmp_path: Path
) -> None:
    groups = {"shared": {"num_engines": 2}}
    weights = {"transport": "by_value"} | server.get("weights", {})
    chosen = config(tmp_path, groups, server=server | {"weights": weights})
    tensors = {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}
    with launch_local(chosen, launcher=HttpFakeLauncher(make)) as deployment:
        found = deployment["policy"].phases.make_push(tensors).weights.manifest.fingerprints
        deployment["policy"].push(tensors, version=2).result()
    assert {text.partition(":")[0] for text in found.values()} == ({method} if method else set())
    assert len(found) == (len(tensors) if method else 0)


@pytest.mark.parametrize("writes_files", [True, False])
def test_a_push_is_hashed_as_its_engines_are_and_for_the_store_alone(writes_files: bool) -> None:
    """Bytes of a GPU would be copied to the host while the engines wait."""

    def method(methods: set[str], *, has_store: bool) -> str:
        return method_of_push(methods, has_store=has_store, writes_files=writes_files)

    assert method({""}, has_store=True) == "xxh3"
    assert method({"sums", ""}, has_store=True) == "sums"
    assert method({"sums", "xxh3"}, has_store=True) == "xxh3"
    assert method({"sums", ""}, has_store=False) == "sums"
    assert method({"sums", "xxh3"}, has_store=False) == "xxh3"
    assert method(set(), has_store=False) == ("xxh3" if writes_files else "")


@pytest.mark.parametrize("stream", [False, True])
def test_engines_that_make_no_fingerprints_load_no_file_that_was_changed(
    stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes change after the trainer has written them, when nothing else would find it."""
    weights = {"transport": "shared_memory", "stream": stream, "shared_memory_path": str(tmp_path)}
    chosen = config(tmp_path, {"shared": {"num_engines": 2}}, server={"weights": weights})
    tensors = {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}
    changes = [True]

    def read(folder: Path, fingerprints: Any) -> str:
        if changes.pop():
            (file,) = folder.glob("*.safetensors")
            with file.open("r+b") as opened:
                opened.seek(-1, 2)
                opened.write(bytes([file.read_bytes()[-1] ^ 1]))
        return why_damaged(folder, fingerprints)

    monkeypatch.setattr(weight_push, "why_damaged", read)
    with launch_local(chosen, launcher=HttpFakeLauncher(as_sglang)) as deployment:
        policy = deployment["policy"]
        with pytest.raises(
            rollout.WeightsUnavailable,
            match=r"tensor '.*' in .* is not what the trainer wrote; no engine has loaded it",
        ):
            policy.push(tensors, version=2).result()
        assert policy.status().result().gate == "closed"
        changes += [False]
        policy.push(tensors, version=2).result()
        assert policy.status().result().gate == "open"


def test_engines_that_make_fingerprints_need_no_look_at_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"transport": "shared_memory", "shared_memory_path": str(tmp_path)}
    chosen = config(tmp_path, {"shared": {"num_engines": 2}}, server={"weights": weights})
    monkeypatch.setattr(weight_push, "why_damaged", lambda *_: pytest.fail("it was read"))
    with launch_local(chosen, launcher=HttpFakeLauncher(as_embedded)) as deployment:
        tensors = {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}
        deployment["policy"].push(tensors, version=2).result()
