"""What is pushed, how it travels, and where it is kept."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from rollout.config.slices import Seconds, Slice


class WeightUpdate(StrEnum):
    """What the trainer sends each step."""

    FULL = "full"
    PARTIAL = "partial"
    LORA = "lora"
    FROZEN = "frozen"


class Transport(StrEnum):
    """How a push reaches the engines."""

    AUTO = "auto"
    TENSOR = "tensor"
    SHARED_MEMORY = "shared_memory"
    DISTRIBUTED = "distributed"
    DISK = "disk"
    CUDA_IPC = "cuda_ipc"


class StoreConfig(Slice):
    """The current policy in spare memory, for engines that come back without the trainer.

    Each node takes twice its share of ``replicas`` copies of the model (two versions), at most
    twice the model, and what it lacks of the model while an engine is restored there; ``rollout
    plan`` says how much that is. Leave it off where that memory is needed by engines or trainer,
    where a saved checkpoint of every version is at hand anyway, or where engines may wait for the
    next push.
    """

    replicas: Annotated[int, Field(ge=1)] = 2
    """Different nodes that keep each byte; nodes that may be lost are one less."""
    path: str = "/dev/shm"
    """Folder in memory, the same on every node. In a tmpfs mounted with ``huge=within_size``
    the first write costs a quarter, and restores go up to twice as fast."""
    unit_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """About how much is placed, sent and proved together: an expert, or a piece of a layer."""
    segment_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """About how long one file is."""
    transfer: Literal["tcp", "mooncake"] = "tcp"
    """How a node reads what it lacks from others, under Ray. ``mooncake`` (extra ``mooncake``) is
    for RDMA networks; elsewhere plain ``tcp`` is faster. It authenticates nobody: for closed
    networks only. Where it fails, ``tcp`` is used."""
    spare_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    """Memory of each node that it leaves free; with less than this, pushes are not kept."""
    lease_s: Seconds = 600.0
    """A run of which nothing is heard for so long loses its bytes."""
    write_timeout_s: Seconds = 600.0
    """Until a push is kept, in the background; past it, that push is not."""
    max_failures: Annotated[int, Field(ge=1)] = 3
    """Failures in a row after which it switches itself off."""


class WeightsConfig(Slice):
    """How new weights reach the engines."""

    update: WeightUpdate = WeightUpdate.FULL
    """What a push contains; decides what a release may forget."""
    bucket_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    """Bytes of tensors sent in one call."""
    transport: Transport = Transport.AUTO
    """``auto``: ``shared_memory`` where all engines run on the trainer's host and it has room, else
    ``tensor``. ``distributed`` broadcasts (gloo, NCCL), through a group that is kept as long as
    the engines are the same; ``disk`` keeps each version."""
    stream: bool = False
    """Make a bucket while engines take the one before: faster, and no copy of the model is ever
    whole, but the tensors must not change until the push has ended."""
    fingerprint: bool = True
    """Fingerprint what is pushed, and compare it with what engines hold that can tell."""
    shared_memory_path: str = "/dev/shm"
    """Folder in tmpfs for ``shared_memory``; what is taken there is kept for the next push. In a
    tmpfs mounted with ``huge=within_size`` taking it costs less."""
    disk_path: str | None = None
    """Folder for ``disk``, as ``/ckpt/{version}``; give ``health.weights_path`` the same."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of ``distributed``; ``auto``: NCCL for tensors on a GPU."""
    group_timeout_s: Seconds = 60.0
    """Until all engines have joined a broadcast, and for each bucket of it; then all are freed."""
    adapter: str = "policy"
    """Name under which adapters are pushed with ``update: lora``; requests give it as
    ``lora_path``."""
    store: StoreConfig | None = None
    """Keep the published weights in the nodes' memory: ``true``, or settings of its own."""

    @field_validator("store", mode="before")
    @classmethod
    def _store_is_a_switch_too(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _store_gets_whole_pushes(self) -> WeightsConfig:
        if self.store is None:
            return self
        if self.update not in (WeightUpdate.FULL, WeightUpdate.LORA):
            raise ValueError(
                f"the store keeps full pushes, and weights.update is {self.update}; leave out "
                "weights.store"
            )
        if self._streams():
            raise ValueError(
                "the store keeps what a push leaves behind, and with stream, distributed or "
                "cuda_ipc it leaves nothing; use shared_memory, tensor or disk without stream"
            )
        if not self.fingerprint:
            raise ValueError(
                "the store proves what it reads by the push's fingerprints; set fingerprint to true"
            )
        return self

    def _streams(self) -> bool:
        return self.stream or self.transport in (Transport.DISTRIBUTED, Transport.CUDA_IPC)

    @model_validator(mode="after")
    def _disk_has_a_place(self) -> WeightsConfig:
        if self.transport is Transport.DISK and self.disk_path is None:
            raise ValueError("transport disk needs disk_path, as /ckpt/{version}")
        if self.disk_path is not None and "{version}" not in self.disk_path:
            raise ValueError("disk_path has no {version} in it, so it would always be the same")
        return self
