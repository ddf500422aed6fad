"""How the buckets of a push reach an engine: one class per transport.

Always true: a carrier is a plain value, so that it can be sent to where the engines are; it imports
no tensor library and handles one engine per call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
import pybase64

from engines.protocol import Engine
from engines.protocol.errors import EngineRejected
from rollout.core.errors import WeightMismatch

logger = logging.getLogger(__name__)

# In one request of ``ByValue``.  It is copied a dozen times on its way.  Larger buffers get new
# memory from the kernel for each copy, which costs ten times the copy.
MOST_BUCKET_BYTES = 16 << 20

Payload = bytes | Mapping[str, Any]
"""A bucket: the bytes of its tensors, or a mapping that describes where they are."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """One engine of a push.

    Attributes:
        payload_copies: its number of tensor-parallel ranks; SGLang needs a payload for each.
        has_session: updates go between begin and end (SGLang 0.5.21 and later).
        process: identifies its processes; empty if unknown.
        takes_flat: it accepts many tensors in one broadcast.
        reports_groups: it reports which broadcast groups it is a member of.
    """

    engine: Engine
    payload_copies: int = 1
    has_session: bool = True
    process: str = ""
    takes_flat: bool = False
    reports_groups: bool = False


def unverified_text(version: int) -> str:
    """What an engine reports as its version while the path of that push is checked.

    It is no number, so no launch and no recovery takes the engine's weights for a version.
    """
    return f"unverified-{version}"


@dataclass(frozen=True, slots=True)
class Stage:
    """The position of a bucket in its push.

    Attributes:
        is_path_check: the engine has not yet shown that it holds the pushed weights.
    """

    version: int
    is_last: bool = True
    is_path_check: bool = False

    @property
    def weight_version(self) -> str | None:
        """The version that the engine reports from now on; None before the last bucket."""
        text = unverified_text(self.version) if self.is_path_check else str(self.version)
        return text if self.is_last else None


class Carrier:
    """Sends the buckets of one push to engines. The defaults are for carriers without a group.

    Attributes:
        needs_session: whether its updates go between begin and end of a weight update.
        joins: whether the engines must join a group before the first bucket.
    """

    __slots__ = ()
    needs_session = False
    joins = False

    def of(self, engine_id: str) -> Carrier:
        """The carrier of one engine; ``pack`` is called on this one, all else on that."""
        return self

    def has_part_in(self, packed: Any) -> bool:
        """Whether a bucket has something for the engines of this carrier."""
        return True

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        """Join the broadcast group; ``terms``: the trainer's, and this engine's first rank."""

    def pack(self, payload: Payload) -> Any:
        """Encode a bucket for ``send``: once for all engines, in a thread."""
        return payload

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        """Send a bucket to an engine; the last one also sets the version and flushes the cache."""
        raise NotImplementedError

    async def leave(self, target: PushTarget, group_name: str) -> None:
        """Undo ``join``, also after a failure. No error if the engine is not a member."""


@dataclass(frozen=True, slots=True)
class ByValue(Carrier):
    """``update_weights_from_tensor``: the bytes of the tensors in the request itself. It works
    everywhere, and copies most.

    With CUDA IPC the pickle holds handles instead of bytes: only engines on the same GPU can read
    it, and the trainer must not change its tensors until the push has ended.

    Attributes:
        load_format: ``flattened_bucket`` or None for a pickle of (name, tensor).
    """

    load_format: str | None = None

    needs_session = True

    def pack(self, payload: Payload) -> Any:
        return _encode(payload, "a push by value has buckets of bytes")

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        more = {} if self.load_format is None else {"load_format": self.load_format}
        await target.engine.update_weights_from_tensor(
            [packed] * target.payload_copies,
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
            **more,
        )


@dataclass(frozen=True, slots=True)
class ByPath(Carrier):
    """``update_weights_from_disk`` with the folder in ``{"path": ...}``: safetensors files that
    engine and trainer both can read, in tmpfs on one host, or on a shared disk."""

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        await target.engine.update_weights_from_disk(
            packed["path"], flush_cache=stage.is_last, weight_version=stage.weight_version
        )


@dataclass(frozen=True, slots=True)
class AsAdapter(Carrier):
    """``load_lora_adapter_from_tensors``, in one bucket: replaces the LoRA adapter of the same
    name; the base weights do not change.

    Attributes:
        name: the value of ``lora_path`` in requests.
        config: PEFT's ``adapter_config.json``.  It is read back from JSON, so that every engine
            can be sent it.

    Raises:
        WeightMismatch: JSON cannot express the config.
    """

    name: str
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        try:
            config = orjson.loads(orjson.dumps(dict(self.config)))
        except TypeError as error:
            raise WeightMismatch(
                f"an adapter's config must consist of values of JSON: {error}"
            ) from None
        object.__setattr__(self, "config", config)

    def pack(self, payload: Payload) -> Any:
        return _encode(payload, "an adapter travels as bytes")

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        engine = target.engine
        # A restarted engine has no adapter.  If the unload failed otherwise, the load fails too.
        with suppress(EngineRejected):
            await engine.unload_lora_adapter(self.name)
        await engine.load_lora_adapter_from_tensors(
            self.name, self.config, [packed] * target.payload_copies
        )
        if stage.is_last:
            await engine.flush_cache()
            await engine.update_weight_version(str(stage.version))


def _encode(payload: Payload, expectation: str) -> str:
    if not isinstance(payload, bytes):
        raise WeightMismatch(f"{expectation}, not {payload!r:.80}")
    return pybase64.b64encode_as_string(payload)


@dataclass(frozen=True, slots=True)
class ByBroadcast(Carrier):
    """``init_weights_update_group`` and ``update_weights_from_distributed``: one broadcast from the
    trainer to all ranks of all engines, gloo on CPU, NCCL on GPU.

    Engines receive from rank 0 of a group.  If several ranks of the trainer send, each has a group
    of its own with all engines, and ``group_name`` in the terms has all names, with blanks between.

    Always true: an engine gets the request to join only when the trainer's store is open and every
    engine of the push has answered a query.  An engine that waits for another one waits until the
    deadline: then the trainer closes its store (``tensors.broadcast_root``).  SGLang itself would
    wait 30 minutes.

    Behaviour of SGLang 0.5.23 with groups on CPU (``contract/test_contract_groups.py``):

    - A group exists until ``destroy_weights_update_group`` names it, over any number of pushes.
    - ``init_weights_update_group`` with a name in use returns 400 once it has reached the trainer's
      store; the existing group still works.  After it is destroyed the name is free.
    - ``destroy_weights_update_group`` with an unknown name returns 400.
    - A group whose rank 0 has exited stays, with its sockets, until it is destroyed (200).  So
      engines get that request.  A broadcast in such a group returns 400 at once, over gloo.
    - A flattened bucket with a bad layout returns 400 before the broadcast; the group still works.
    """

    needs_session = True
    joins = True

    async def join(self, target: PushTarget, terms: Mapping[str, Any]) -> None:
        for name in terms["group_name"].split():
            await target.engine.init_weights_update_group(
                master_address=terms["master_address"],
                master_port=terms["master_port"],
                rank_offset=terms["rank_offset"],
                world_size=terms["world_size"],
                group_name=name,
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
