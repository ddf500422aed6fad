"""One broadcast from the trainer to all ranks of all engines: gloo on CPU, NCCL on GPU.

Always true: no engine is asked to join before the trainer's end is open and all engines that
shall come are known to answer; whoever waits in vain for another is freed by the trainer, which
closes its end at the deadline (``tensors.broadcast``), for SGLang itself would wait 30 minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.weights.transports.carrier import Payload, PushTarget, Stage


@dataclass(frozen=True, slots=True)
class ByBroadcast:
    """``init_weights_update_group`` and ``update_weights_from_distributed``.

    Attributes:
        group_name: new for every push, so that a late engine cannot join the next one's.
        backend: ``gloo`` or ``nccl``.
    """

    group_name: str
    backend: str

    needs_session = True
    joins = True

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        await target.engine.init_weights_update_group(
            master_address=terms["master_address"],
            master_port=terms["master_port"],
            rank_offset=terms["rank_offset"],
            world_size=terms["world_size"],
            group_name=self.group_name,
            backend=self.backend,
        )

    def pack(self, payload: Payload) -> Any:
        return payload

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        await target.engine.update_weights_from_distributed(
            names=packed["names"],
            dtypes=packed["dtypes"],
            shapes=packed["shapes"],
            group_name=self.group_name,
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
        )

    async def leave(self, target: PushTarget) -> None:
        await target.engine.destroy_weights_update_group(self.group_name)
