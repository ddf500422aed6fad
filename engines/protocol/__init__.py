"""The calls of an engine and their values: the vocabulary shared with ``rollout``.

It fits any kind of engine: real SGLang, the embedded engine, a fake.  No file but
``engines/http/client.py`` knows endpoint paths.
"""

from engines.protocol.engine import Engine
from engines.protocol.sampling_params import SamplingParams
from engines.protocol.types import (
    FINGERPRINTS,
    NO_ACCESS,
    PROCESS_HEADER,
    STAYS,
    Endpoint,
    EngineAccess,
    FinishReason,
    GenerateReply,
    GpuId,
    GpuMemory,
    Loads,
    MemoryTag,
    ModelInfo,
    PauseMode,
    ProcessIdentity,
    PromptImage,
    ServerInfo,
    TensorInfo,
    TopLogprobs,
    VersionSpan,
    WeightsReport,
    WorkerType,
    encoded_from,
    is_unverified,
    read_gpu_id,
    unverified_text,
)

__all__ = [
    "FINGERPRINTS",
    "NO_ACCESS",
    "PROCESS_HEADER",
    "STAYS",
    "Endpoint",
    "Engine",
    "EngineAccess",
    "FinishReason",
    "GenerateReply",
    "GpuId",
    "GpuMemory",
    "Loads",
    "MemoryTag",
    "ModelInfo",
    "PauseMode",
    "ProcessIdentity",
    "PromptImage",
    "SamplingParams",
    "ServerInfo",
    "TensorInfo",
    "TopLogprobs",
    "VersionSpan",
    "WeightsReport",
    "WorkerType",
    "encoded_from",
    "is_unverified",
    "read_gpu_id",
    "unverified_text",
]
