"""Broadcast: one from the trainer to all ranks of all engines, gloo on CPU, NCCL on GPU.

Always true: a group is kept for the next push only if its ranks are the same processes of the same
engines, every engine reports that it is a member, and the push that created it succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.protocol import Engine, ProcessIdentity
from engines.protocol.errors import EngineRejected
from rollout.config import Transport
from rollout.weights.routes.rank_end import Places, RankEnd, RouteRow, ShareBuilder
from rollout.weights.routes.route import Chosen, EnginePlace, PushTarget, Route, Stage

if TYPE_CHECKING:
    from rollout.weights.tensors.sources import Pairs

logger = logging.getLogger(__name__)


def reach(ranks: Places, engine: EnginePlace) -> Chosen | str:
    """To any engine that connects to the trainer."""
    if engine.why_no_groups:
        return engine.why_no_groups
    if not engine.is_reached:
        return "it cannot join a broadcast of this trainer"
    return Chosen(Transport.DISTRIBUTED)


@dataclass(frozen=True, slots=True)
class ByBroadcast(Route):
    """``init_weights_update_group`` and ``update_weights_from_distributed``: one broadcast from the
    trainer to all ranks of all engines, gloo on CPU, NCCL on GPU.

    Engines receive from rank 0 of a group, which is rank 0 of the trainer.

    Always true: an engine gets the request to join only when the trainer's store is open and every
    engine of the push has answered a query.  An engine that waits for another one waits until the
    deadline: then the trainer closes its store (``trainer_groups``).  SGLang itself would
    wait 30 minutes.

    What SGLang does with groups is tested in ``contract/test_contract_groups.py``.
    """

    needs_session = True
    joins = True

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        await target.engine.init_weights_update_group(
            master_address=terms["master_address"],
            master_port=terms["master_port"],
            rank_offset=terms["rank_offset"],
            world_size=terms["world_size"],
            group_name=terms["group_name"],
            backend=terms["backend"],
        )

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        await target.engine.update_weights_from_distributed(
            names=packed["names"],
            dtypes=packed["dtypes"],
            shapes=packed["shapes"],
            group_name=packed["group_name"],
            load_format=packed.get("load_format"),
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
        )

    async def leave(self, target: PushTarget, group_name: str) -> None:
        await leave_group(target.engine, group_name)


async def leave_group(engine: Engine, group_name: str) -> None:
    """Make an engine leave a group. No error if it is not a member."""
    try:
        await engine.destroy_weights_update_group(group_name)
    except EngineRejected as error:
        logger.debug("group %s: %s", group_name, error)


def process_text(processes: Iterable[ProcessIdentity]) -> str:
    """Identifies an engine's processes, over all machines and boots."""
    return " ".join(
        f"{process.boot_id}/{process.namespace}/{process.pid}/{process.started}"
        for process in processes
    )


def open_share(end: RankEnd, chosen: Chosen) -> ShareBuilder | None:
    """Rank 0 sends in the thread of the stream: its tensors as they are, unless an encoding reads
    them."""
    return RootBuckets() if end.rank == 0 and chosen.is_read else None


class RootBuckets:
    """What rank 0 broadcasts of each bucket, until the stream takes it."""

    def __init__(self) -> None:
        self._pairs: Pairs | None = None

    def make(self, index: int, pairs: Pairs) -> None:
        self._pairs = pairs

    def take(self) -> Pairs:
        """The tensors of the last bucket that was made."""
        pairs, self._pairs = self._pairs, None
        assert pairs is not None
        return pairs

    def close(self) -> None:
        self._pairs = None


ROW = RouteRow(
    Transport.DISTRIBUTED,
    reach,
    lambda chosen: ByBroadcast(),
    open_share,
    is_copy=False,
    is_encoded=True,
)
