"""The values that an engine takes and returns, with SGLang's names.

Field names follow SGLang 0.5.23's HTTP API (``sglang/srt/managers/io_struct.py``).
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypedDict
from urllib.parse import urlsplit

from engines.protocol.logprob_kind import LogprobKind
from engines.protocol.sampling_params import SamplingParams

# In the metadata of a safetensors file whose writer promises that it will never be another length
# and will be written again: a reader may keep it mapped, as long as it has its name.
STAYS = "rollout.stays"
# A file beside the safetensors of a checkpoint: JSON, name of each tensor -> its fingerprint.  An
# engine that reports ``proves_loads`` in ``/server_info`` verifies such a checkpoint on loading.
FINGERPRINTS = "rollout.fingerprints.json"


GpuId = int | str
"""A GPU of one machine: its index in PCI order, or the UUID of a GPU or of a MIG slice."""


def read_gpu_id(text: str) -> GpuId:
    """A GPU id as ``CUDA_VISIBLE_DEVICES`` spells it: ``3``, ``GPU-...`` or ``MIG-...``.

    Raises:
        ValueError: it is neither.
    """
    text = text.strip()
    if text.isdigit():
        return int(text)
    if text.startswith(("GPU-", "MIG-")):
        return text
    raise ValueError(f"GPU id {text!r}: an index, or a UUID that starts with GPU- or MIG-")


class WorkerType(StrEnum):
    """What an engine is for within its server."""

    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    PLACEHOLDER = "placeholder"


class MemoryTag(StrEnum):
    """A region of device memory that can be released and resumed by itself."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


class PauseMode(StrEnum):
    """What a pause does to requests in flight: end them, requeue them, or freeze them."""

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory and use of one GPU.

    Attributes:
        uuid: of the GPU or of its MIG slice, as NVML gives it.
        used_bytes: by all programs together.
        holders: programs that use it, as far as the driver names them, with their bytes, or None if
            the driver does not say how many.
        busy_percent: of the driver's last sample period, how long a kernel of any program ran, or
            None if the driver does not measure it, as for MIG slices.
        own_bytes: held by the engine on it, or None if the driver does not name its
            processes, as in many containers, or does not say what one of them holds.
    """

    uuid: str
    used_bytes: int
    total_bytes: int
    holders: Mapping[str, int | None] = field(default_factory=dict)
    busy_percent: int | None = None
    own_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of an engine that was launched here, see ``engines.process.process_identity``.

    Attributes:
        host: name of the machine it runs on.
        boot_id: of that machine's last start; pids are valid only within it.
        started: when it started, in the kernel's ticks since the boot.
        token: in the environment of everything that its engine started.
        namespace: of pids, which are valid only within it: a container has its own.
    """

    pid: int
    started: int
    host: str
    boot_id: str
    token: str = ""
    namespace: str = ""


class Endpoint(NamedTuple):
    """Where an engine listens; a tuple, since every request uses it as a key."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @classmethod
    def of_url(cls, url: str) -> Endpoint:
        """Where ``url`` points.

        Raises:
            ValueError: it is no plain ``http://host:port``.
        """
        parts = urlsplit(url)
        if (
            parts.scheme != "http"
            or not parts.hostname
            or not parts.port  # which itself raises for a port that is no number
            or parts.path not in ("", "/")
            or parts.query
            or parts.username
        ):
            raise ValueError(f"{url!r} is not the URL of an engine: http://host:port, no more")
        return cls(parts.hostname, parts.port)


PROCESS_HEADER = "X-Rollout-Engine"
"""Header of a control call, ``run/process``: the run that calls, and the process it calls."""


class EngineAccess:
    """What calls to an engine carry: a key, and with control calls the process that they are for.

    Always true: nothing shows a key: no text, no JSON, no ``asdict``.  It is no dataclass for that.

    Attributes:
        sampling: the key of requests and queries, or empty for none.
        control: the key of calls that change the engine, or empty for the same one.
        process: the token of the process, or its ``ServerInfo.start``, or empty if not known.
        run: that makes the calls.
    """

    __slots__ = ("control", "process", "run", "sampling")

    def __init__(
        self, sampling: str = "", control: str = "", *, process: str = "", run: str = ""
    ) -> None:
        self.sampling = sampling
        self.control = control
        self.process = process
        self.run = run

    def of(self, process: str = "", *, run: str = "") -> EngineAccess:
        """The same keys, for calls of a run to a process; what is empty stays as it is."""
        return EngineAccess(
            self.sampling, self.control, process=process or self.process, run=run or self.run
        )

    def headers(self, *, is_control: bool) -> dict[str, str]:
        """The headers of a call."""
        key = (self.control or self.sampling) if is_control else self.sampling
        found = {"Authorization": f"Bearer {key}"} if key else {}
        if is_control and self.process:
            found[PROCESS_HEADER] = f"{self.run}/{self.process}"
        return found

    def __repr__(self) -> str:
        has = "with" if self.sampling or self.control else "without"
        return f"<EngineAccess {has} keys, process {self.process!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineAccess) and self._all == other._all

    def __hash__(self) -> int:
        return hash(self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        return _access, self._all

    @property
    def _all(self) -> tuple[str, str, str, str]:
        return self.sampling, self.control, self.process, self.run


def _access(sampling: str, control: str, process: str, run: str) -> EngineAccess:
    return EngineAccess(sampling, control, process=process, run=run)


NO_ACCESS = EngineAccess()
"""Access to an engine without keys."""


class GenerateArguments(TypedDict, total=False):
    """What ``generate`` and ``stream_generate`` take: exactly one of ``input_ids`` and ``text``."""

    input_ids: Sequence[int] | None
    text: str | None
    sampling_params: SamplingParams
    rid: str | None
    return_logprob: bool


class UpdateGroup(TypedDict):
    """A group for broadcasts of weights, as torch's ``init_process_group`` takes it.

    ``rank_offset`` is the rank of the engine's first process; the trainer is rank 0.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a completion ended.

    Attributes:
        kind: ``stop``, ``length`` or ``abort``.
        matched: the stop string or stop token id that ended it, for ``stop``.
        message: the engine's message, for ``abort``, cut to a length fit for a log line.
    """

    kind: str
    matched: str | int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens ``start`` up to, not including, ``end`` came from weight ``version``."""

    version: str
    start: int
    end: int


SamplingMask = tuple[tuple[int, ...] | None, ...]
"""The ids that each token was drawn from, or None for the whole vocabulary."""
TopLogprobs = Mapping[int, float]
"""Token id -> natural-log probability."""
NO_NUMBER = -9999.0
"""vLLM's log-prob of a token for NaN, and for minus infinity, which no sampled token has."""


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """One completion, whole or (streamed) as far as it has come.

    Attributes:
        rid: the request's id.
        text: the completion's text so far.
        output_ids: its token ids, shape ``[completion_tokens]``.
        output_logprobs: natural-log probability of each output id, same length, if requested.
        input_logprobs: of each prompt token after the one at ``logprob_start_len``, which has none;
            NaN where the engine computed none.  None unless requested.
        finish_reason: None while a stream goes on.
        weight_version: version that produced the last token, as text.
        weight_versions: spans that cover all output tokens, where the engine reports them.
        output_top_logprobs: for each output token the most probable ids with their natural-log
            probabilities, the most probable first.  None unless requested.
        input_top_logprobs: the same for each prompt token that ``input_logprobs`` has.
        routed_experts: of each token but the last, prompt included, the experts that computed it:
            int32, C order, shape ``[tokens - 1, layers, experts per token]``.  None unless
            requested.
        sampling_mask: for each output token the ids that top-k, top-p and min-p left to draw it
            from, or None where they cut nothing.  None unless requested.
        num_failovers: engines that the request lost on its way, as the router reports it.
        engine_id: the engine that generated all of it, as the router reports it, or empty where it
            is not known, or after a failover.
        logprob_kind: of which distribution ``output_logprobs`` are, as the router reports it, or
            None where it is not known.
        prompt_ids: those that the engine computed, with all tokens of images.  None unless
            requested.
    """

    rid: str
    text: str
    output_ids: tuple[int, ...]
    output_logprobs: tuple[float, ...] | None
    finish_reason: FinishReason | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    input_logprobs: tuple[float, ...] | None = None
    output_top_logprobs: tuple[TopLogprobs, ...] | None = None
    input_top_logprobs: tuple[TopLogprobs, ...] | None = None
    routed_experts: bytes | None = None
    sampling_mask: SamplingMask | None = None
    num_failovers: int = 0
    engine_id: str = ""
    logprob_kind: LogprobKind | None = None
    prompt_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt.

    Attributes:
        data: a ``data:`` URL.
        digest: its name in caches, in hex digits: equal names get what was computed before.  Empty
            for the name that the engine gives to the file.
    """

    data: str
    digest: str

    def named_by_file(self) -> PromptImage:
        """The same picture, a PNG, in a file that has the name in it."""
        begin, _, text = self.data.partition(",")
        data = base64.b64decode(text)
        note = b"tEXtname\0" + self.digest.encode()
        chunk = struct.pack(">I", len(note) - 4) + note + struct.pack(">I", zlib.crc32(note))
        file = data[:_PNG_HEAD] + chunk + data[_PNG_HEAD:]
        return PromptImage(f"{begin},{base64.b64encode(file).decode()}", "")


_PNG_HEAD = 33
"""Bytes before which a PNG has its size, and no other chunk."""


_UNVERIFIED = "unverified-"
_OVER = "-over-"


def unverified_text(version: int, over: int | None = None) -> str:
    """What an engine reports as its version from the first bucket of a push until the last.

    It is no number, so no launch and no recovery takes the engine's weights for a version.

    Args:
        version: of the push.
        over: the version of the weights that it changes, or None if they are of none.
    """
    return f"{_UNVERIFIED}{version}" + ("" if over is None else f"{_OVER}{over}")


def is_unverified(text: str) -> bool:
    """Whether an engine that reports this version may have a part of a push."""
    return text.startswith(_UNVERIFIED)


def encoded_from(text: str) -> str:
    """The version that encoded tensors must begin from in an engine that reports this one."""
    return text.partition(_OVER)[2] if is_unverified(text) else text


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Reply of ``/model_info``."""

    model_path: str
    weight_version: str
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Reply of ``/server_info``: what the engine was started with.

    ``enable_memory_saver`` matters: without it SGLang answers release and resume with 200 and
    frees nothing.

    Attributes:
        resident_bytes: memory of each tag now, or empty where the engine does not report it.
        released: tags that are released now, or None where the engine does not report it.
        update_groups: groups for broadcasts that it is in, or None where it does not report it.
        fingerprints: the method of the fingerprints of its weights, ``xxh3`` or ``sums``, or empty
            where a trainer cannot make the same ones.
        why_no_pushes: why pushed weights cannot reach it.
        why_no_groups: why it joins no broadcast groups.
        why_no_handles: why it takes no CUDA IPC handles.
        start: what is of its process alone, so that another one in its place is seen, or empty
            where it reports nothing of that kind.
        num_answers_late: its first rank answers for all; so many answers later, the others have
            done the same.  0 where it answers when all have.
    """

    version: str
    engine: str
    enable_memory_saver: bool
    enable_weights_cpu_backup: bool
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    released: frozenset[str] | None = None
    update_groups: frozenset[str] | None = None
    fingerprints: str = ""
    why_no_pushes: str = ""
    why_no_groups: str = ""
    why_no_handles: str = ""
    start: str = ""
    num_answers_late: int = 0
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Loads:
    """Reply of ``/v1/loads``, summed over data-parallel ranks.  Stale while SGLang is paused.

    Attributes:
        tokens_per_s: generated now, or None where the engine does not measure it, as SGLang without
            ``enable-metrics``.
        num_output_tokens: generated since it started, or None where it does not count them.
        kv_use: share of the KV cache in use, of the rank that uses most, or None if not reported.
        num_drafted: tokens that its draft has proposed since it started, or None where it does not
            count them.
        num_accepted: those of them that were right.
        accepted_share: of SGLang's drafted tokens, in the last interval that it measured, or None
            where it counts them, or drafts none.
        interval: of that share; another one with each new interval.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    tokens_per_s: float | None = None
    num_output_tokens: int | None = None
    kv_use: float | None = None
    num_drafted: int | None = None
    num_accepted: int = 0
    accepted_share: float | None = None
    interval: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """Reply of ``/weights_checker``.

    Attributes:
        checksum: one digest of all weights of the engine, or None for actions without one.
        tensors: per tensor-parallel rank, name of the tensor -> digest.  Names are the engine's
            own (fused, sharded); digests of CPU and CUDA engines are not comparable.
        num_bytes: of weights, read for the digests, or None where the engine does not report them.
        why_partial: why there are ranks whose tensors are not listed.
    """

    checksum: str | None
    tensors: tuple[Mapping[str, str], ...] = ()
    message: str = ""
    num_bytes: int | None = field(default=None, compare=False)
    why_partial: str = ""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of an engine's weights, as ``/weights_manifest`` lists it.

    Attributes:
        name: its name in the checkpoint.
        dtype: for example ``float32``.
        shape: its full shape, before any sharding.
        is_tied: another name of one that is listed too; a push may leave it out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_tied: bool = False
