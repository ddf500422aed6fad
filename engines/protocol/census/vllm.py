"""What vLLM has of its weights: read in 0.32 and 0.33.

Places are below ``vllm`` of 0.33.0.
"""

from __future__ import annotations

from engines.protocol.census.entries import Cache, Census, Sign, Treatment

_PAUSE = "/pause, which clears it before any weight changes"
_PAUSED_AT = "v1/engine/core.py: _reset_caches"

CENSUS = Census(
    versions=("0.32", "0.33"),
    caches=(
        Cache(
            name="prefix cache",
            treatment=Treatment.CLEARED,
            by=f"{_PAUSE}; /reset_prefix_cache",
            source=f"{_PAUSED_AT}, reset_prefix_cache",
            options=(
                "*prefix_cach*",
                "prefix_match_unit",
                "*mamba*",
                "*hybrid_kv*",
                "*kv_cache_[!m]*",
                "kv_cache_memory_bytes",
                "kv_sharing_fast_prefill",
            ),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="host tier of the KV cache",
            treatment=Treatment.CLEARED,
            by=_PAUSE,
            source=f"{_PAUSED_AT}, reset_connector",
            options=("kv_offloading_size",),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="KV connectors (LMCache, Mooncake, NIXL and others)",
            treatment=Treatment.REFUSED,
            by="not all put cache_salt into their keys; use kv-offloading-size",
            source="distributed/kv_transfer/kv_connector/v1",
            options=("kv_transfer_config", "kv_offloading_backend"),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="encoder outputs",
            treatment=Treatment.CLEARED,
            by=_PAUSE,
            source=f"{_PAUSED_AT}, reset_encoder_cache",
            is_of_encoder=True,
            sign=Sign.IMAGE,
        ),
        Cache(
            name="processed images and sounds",
            treatment=Treatment.CLEARED,
            by=f"{_PAUSE}; no weight is in them",
            source=f"{_PAUSED_AT}, reset_mm_cache",
            options=("mm_processor_cache_*", "mm_shm_cache_*"),
        ),
        Cache(
            name="encoder connectors",
            treatment=Treatment.REFUSED,
            by="embeddings would outlive a push that changes what computes them",
            source="distributed/ec_transfer/ec_connector",
            options=("ec_transfer_config", "ec_manager_config"),
            is_of_encoder=True,
            sign=Sign.IMAGE,
        ),
        Cache(
            name="draft model",
            treatment=Treatment.RECOMPUTED,
            by="the model computes each token that is drafted, with its own weights; no push has "
            "those of the draft, so a release keeps all weights in host memory",
            source="v1/spec_decode",
            options=("*spec*_config", "spec_*"),
        ),
        Cache(
            name="LoRA adapters",
            treatment=Treatment.REFUSED,
            by="no adapter is pushed to vLLM: it loads them from a folder only",
            source="entrypoints/serve/lora/api_router.py",
            options=("default_mm_loras",),
        ),
        Cache(
            name="grammars",
            treatment=Treatment.RECOMPUTED,
            by="no weight is in them",
            source="v1/structured_output",
        ),
        Cache(
            name="compiled code and CUDA graphs",
            treatment=Treatment.RECOMPUTED,
            by="they read the weights where a load writes",
            source="compilation/cuda_graph.py",
            options=("*cudagraph*", "*_graph*"),
            sign=Sign.COPY,
        ),
        Cache(
            name="quantised, fused and transposed copies",
            treatment=Treatment.RECOMPUTED,
            by="/finish_weight_update, which processes the loaded layers again",
            source="model_executor/model_loader/reload",
            options=("*quant*",),
            sign=Sign.COPY,
        ),
        Cache(
            name="routed-expert records",
            treatment=Treatment.CLEARED,
            by=f"{_PAUSE}: they are by places of the KV cache",
            source="model_executor/layers/fused_moe/routed_experts_capturer.py",
            options=("enable_return_routed_experts",),
        ),
        Cache(
            name="places of experts",
            treatment=Treatment.RECOMPUTED,
            by="a move copies the weights that the engine has",
            source="distributed/eplb",
            options=("*eplb*",),
        ),
        Cache(
            name="reward and embedding heads",
            treatment=Treatment.RECOMPUTED,
            by="each request computes them; nothing of them is stored",
            source="model_executor/layers/pooler",
        ),
    ),
    others=(
        "*lora*",
        "enable_ep_weight_filter",
        "enable_mm_embeds",
        "enable_prompt_embeds",
        "kv_cache_metrics*",
        "kv_events_config",
        "weight_transfer_config",
    ),
)
