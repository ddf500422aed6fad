"""A server that is never called, for pushes that a test sends, or reads, by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.config import ServerConfig, Transport
from rollout.core.types import ServerStatus
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.route import EnginePlace

HERE = "here"


class StillServer:
    """A ``ServerPort`` of engines that do nothing.

    Attributes:
        engines: their places; by default one on this host.
    """

    own_host = "127.0.0.1"
    own_node = HERE

    def __init__(
        self,
        expected: Manifest | None = None,
        *,
        fingerprints: str = "xxh3",
        engines: Sequence[EnginePlace] = (EnginePlace("engine", HERE, encodings=("delta",)),),
    ) -> None:
        self.expected = expected
        self.engines = list(engines)
        self._fingerprints = fingerprints

    def status(self) -> ServerStatus:
        return ServerStatus("policy", "serving", 0, "", "open", "", ())

    def places(self, status: ServerStatus) -> list[EnginePlace]:
        return self.engines

    def fingerprint_method(self, *, writes_files: bool) -> str:
        return self._fingerprints

    def make_way_in_store(self, folder: str) -> int | None:
        return None

    def push(self, push: WeightPush, until: Any) -> Any:
        raise AssertionError("this server is never called")

    serve = offer_to_store = record_push = push


def server_config(model_path: str | Path = "/model", **weights: Any) -> ServerConfig:
    """One embedded engine, and these settings of ``weights``."""
    return ServerConfig.model_validate(
        {
            "model_path": str(model_path),
            "groups": {"main": {"engine": {"kind": "embedded"}}},
            "weights": weights,
        }
    )


def make_push(
    named_tensors: Any,
    *,
    version: int,
    bucket_bytes: int,
    expected: Manifest | None = None,
    name_map: Any = None,
) -> WeightPush:
    """A push by value of a copy of these tensors."""
    from rollout.weights.ranks.leader import push_of_one_rank
    from rollout.weights.ranks.trainer_rank import TrainerRank

    config = server_config(transport=Transport.BY_VALUE, bucket_bytes=bucket_bytes)
    rank = TrainerRank(config)
    try:
        made = push_of_one_rank(
            rank,
            StillServer(expected),
            PushRequest(named_tensors, version, name_map),
            may_stream=False,
        )
        made.close()
    finally:
        rank.close()
    return made.weights
