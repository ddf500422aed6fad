"""The bytes of the tensors in the call itself: works anywhere, and copies the most.

On a GPU the pickle holds CUDA IPC handles instead of bytes: then only engines on the same GPU can
read it, and the trainer's memory must stay as it is until the push has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pybase64

from rollout.errors import WeightMismatch
from rollout.weights.transports.carrier import Payload, PushTarget, SimpleCarrier, Stage

# Of one call.  It is copied a dozen times on its way; what is larger has new memory from the kernel
# each time, which costs ten times the copy.
MOST_BUCKET_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ByValue(SimpleCarrier):
    """``update_weights_from_tensor``.

    Attributes:
        load_format: ``flattened_bucket`` or None for a pickle of (name, tensor).
    """

    load_format: str | None = None

    needs_session = True

    def pack(self, payload: Payload) -> Any:
        if not isinstance(payload, bytes):
            raise WeightMismatch(f"a push by value has buckets of bytes, not {payload!r:.80}")
        return pybase64.b64encode_as_string(payload)

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        more = {} if self.load_format is None else {"load_format": self.load_format}
        await target.engine.update_weights_from_tensor(
            [packed] * target.payload_copies,
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
            **more,
        )
