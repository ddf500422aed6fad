"""SGLang's information endpoints: readiness, settings, load."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import psutil
from starlette.requests import Request
from starlette.responses import Response

from engines.embedded.generation import sampling_params as sampling
from engines.embedded.generation.sampler import RETURNS_ORIGINAL
from engines.embedded.server.embedded_engine import EmbeddedEngine
from engines.embedded.server.request_runner import (
    complete,
    json_response,
    make_generations,
    new_rid,
)
from engines.tensors.payload.encodings import ENCODINGS

try:
    PACKAGE_VERSION = version("ray-rollout")
except PackageNotFoundError:
    PACKAGE_VERSION = "0"


async def ready(engine: EmbeddedEngine, request: Request) -> Response:
    """503 while paused, and while memory is released."""
    return Response(status_code=200 if engine.is_ready else 503)


async def health(engine: EmbeddedEngine, request: Request) -> Response:
    """Whether the generation thread lives; unlike SGLang's it sends no request and so stays
    right during a pause."""
    return Response(status_code=200 if engine.is_alive else 503)


async def health_generate(engine: EmbeddedEngine, request: Request) -> Response:
    """Generates one token; 503 at once where that cannot be now."""
    if not engine.is_ready:
        return Response(status_code=503)
    params = sampling.parse({"max_new_tokens": 1, "temperature": 0.0})
    await complete(engine, request, make_generations(engine, new_rid(), [0], params))
    return Response(status_code=200)


async def model_info(engine: EmbeddedEngine, request: Request) -> Response:
    model_config = engine.model.config
    return json_response(
        {
            "model_path": engine.model_path,
            "served_model_name": served_name(engine),
            "tokenizer_path": engine.config.model_path,
            "is_generation": True,
            "weight_version": engine.weight_version,
            "model_type": model_config.model_type,
            "architectures": model_config.architectures,
            "vocab_size": engine.text.vocabulary_size,
            "max_model_len": engine.context_length,
        }
    )


def served_name(engine: EmbeddedEngine) -> str:
    return engine.config.served_model_name or engine.config.model_path


async def server_info(engine: EmbeddedEngine, request: Request) -> Response:
    return json_response(
        {
            **asdict(engine.config),
            "version": PACKAGE_VERSION,
            "engine": "embedded",
            "process_start": PROCESS_START,
            "proves_loads": True,
            "encodings": ENCODINGS,
            "returns_original_logprob": RETURNS_ORIGINAL,
            "fingerprints": engine.weights.fingerprint_method,
            "device": str(engine.memory.device),
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "context_length": engine.context_length,
            "served_model_name": served_name(engine),
            "weight_version": engine.weight_version,
            "is_paused": engine.gate.paused is not None,
            "pause_mode": engine.gate.paused,
            "is_weight_update_session_open": engine.gate.is_session_open,
            "weights_update_groups": engine.receiver.groups.names(),
            "released_tags": sorted(engine.memory.released),
            "resident_bytes": engine.memory.resident_bytes(),
            "process_resident_bytes": psutil.Process().memory_info().rss,
            "num_held_requests": len(engine.gate.held),
            "internal_states": [],
        }
    )


async def loads(engine: EmbeddedEngine, request: Request) -> Response:
    batcher, limit = engine.batcher, engine.config.max_total_tokens
    used = batcher.used_tokens()
    load = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": batcher.num_running,
        "num_waiting_reqs": batcher.num_waiting,
        "num_output_tokens": batcher.step_report.num_output_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": limit,
        "max_running_requests": engine.config.max_running_requests,
        "token_usage": round(used / limit, 4),
    }
    return json_response(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": PACKAGE_VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [load],
        }
    )


async def models(engine: EmbeddedEngine, request: Request) -> Response:
    card = {
        "id": served_name(engine),
        "object": "model",
        "created": _STARTED,
        "owned_by": "rollout",
        "root": served_name(engine),
        "max_model_len": engine.context_length,
    }
    adapters = [
        card | {"id": name, "root": name, "parent": served_name(engine)}
        for name in engine.adapters.names()
    ]
    return json_response({"object": "list", "data": [card, *adapters]})


_STARTED = int(time.time())
PROCESS_START = f"process {os.getpid()} since {datetime.now(UTC).isoformat()}"
