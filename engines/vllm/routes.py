"""Paths of vLLM's HTTP endpoints, and which of them a version must have.

Facts of 0.32.0, where a comment names no other version.
"""

from __future__ import annotations

PAUSE, RESUME, IS_PAUSED = "/pause", "/resume", "/is_paused"
SLEEP, WAKE_UP = "/sleep", "/wake_up"
RELEASE_KV = "/release_kv_cache_memory"  # since 0.31
RESET_CACHE = "/reset_prefix_cache"
ABORT = "/abort_requests"
START_UPDATE, UPDATE, FINISH_UPDATE = (
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
SET_VERSION, WEIGHT_INFO = "/update_weight_version", "/weight_info"
CHECKER = "/weight_checker"  # since 0.32
WORLD_SIZE = "/get_world_size"
RPC = "/collective_rpc"
SERVER_INFO, VERSION, OPENAPI = "/server_info", "/version", "/openapi.json"
HEALTH, METRICS, TOKENIZE = "/health", "/metrics", "/tokenize"
GENERATE = "/inference/v1/generate"  # from 0.30 on only with --enable-scale-out
LOAD_LORA, UNLOAD_LORA = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

OF_DEV_MODE = frozenset(
    {
        PAUSE,
        RESUME,
        IS_PAUSED,
        SLEEP,
        WAKE_UP,
        RESET_CACHE,
        ABORT,
        START_UPDATE,
        UPDATE,
        FINISH_UPDATE,
        SET_VERSION,
        WEIGHT_INFO,
        WORLD_SIZE,
        RPC,
        SERVER_INFO,
    }
)
"""They exist only with ``VLLM_SERVER_DEV_MODE=1``; vLLM's own API key does not guard them."""

REQUEST_PREFIX = "generate-tokens-"
"""What ``/inference/v1/generate`` puts before a request's id, and an abort must name."""
PLUGIN_BACKEND = "rollout_shm"
"""The weight-transfer backend of this package's plugin (``engines/vllm_plugin``)."""
