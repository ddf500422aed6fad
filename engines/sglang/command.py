"""The command line of an SGLang server.

Options in the spec travel through in SGLang's own names.  One that follows from another setting
is refused by name, and so is one that the lifecycle cannot work with.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.http.key_check import key_variables
from engines.protocol import Endpoint, WorkerType
from engines.protocol.spec import AT_LAUNCH, EngineSpec, as_flags, normalized, refuse
from engines.sglang.draft import BACKUP_OPTION, draft_of
from engines.sglang.parallel import divide

_NO_SUCH_SERVER = "that server lacks the control endpoints"
_OWN_KEYS = "each launch makes its own keys, which the router has; engine.key false makes none"
_OWNERS = {
    **AT_LAUNCH,
    "model": "the server's model_path",
    "nccl_init_addr": "follows from the placement",
    "base_gpu_id": "follows from the placement",
    "gpu_id_step": "follows from the placement",
    "device": "engine.gpus; 0 is the CPU",
    "enable_memory_saver": "the group's needs_offload",
    "enable_weights_cpu_backup": "engine.weights_cpu_backup",
    "disaggregation_mode": "the group's worker_type",
    "encoder_only": "the group's worker_type",
    "config": "put its options under engine.options",
    "use_ray": "skips the memory saver and takes whole GPUs; we launch it in an actor of ours",
    "api_key": _OWN_KEYS,
    "admin_api_key": _OWN_KEYS,
    "incremental_streaming_output": "streams must be cumulative to be resumed",
    "grpc_mode": _NO_SUCH_SERVER,
    "smg_grpc_mode": _NO_SUCH_SERVER,
    "ssl_keyfile": "engines are reached over plain HTTP",
    "ssl_certfile": "engines are reached over plain HTTP",
}
_START = Path(__file__).with_name("start.py")
_WITHOUT_KEYS = ("tokenizer_worker_num", "grpc_port")
# Allowed: with GPUs, it leaves them alone.
_ON_CPU = ("device", "cpu")
BOOTSTRAP_OPTION = "disaggregation_bootstrap_port"
# Between the ports of engines and the ephemeral ones, which may be taken while an engine starts.
# Two engines that would have one here are not launched on these ports: see ``Invocation.ports``.
_BOOTSTRAP_PORTS = range(30_001, 32_768)
_ROLES: dict[WorkerType, dict[str, Any]] = {
    WorkerType.REGULAR: {},
    WorkerType.PREFILL: {"disaggregation_mode": "prefill"},
    WorkerType.DECODE: {"disaggregation_mode": "decode"},
    WorkerType.ENCODER: {"encoder_only": True},
}
# What SGLang would choose on a CPU takes nearly all of the host's memory, and its cores when idle.
_CPU_DEFAULTS = {
    "attention_backend": "torch_native",
    "lora_backend": "torch_native",
    "max_total_tokens": 16384,
    "max_running_requests": 64,
    "sleep_on_idle": True,
}


def build_command(spec: EngineSpec, endpoint: Endpoint) -> list[str]:
    """The command that starts this engine, or this node of it, at this endpoint.

    Raises:
        ValueError: an option that is set elsewhere, sizes that do not fit the GPUs, or a spec
            that no SGLang server can be.
    """
    options = normalized(spec.options)
    refuse([name for name, value in options.items() if (name, value) != _ON_CPU], _OWNERS)
    sizes = divide(options, len(spec.gpu_ids) * spec.num_nodes).flags
    if spec.num_nodes > 1:
        _check_nodes(spec)
    if spec.worker_type not in _ROLES:
        raise ValueError(f"a {spec.worker_type} group starts no engines")
    ours: dict[str, Any] = {
        **spec.launch_options(endpoint),
        "enable_memory_saver": spec.memory_saver,
        "enable_weights_cpu_backup": spec.weights_cpu_backup,
        **_ROLES[spec.worker_type],
        BOOTSTRAP_OPTION: bootstrap_port(spec, endpoint) or None,
        **sizes,
    }
    return _program(spec, options) + as_flags(ours | default_options(spec) | options)


def _program(spec: EngineSpec, options: Mapping[str, Any]) -> list[str]:
    """SGLang with its keys, or without."""
    if spec.access is None or not key_variables(spec.access):
        return [spec.python or sys.executable, "-m", "sglang.launch_server"]
    # 0.5.23: several tokenizers end with an assertion, and gRPC would be open.
    keyless = [name for name in _WITHOUT_KEYS if options.get(name) not in (None, 1)]
    if keyless:
        raise ValueError(
            f"SGLang has no keys with {', '.join(keyless)}; leave that out, or set engine.key to "
            "false, with which every program that reaches the engine's port can control it"
        )
    return [spec.python or sys.executable, str(_START)]


def bootstrap_port(spec: EngineSpec, endpoint: Endpoint) -> int:
    """Where decode engines find this one, if it is a prefill engine; 0 if that is SGLang's choice.

    Each has its own: with one port, the decode engines of one would fetch from another.  The nodes
    of one engine must agree on it, so an engine over several keeps SGLang's.
    """
    if spec.worker_type is not WorkerType.PREFILL:
        return 0
    if given := normalized(spec.options).get(BOOTSTRAP_OPTION):
        return int(given)
    if spec.num_nodes > 1:
        return 0
    return _BOOTSTRAP_PORTS[endpoint.port % len(_BOOTSTRAP_PORTS)]


def default_options(spec: EngineSpec) -> dict[str, Any]:
    """What we choose where the spec's options do not, or None there keeps SGLang's own choice."""
    options = normalized(spec.options)
    # Without it, chats and completions of OpenAI's routes have no cached tokens.
    found: dict[str, Any] = {"enable_cache_report": True}
    if spec.is_on_cpu:
        found |= _CPU_DEFAULTS | {"device": "cpu"}
    elif spec.memory_saver:
        # In 0.5.23 the default prefill graphs refuse to start in pausable memory.
        found["cuda_graph_backend_prefill"] = "disabled"
    if spec.memory_saver and draft_of(options):
        # No push contains a draft model, so a release would lose its weights.
        found[BACKUP_OPTION] = True
    if options.get("enable_lora") and not {"lora_target_modules", "lora_paths"} & options.keys():
        # SGLang must know the modules before the first adapter comes.
        found["lora_target_modules"] = ["all"]
    return found


def _check_nodes(spec: EngineSpec) -> None:
    if not spec.dist_init_addr:
        raise ValueError(
            f"an engine over {spec.num_nodes} nodes needs dist_init_addr, host:port on its first"
        )
    if not 0 <= spec.node_rank < spec.num_nodes:
        raise ValueError(f"node_rank {spec.node_rank} of {spec.num_nodes} nodes")
