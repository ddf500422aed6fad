"""A live engine of the same group as the source of a restarted one's weights.

Always true: only an engine that was proved at the version that is wanted gives its weights, and
only without an adapter, which would not come along; what arrives is verified like what comes from
anywhere else, so a peer whose weights change meanwhile is found out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from engines.errors import EngineError
from engines.protocol import Engine
from rollout.fanout import describe
from rollout.member import Member
from rollout.types import EngineSlot
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.source import Restored

logger = logging.getLogger(__name__)


class PeerSource:
    """A ``WeightSource``.

    Args:
        members: the engines of the group that are not fenced.
    """

    def __init__(self, members: Callable[[], Sequence[Member]]) -> None:
        self._members = members

    async def restore(self, engine: Engine, version: int, slot: EngineSlot) -> Restored | None:
        for peer in self._members():
            if peer.engine_id == slot.engine_id or not can_give(peer, version):
                continue
            try:
                await engine.update_weights_from_peer(
                    peer.process.endpoint.url, weight_version=str(version)
                )
            except EngineError as error:  # the next one may do
                logger.warning(
                    "engine %s did not get weight version %d from engine %s: %s",
                    *(slot.engine_id, version, peer.engine_id, describe(error)),
                )
                continue
            logger.info(
                "engine %s has weight version %d from %s", slot.engine_id, version, peer.engine_id
            )
            return Restored(_given_by(peer), base_version=peer.base_version)
        return None


def can_give(peer: Member, version: int) -> bool:
    """Whether these are the weights that are wanted, and it hands them out."""
    return peer.gives_weights and peer.is_proved_at(version) and not (peer.adapter or peer.released)


def _given_by(peer: Member) -> Manifest:
    """What the trainer told of what the peer was given holds for its copy too."""
    shapes = {one.name: one.shape for one in peer.tensors}
    return Manifest(
        {
            name: TensorSpec(name, dtype, shapes.get(name, ()))
            for name, dtype in peer.pushed_dtypes.items()
        },
        dict(peer.pushed),
    )
