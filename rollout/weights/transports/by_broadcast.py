"""One broadcast from the trainer to all ranks of all engines: gloo on CPU, NCCL on GPU.

Always true: no engine is asked to join before the trainer's end is open and all engines that
shall come are known to answer; whoever waits in vain for another is freed by the trainer, which
closes its end at the deadline (``tensors.broadcast``), for SGLang itself would wait 30 minutes.

What SGLang 0.5.23 was seen to do with groups on CPU (``tests/engines/test_contract_groups.py``):

- A group lasts over any number of pushes, until ``destroy_weights_update_group`` names it.
- ``init_weights_update_group`` with a name that is taken answers 400, as soon as it has reached the
  meeting place; the group of that name goes on.  Once that is destroyed the name is free.
- ``destroy_weights_update_group`` with a name that it does not know answers 400.
- A group whose rank 0 is gone stays, with its sockets, until it is destroyed, which then answers
  200: so engines are told.  A broadcast in it answers 400 at once, over gloo.
- A flattened bucket that cannot be laid out answers 400 before the broadcast; the group goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.errors import EngineRejected
from engines.protocol import Engine
from rollout.weights.transports.carrier import Payload, PushTarget, Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ByBroadcast:
    """``init_weights_update_group`` and ``update_weights_from_distributed``."""

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

    def pack(self, payload: Payload) -> Any:
        return payload

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
    """Have an engine leave a group; all is well where it never joined, or has left by itself."""
    try:
        await engine.destroy_weights_update_group(group_name)
    except EngineRejected as error:
        logger.debug("group %s: %s", group_name, error)
