"""Settings of weight pushes, of their verification and of the weight store."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rollout.config.base import ConfigSection, PathText, Seconds


class WeightUpdate(StrEnum):
    """What the trainer sends each step."""

    FULL = "full"
    PARTIAL = "partial"
    LORA = "lora"
    FROZEN = "frozen"


class Transport(StrEnum):
    """How a push reaches the engines."""

    AUTO = "auto"
    BY_VALUE = "by_value"
    SHARED_MEMORY = "shared_memory"
    DISTRIBUTED = "distributed"
    DISK = "disk"
    CUDA_IPC = "cuda_ipc"


class EncodingChoice(StrEnum):
    """How the tensors of a push are written."""

    FULL = "full"
    DELTA = "delta"
    AUTO = "auto"


class Casts(StrEnum):
    """Which other float types than the model's a push may have."""

    NONE = "none"
    NARROW = "narrow"
    ANY = "any"


AdapterName = Annotated[str, Field(pattern=r"^[^@:\s]+$")]
"""Engines know a version of it with ``@`` and a number behind it."""


class StoreConfig(ConfigSection):
    """A copy of the published weights in spare host memory, from which engines are restored.

    Each node holds two versions of its share of ``replicas`` copies of the model, at most twice
    the model. While an engine is restored on a node, the node also holds the rest of the model.
    ``rollout plan`` prints the amount. Leave the store off if engines or trainer need that memory,
    if every version is saved as a checkpoint anyway, or if a restarted engine may wait for the
    next push.
    """

    replicas: Annotated[int, Field(ge=1)] = 2
    """Number of nodes that keep each byte; one node fewer may be lost without losing weights."""
    path: PathText = "/dev/shm"
    """Folder in tmpfs, the same path on every node. With the mount option ``huge=within_size`` the
    first write takes a quarter of the time, and restores are up to twice as fast."""
    unit_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Approximate size of one unit, which is placed, sent and verified as a whole: an expert, or a
    part of a layer."""
    segment_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Approximate size of one file."""
    transfer: Literal["tcp", "mooncake"] = "tcp"
    """How nodes read missing bytes from each other, under Ray. ``mooncake`` (extra ``mooncake``) is
    for RDMA networks; on other networks ``tcp`` is faster. ``mooncake`` has no authentication: use
    it on private networks only. If it fails, ``tcp`` is used."""
    spare_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    """Memory that stays free on each node; if a push would leave less, it is not stored."""
    max_failures: Annotated[int, Field(ge=1)] = 3
    """Failures in a row after which the store switches itself off."""


class WeightsConfig(ConfigSection):
    """How new weights reach the engines."""

    update: WeightUpdate = WeightUpdate.FULL
    """What a push contains; decides which memory a release may discard."""
    not_pushed: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Tensors of the checkpoint that the trainer does not hold, by name or shell pattern, for
    example ``mtp.*``. A full push is complete without them. Engines that offload keep a copy of all
    their weights in host memory."""
    frozen: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Tensors that pushes contain and training never changes, by name or shell pattern, for example
    ``model.visual.*``. All others are expected to change, by their fingerprints: a part that does
    not is reported. An adapter's tensors go by the names of those that they are added to."""
    bucket_bytes: Annotated[int, Field(ge=1)] = 256 * 1024 * 1024
    """Bytes of tensors sent in one request."""
    transport: Transport = Transport.AUTO
    """How a push travels. ``auto`` uses ``shared_memory`` if all engines run on the trainer's host
    and it has room, else ``by_value``; from every rank (``pusher()``) it chooses for each engine.
    ``distributed`` broadcasts (gloo, NCCL) through a process group that is kept as long as the
    engines stay the same. ``disk`` saves each version."""
    encoding: EncodingChoice = EncodingChoice.FULL
    """How tensors are written. ``delta`` sends the elements that have changed since the version
    that an engine holds, and refuses an engine that takes none; ``auto`` sends them where that
    pays. The trainer keeps a copy of the model in host memory. An engine that holds another version
    gets whole tensors, as after an offload without ``weights_cpu_backup``."""
    casts: Casts = Casts.NARROW
    """Which tensors of another float type than the checkpoint's are accepted. ``narrow``: wider
    ones, such as float32 for a bfloat16 model, which the engine rounds. ``any``: also bfloat16 or
    float16 for a float32 model, whose lower bits were lost before. ``none``: no others. A float8
    tensor needs scales, so it is never cast."""
    allow_nonfinite: bool = False
    """Push tensors with NaN or infinite values. By default a push of them is refused, by name."""
    stream: bool = False
    """Prepare a bucket while the engines load the previous one: faster, and never needs a whole
    copy of the model, but the tensors must not change until the push has ended."""
    shared_memory_path: PathText = "/dev/shm"
    """Folder in tmpfs for ``shared_memory``; the memory is kept for the next push. The mount option
    ``huge=within_size`` makes taking it faster."""
    disk_path: PathText | None = None
    """Folder for ``disk``, for example ``/ckpt/{version}``; also set ``health.weights_path``."""
    draft: Literal["kept"] = "kept"
    """What becomes of a draft model. ``kept``: pushes do not train it, so accepted drafts fall with
    training. ``pushed`` is refused: no push contains a draft."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of ``distributed``; ``auto`` uses NCCL for tensors on a GPU, else gloo."""
    group_timeout_s: Seconds = 60.0
    """Deadline for all engines to join a broadcast, and for each of its buckets; after it, the
    broadcast is cancelled on all of them."""
    check_first_push: bool = False
    """Make the first ``push`` a ``checks.push_path``. Its weights must be those of
    ``model_path``, so not for a trainer that continues from another checkpoint. The engines keep a
    copy of the model in host memory meanwhile."""
    adapters: Annotated[tuple[AdapterName, ...], Field(min_length=1)] = ("policy",)
    """Names of pushed adapters with ``update: lora``. Requests without ``lora_path`` get the first;
    with ``lora_path: null`` they get the base. Engines have at most three versions of each: the
    published one, those that requests and sessions still use, and the next; a push over that waits
    for ``lifecycle.drain_timeout_s``."""
    store: StoreConfig | None = None
    """Keep the published weights in the nodes' memory: ``true``, or the settings of the store."""

    @field_validator("draft", mode="before")
    @classmethod
    def _draft_is_not_pushed(cls, value: Any) -> Any:
        if value == "pushed":
            raise ValueError(
                "no push contains a draft: engines of kind vllm load pushed tensors into the "
                "policy alone, and SGLang gives its draft only those whose names it has; use kept, "
                "and launch again with another draft when too few tokens of it are accepted"
            )
        return value

    @field_validator("store", mode="before")
    @classmethod
    def _store_accepts_a_boolean(cls, value: Any) -> Any:
        return ({} if value else None) if isinstance(value, bool) else value

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.not_pushed and self.update is not WeightUpdate.FULL:
            yield (
                "not_pushed",
                f"a push with weights.update = {self.update} may leave out any tensor; leave out "
                "weights.not_pushed, or set weights.update to full",
            )
        if self.encoding is not EncodingChoice.FULL and self.update is not WeightUpdate.FULL:
            yield "encoding", why_only_whole(self.encoding)
        if len(set(self.adapters)) < len(self.adapters):
            yield "adapters", f"each name once, not {', '.join(self.adapters)}"
        if self.store is not None and self.update not in (WeightUpdate.FULL, WeightUpdate.LORA):
            yield (
                "store",
                f"the store keeps full pushes, and weights.update is {self.update}; leave out "
                "weights.store",
            )
        if self.check_first_push and self.not_pushed:
            yield (
                "check_first_push",
                "the check resets all tensors, and those of weights.not_pushed do not come with a "
                "push; leave out one of the two",
            )
        if self.check_first_push and self.update is not WeightUpdate.FULL:
            yield (
                "check_first_push",
                f"only full pushes can be checked this way, and weights.update is {self.update}; "
                "leave out weights.check_first_push",
            )
        if self.transport is Transport.DISK and self.disk_path is None:
            yield "disk_path", "transport disk needs disk_path, for example /ckpt/{version}"
        if self.disk_path is not None and "{version}" not in self.disk_path:
            yield "disk_path", "disk_path must contain {version}, for example /ckpt/{version}"


class VerifyConfig(ConfigSection):
    """How weights are verified after a push, before an engine serves."""

    by: Literal["fingerprint", "canary", "version"] = "fingerprint"
    """What is compared. ``fingerprint`` reads all weights once per step; an engine whose
    fingerprints cannot be compared gets the log-prob check. ``canary`` is the log-prob check alone:
    it compares log-probabilities of fixed prompts. ``version`` compares only the version number."""
    fingerprints: bool = True
    """Compute fingerprints of pushed tensors, and compare them with those that engines report. Of
    engines that report no comparable ones (SGLang), the files that they load are compared just
    before. They are computed only if something is compared with them."""
    canary_prompts: tuple[Annotated[tuple[int, ...], Field(min_length=2)], ...] = ()
    """Token ids of the prompts of the log-prob check. Default: the sentinel's prompt, or its first
    64 tokens without a sentinel."""
    canary_tolerance: Annotated[float, Field(gt=0)] = 0.1
    """Largest average difference of log-probabilities, in nats; one token may differ by ten times
    as much. Equal weights differ by less on other kernels and layouts; corrupt weights differ by
    whole nats."""
    sentinel: bool = True
    """Ask each engine after each push, before the gate opens, whether a cache still has what older
    weights computed: one prompt of 288 tokens, through the caches and past them (and an image, if
    the model sees). An engine that does is fenced. Its tokens are those of ``canary_prompts``,
    repeated, or drawn from the middle of the vocabulary."""


def why_only_whole(encoding: EncodingChoice) -> str:
    """Why pushes cannot be written this way but only as whole tensors, and what it needs."""
    return (
        f"encoding {encoding} needs weights.update = full and verify.fingerprints = true, because "
        "a delta is verified by the fingerprints of all whole tensors"
    )
