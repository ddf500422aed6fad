"""What a pusher calls on the engines, in which order: one rank, on fakes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from rollout.config import Transport
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.processes import wait_until
from tests.support.served_fakes import config

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.embedded


@contextmanager
def launched(folder: Path, **weights: Any) -> Iterator[tuple[DeploymentHandle, FakeEngine]]:
    """One engine, with a bucket for each tensor."""
    launcher = FakeLauncher()
    settings = {"bucket_bytes": 300, "shared_memory_path": str(folder), **weights}
    groups = {"main": {"engine": {"kind": "fake"}}}
    chosen = config(folder, groups, page={"enabled": False}, server={"weights": settings})
    with launch_local(chosen, launcher=launcher, connect=launcher.connect) as deployment:
        yield deployment, launcher["main-0"]


def tensors() -> dict[str, Any]:
    return {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}


def loads(engine: FakeEngine) -> list[Path]:
    return [
        Path(call.arguments["model_path"])
        for call in engine.calls
        if call.operation == "update_weights_from_disk"
    ]


class EveryLoadCosts:
    def is_at_once(self, transport: Transport) -> bool:
        return transport is Transport.SHARED_MEMORY


def test_engines_whose_loads_cost_get_one_folder_with_all_buckets(tmp_path: Path) -> None:
    with launched(tmp_path) as (deployment, engine), deployment["policy"].pusher() as pusher:
        pusher.push(tensors())
        assert len(loads(engine)) == len(DEFAULT_TENSORS)
        pusher.loads = EveryLoadCosts()  # type: ignore[assignment]
        assert pusher.push(tensors()).weight_version == 2
        (folder,) = loads(engine)[len(DEFAULT_TENSORS) :]
        assert not folder.exists(), "the links go with the push"


@pytest.mark.parametrize(
    "weights",
    [
        {"transport": "shared_memory", "stream": True},
        {"transport": "tensor", "stream": True},
        {"transport": "tensor"},
        {"transport": "shared_memory"},
    ],
    ids=str,
)
def test_the_store_keeps_what_one_process_streams_or_copies(
    tmp_path: Path, weights: dict[str, Any]
) -> None:
    store = {"path": str(tmp_path), "spare_bytes": 0}
    with launched(tmp_path, **weights, store=store) as (deployment, _):
        policy = deployment["policy"]
        for version in (1, 2, 3):
            policy.sync_weights(tensors()).result(30)

            def is_kept(version: int = version) -> bool:
                found = policy.status().result(30).store
                return found is not None and found.version == version

            assert wait_until(is_kept, 20), policy.status().result(30).store
