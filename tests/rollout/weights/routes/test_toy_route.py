"""Another route: a file like this one, and a row in ``choice``."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import push_weights
from rollout.weights.routes.choice import ROUTES
from rollout.weights.routes.rank_end import RankEnd, RouteRow, ShareBuilder
from rollout.weights.routes.route import (
    Chosen,
    EnginePlace,
    Payload,
    PushTarget,
    RankPlace,
    Route,
    Stage,
)
from tests.support.still_server import HERE, StillServer, server_config

torch = pytest.importorskip("torch")
from rollout.weights.ranks.leader import push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors.payload import flattened_bucket  # noqa: E402

pytestmark = pytest.mark.embedded

# -- the route, about forty lines -------------------------------------------------------------


def reach(ranks: Sequence[RankPlace], engine: EnginePlace) -> Chosen | str:
    return Chosen("toy") if engine.engine_id.startswith("toy") else "it is no toy"


@dataclass(frozen=True, slots=True)
class ByToy(Route):
    """The bytes backwards, in a file."""

    needs_session = True

    def pack(self, payload: Payload) -> Any:
        assert isinstance(payload, Mapping)
        return base64.b64encode(Path(payload["toy"]).read_bytes()[::-1]).decode()

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        await target.engine.update_weights_from_tensor(
            [packed] * target.payload_copies,
            load_format="flattened_bucket",
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
        )


class ToyBuilder:
    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._files: list[Path] = []

    def make(self, index: int, pairs: Any) -> Mapping[str, Any]:
        self._files.append(self._folder / f"toy-{index}")
        self._files[-1].write_bytes(flattened_bucket(pairs)[::-1])
        return {"toy": str(self._files[-1])}

    def close(self) -> None:
        for file in self._files:
            file.unlink()


def open_share(end: RankEnd, chosen: Chosen) -> ShareBuilder | None:
    return ToyBuilder(end.config.weights.shared_memory_path) if end.rank == 0 else None


def join(
    chosen: Chosen, shares: Mapping[int, Mapping[str, Any]], ranks: Any, pairs: Any
) -> Sequence[Payload]:
    return [shares[0]]


ROW = RouteRow("toy", reach, lambda chosen: ByToy(), open_share, join)

# -- the test ---------------------------------------------------------------------------------


@pytest.fixture
def row() -> Iterator[None]:
    others = dict(ROUTES)
    ROUTES.clear()
    ROUTES.update({"toy": ROW, **others})
    yield
    del ROUTES["toy"]


@pytest.mark.parametrize("may_stream", [False, True])
async def test_a_route_is_its_file_and_a_row(tmp_path: Path, row: None, may_stream: bool) -> None:
    rank = TrainerRank(server_config(shared_memory_path=str(tmp_path), stream=may_stream))
    tensors = {"a": torch.randn(64), "b": torch.randn(64)}
    engines = {"toy": FakeEngine("toy"), "other": FakeEngine("other")}
    places = [EnginePlace(name, HERE) for name in engines]
    local = push_of_one_rank(
        rank, StillServer(engines=places), PushRequest(tensors, 7), may_stream=may_stream
    )
    try:
        targets = {name: PushTarget(engine) for name, engine in engines.items()}
        answers = await push_weights(local.weights, targets, budget_s=30)
    finally:
        local.close()
    assert [answer.failure for answer in answers.values()] == [None, None]
    assert [await engine.weight_version() for engine in engines.values()] == ["7", "7"]
    loaded = {name: set(engine.operations()) for name, engine in engines.items()}
    assert "update_weights_from_tensor" in loaded["toy"]
    assert "update_weights_from_disk" in loaded["other"]
    rank.close()
    assert os.listdir(tmp_path) == []
