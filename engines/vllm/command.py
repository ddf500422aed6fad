"""The command line of a vLLM server.

Options in the spec travel through in vLLM's own names.  One that follows from another setting is
refused by name, and so is one that the lifecycle cannot work with.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from math import prod
from typing import Any

from engines.protocol import Endpoint, WorkerType
from engines.protocol.spec import AT_LAUNCH, EngineSpec, as_flags, normalized, refuse, spelled
from engines.vllm.features import PROCESSED, SIZES, why_no_logprobs, why_open
from engines.vllm.routes import PLUGIN_BACKEND

_OF_PLUGIN = "pushes need this package's plugin, which is set at launch"
_OWNERS = {
    **AT_LAUNCH,
    "model": "the server's model_path",
    "enable_sleep_mode": "the group's needs_offload",
    "weight_transfer_config": _OF_PLUGIN,
    "worker_extension_cls": _OF_PLUGIN,
    "config": "put its options under engine.options",
    "api_key": "each launch makes its own keys, which the router has; engine.key false makes none",
    "ssl_keyfile": "engines are reached over plain HTTP",
    "ssl_certfile": "engines are reached over plain HTTP",
    "uds": "engines are reached over TCP",
    "headless": "that server has no endpoints",
    "tokens_only": "that server has no text",
}
KEY_CHECK = "engines.http.key_check.KeyCheck"
"""What checks the keys: vLLM's own guard neither pauses nor updates."""
DEFAULTS: dict[str, Any] = {
    # The token-in, token-out route; servers before 0.30 have it, and not this flag.
    "enable_scale_out": True,
    # At the request's temperature, as SGLang returns them; but after top-p, top-k and min-p, which
    # SGLang leaves out.  vLLM has no mode between the two.
    "logprobs_mode": PROCESSED,
    "enable_prompt_tokens_details": True,
}
"""What we choose where the spec's options do not, or None there keeps vLLM's own choice."""


def build_command(spec: EngineSpec, endpoint: Endpoint) -> list[str]:
    """The command that starts this engine at this endpoint.

    Raises:
        ValueError: an option that is set elsewhere, sizes that do not fit the GPUs, an address
            that others can reach without a key, a mode without log-probs, or a spec that no vLLM
            server can be.
    """
    options = normalized(spec.options)
    refuse(options, _OWNERS)
    _check(spec, endpoint)
    if why := why_no_logprobs(options.get("logprobs_mode") or PROCESSED):
        raise ValueError(why)
    ours: dict[str, Any] = {
        "model": spec.model_path,
        "host": endpoint.host,
        "port": endpoint.port,
        "enable_sleep_mode": spec.memory_saver and not spec.is_on_cpu,
        "weight_transfer_config": {"backend": PLUGIN_BACKEND},
        "worker_extension_cls": "engines.vllm_plugin.worker.WorkerExtension",
        **_worker(spec),
        **_sizes(options, len(spec.gpu_ids)),
    }
    program = [spec.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    theirs = options.pop("middleware", None) or []
    theirs = [theirs] if isinstance(theirs, str) else [*theirs]
    # One flag each.  The last one sees a request first.
    middleware = [f"--middleware={name}" for name in (*theirs, KEY_CHECK)]
    return program + as_flags(ours | DEFAULTS | options) + middleware


def _worker(spec: EngineSpec) -> dict[str, str]:
    """On GPUs vLLM's worker with our checks; an engine on the CPU names its own."""
    return {} if spec.is_on_cpu else {"worker_cls": "engines.vllm_plugin.gpu_worker.GpuWorker"}


def _check(spec: EngineSpec, endpoint: Endpoint) -> None:
    if why := why_open(endpoint.host, spec.has_key):
        raise ValueError(why)
    if spec.num_nodes > 1:
        raise ValueError("an engine of kind vllm runs on one node; set nodes to 1")
    if spec.worker_type is not WorkerType.REGULAR:
        raise ValueError(f"vLLM cannot be a {spec.worker_type} worker here; SGLang can")


def num_ranks(options: Mapping[str, Any]) -> int:
    """Ranks that options ask for, in any spelling; 1 if they do not, or wrongly."""
    given = [value for name, value in options.items() if spelled(name) in SIZES]
    return prod(size for size in given if isinstance(size, int) and size > 0)


def _sizes(options: Mapping[str, Any], num_gpus: int) -> dict[str, int]:
    """The tensor-parallel size that the GPUs leave; nothing where the options say it."""
    given = {name: options.get(name) or 1 for name in SIZES}
    others = given["pipeline_parallel_size"] * given["data_parallel_size"]
    if "tensor_parallel_size" in options:
        num_ranks = given["tensor_parallel_size"] * others
        if num_gpus and num_ranks != num_gpus:
            raise ValueError(
                f"vLLM's parallel sizes make {num_ranks} ranks, but the engine has {num_gpus} "
                "GPUs; make engine.gpus fit, or leave tensor-parallel-size out"
            )
        return {}
    tensor = num_gpus // others
    if num_gpus % others:
        raise ValueError(
            f"{num_gpus} GPUs cannot be divided by pipeline x data = {others}; make engine.gpus fit"
        )
    return {"tensor_parallel_size": tensor} if tensor > 1 else {}
