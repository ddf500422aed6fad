"""CUDA IPC: each rank of an engine opens the memory of the trainer's rank on its GPU.

Always true: the memory of a bucket is freed only after the engines have applied it, on all ranks;
it is in no expandable segment of torch, whatever the trainer's allocator is set to.
Also here: the GPU of this rank, and host memory to which it copies at full speed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pybase64

from rollout.config import Transport
from rollout.core.errors import WeightMismatch
from rollout.weights.format.named import named_pairs
from rollout.weights.routes.rank_end import OwnGpu, Places, RankEnd, RouteRow, Shares
from rollout.weights.routes.route import (
    BUCKETS_AHEAD,
    Chosen,
    EnginePlace,
    Payload,
    PushTarget,
    Route,
    Stage,
)

if TYPE_CHECKING:
    import torch

    from rollout.weights.tensors.sources import Pairs

logger = logging.getLogger(__name__)

# For all devices of the process, not only for the current one.
_PORTABLE = 1


def reach(ranks: Places, engine: EnginePlace) -> Chosen | str:
    """From ranks that hold all the engine's GPUs."""
    if engine.why_no_handles:
        return engine.why_no_handles
    if not engine.gpus:
        return "it has no GPUs that are known"
    if len(engine.gpus) != engine.num_payloads:
        return (
            f"it has {len(engine.gpus)} GPUs and {engine.num_payloads} tensor-parallel ranks, so "
            "one handle would be read on several GPUs"
        )
    own: dict[str, str] = {}
    for rank in ranks:
        own.setdefault(_plain(rank.gpu), rank.gpu)
    free = [gpu for gpu in engine.gpus if _plain(gpu) not in own]
    if free:
        return f"no rank has its tensors on GPU {free[0]}"
    return Chosen(Transport.CUDA_IPC, gpus=tuple(own[_plain(gpu)] for gpu in engine.gpus))


def _plain(uuid: str) -> str:
    """NVML writes a kind before the UUID, and torch does not."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


@dataclass(frozen=True, slots=True)
class ByHandles(Route):
    """``update_weights_from_tensor`` with the handle of each GPU.

    A payload has the pickle around the handle, which is the same for all ranks, and the handles:
    ``{"head", "tail", "handles": {uuid: handle}}``, all base64.

    Attributes:
        gpus: the UUIDs of the engine's GPUs, in the order of its tensor-parallel ranks.
    """

    gpus: tuple[str, ...] = ()

    @property
    def needs_session(self) -> bool:  # type: ignore[override]
        return True

    def pack(self, payload: Payload) -> Any:
        if isinstance(payload, bytes):
            raise WeightMismatch("a push by handles has a mapping, not bytes")
        head, tail = (pybase64.b64decode(payload[part]) for part in ("head", "tail"))
        return {
            uuid: pybase64.b64encode_as_string(head + pybase64.b64decode(handle) + tail)
            for uuid, handle in payload["handles"].items()
        }

    async def send(self, target: PushTarget, packed: Any, stage: Stage) -> None:
        if len(self.gpus) != target.payload_copies:
            raise WeightMismatch(
                f"the engine has {target.payload_copies} tensor-parallel ranks, and "
                f"{len(self.gpus)} GPUs when the push was planned"
            )
        await target.engine.update_weights_from_tensor(
            [packed[uuid] for uuid in self.gpus],
            load_format="flattened_bucket",
            flush_cache=stage.is_last,
            weight_version=stage.weight_version,
        )


def open_share(end: RankEnd, chosen: Chosen) -> HandleBuilder | None:
    """A rank whose GPU an engine uses."""
    gpu = end.gpu
    return HandleBuilder(gpu) if gpu is not None and gpu.uuid in chosen.gpus else None


class HandleBuilder:
    """Flattens each bucket on this rank's GPU, for the engine rank on the same GPU."""

    def __init__(self, gpu: OwnGpu) -> None:
        self._device = device_of(gpu.uuid)
        self._settings = gpu.settings
        self._flat: dict[int, torch.Tensor] = {}

    def make(self, index: int, pairs: Pairs) -> Mapping[str, Any]:
        from rollout.weights.tensors.payload import ipc_handle

        # The engines have asked for this bucket, so they have applied those before the last.
        self._free([made for made in self._flat if made < index - BUCKETS_AHEAD])
        made = ipc_handle(pairs, self._device, self._settings)
        self._flat[index] = made.flat
        return {"handle": pybase64.b64encode_as_string(made.handle)}

    def close(self) -> None:
        self._free(list(self._flat))

    def _free(self, indices: Sequence[int]) -> None:
        import torch

        for index in indices:
            del self._flat[index]
        if indices:
            torch.cuda.ipc_collect()


def join(chosen: Chosen, shares: Shares, ranks: Places, pairs: Pairs) -> Sequence[Payload]:
    """The handles of all ranks, by GPU."""
    from rollout.weights.tensors.payload import around_handle

    head, tail = map(pybase64.b64encode_as_string, around_handle(pairs))
    handles = {ranks[rank].gpu: share["handle"] for rank, share in shares.items()}
    return [{"head": head, "tail": tail, "handles": handles}]


def gpu_with(named_tensors: Any) -> OwnGpu | None:
    """The GPU with this rank's tensors, or None if they are in host memory, or if memory of this
    process cannot be opened by another.

    An iterator's tensors are not known yet: they are copied to the current GPU if they are not
    there.
    """
    import torch

    from rollout.weights.tensors.payload import ExportSettings

    if not torch.cuda.is_initialized():
        return None
    number = torch.cuda.current_device()
    if not isinstance(named_tensors, Iterator):
        device = _device_of(named_tensors)
        if device.type != "cuda":
            return None
        number = number if device.index is None else device.index
    try:
        settings = ExportSettings.now()
    except Exception as error:  # of torch's interfaces for this, none is public
        logger.warning(
            "no push by CUDA IPC from this rank: torch's allocator uses expandable_segments, and "
            "they cannot be switched off for what is pushed (%s)",
            error,
        )
        return None
    return OwnGpu(_uuid_of(number), settings)


def _device_of(named_tensors: Any) -> Any:
    """The device of the first tensor; the CPU if there is none, which the plan reports."""
    import torch

    try:
        _, first = next(named_pairs(named_tensors))
    except (StopIteration, WeightMismatch):
        first = None
    return getattr(first, "device", torch.device("cpu"))


def device_of(gpu: str) -> torch.device:
    """The GPU of this process with this UUID."""
    import torch

    uuids = [_uuid_of(number) for number in range(torch.cuda.device_count())]
    return torch.device("cuda", uuids.index(gpu))


def _uuid_of(number: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(number).uuid)


def stream_of_thread() -> Any | None:
    """This thread's current stream on its current GPU, or None if the process uses none."""
    import torch

    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def use_stream(stream: Any | None) -> None:
    """Make this stream and its GPU the current ones of this thread; None changes nothing.

    A new thread begins with the default stream of the first GPU.  That is in no order with a stream
    of the trainer's own: tensors could be read before they are made, and memory that was freed be
    used again while it is read.
    """
    import torch

    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)


def pinned(address: int, num_bytes: int) -> Callable[[], object]:
    """Pin host memory for copies from the GPU; returns what undoes it, before it is unmapped.

    Copies to memory that is not pinned go through a buffer of the driver, at a half to a third of
    the speed.  If the process does not use CUDA, or CUDA refuses, nothing is pinned.
    """
    import torch

    if not torch.cuda.is_initialized():
        return _nothing
    runtime: Any = torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)):
        logger.warning(
            "CUDA cannot pin %d bytes of shared memory (cudaHostRegister: error %d), so copies "
            "from the GPU are slower",
            num_bytes,
            error,
        )
        # The next kernel would report the error once more.
        with suppress(Exception):
            torch.ones(1, device="cuda")
        return _nothing
    return partial(runtime.cudaHostUnregister, address)


def _nothing() -> None:
    """Nothing was pinned."""


ROW = RouteRow(
    Transport.CUDA_IPC,
    reach,
    lambda chosen: ByHandles(chosen.gpus),
    open_share,
    join,
    is_copy=False,
)
