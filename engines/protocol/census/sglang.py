"""What SGLang has of its weights: read in 0.5.20, 0.5.21, 0.5.22 and 0.5.23.

Places are below ``sglang/srt`` of 0.5.23.
"""

from __future__ import annotations

from engines.protocol.census.entries import Cache, Census, Sign, Treatment

_FLUSH = "/flush_cache, before a release and with the last bucket of a push"
_NAMED = "extra_key, hashed into the first page's key; the router refuses paths that take none"
_FLUSHED_AT = "managers/scheduler.py: flush_cache"
_NO_NAME = "its keys have no run and no weight version, and no call clears it"
_OUTLIVES = "embeddings of images would outlive a push that changes what computes them"

CENSUS = Census(
    versions=("0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    caches=(
        Cache(
            name="prefix cache",
            treatment=Treatment.CLEARED,
            by=_FLUSH,
            source=f"{_FLUSHED_AT}, tree_cache.reset()",
            options=(
                "*radix*",
                "disable_chunked_prefix_cache",
                "strip_thinking_cache",
                "swa_prefix_tails",
            ),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="KV, state-space and draft pools",
            treatment=Treatment.CLEARED,
            by=_FLUSH,
            source=f"{_FLUSHED_AT}, req_to_token_pool, token_to_kv_pool_allocator, draft_worker",
            options=(
                "*mamba*",
                "linear_replayssm_cache_len",
                "*kv_cache_d*",
                "enable_kv_cache_sharding",
                "enable_page_major_kv_layout",
                "enable_dsa_cache_layer_split",
                "prefill_only_disable_kv_cache",
                "triton_attention_num_kv_splits",
            ),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="host tier of the hierarchical cache",
            treatment=Treatment.CLEARED,
            by=_FLUSH,
            source="mem_cache/unified_radix_cache.py: reset (0.5.20: hiradix_cache.py)",
            options=("enable_hierarchical_cache", "hicache_[!s]*", "hicache_size"),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="storage tier (files, Mooncake, HF3FS, NIXL and others)",
            treatment=Treatment.NAMED,
            by=_NAMED,
            source="mem_cache/utils.py: storage_namespace_seed",
            options=(
                "hicache_storage_*",
                "file_storage_path",
                "disaggregation_decode_enable_offload_kvcache",
            ),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="direct external store of the prefix cache",
            treatment=Treatment.NAMED,
            by=_NAMED,
            source="mem_cache/unified_cache/unified_cache_linker.py: _tail_hashes",
            options=("*external_linker*", "enable_linker_mla_dedup"),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="LMCache, FlexKV and other prefix caches",
            treatment=Treatment.REFUSED,
            by=f"{_NO_NAME} (LMCache of 0.5.20, FlexKV); use hicache-storage-backend",
            source="mem_cache/storage/lmcache, mem_cache/storage/flexkv, mem_cache/registry.py",
            options=(
                "enable_lmcache",
                "lmcache_config_file",
                "enable_flexkv",
                "flexkv_config_file",
                "radix_cache_backend",
            ),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="KV of streaming sessions",
            treatment=Treatment.REFUSED,
            by="a session's KV is of the weights that it began with; use the router's /sessions",
            source="session/streaming_session.py, managers/schedule_batch.py",
            options=("enable_streaming_session",),
            sign=Sign.PREFIX,
        ),
        Cache(
            name="embeddings of images and sounds",
            treatment=Treatment.DISABLED,
            by=_OUTLIVES,
            source="managers/mm_schedule.py: embedding_cache; disaggregation/encoder/server.py",
            options=("enable_prefix_mm_cache",),
            variable="SGLANG_VLM_CACHE_SIZE_MB",
            is_of_encoder=True,
            sign=Sign.IMAGE,
        ),
        Cache(
            name="store of embeddings that encoder workers share",
            treatment=Treatment.REFUSED,
            by=_OUTLIVES,
            source="mem_cache/embedding_cache_controller.py",
            options=("enable_mm_global_cache",),
            is_of_encoder=True,
            sign=Sign.IMAGE,
        ),
        Cache(
            name="draft model",
            treatment=Treatment.RECOMPUTED,
            by="the model computes each token that is drafted, with its own weights; no push has "
            "those of the draft, so a release keeps those of the draft in host memory",
            source="speculative/eagle_worker_v2.py",
            options=("speculative_*", "*draft*"),
        ),
        Cache(
            name="LoRA adapters and their pool",
            treatment=Treatment.NAMED,
            by="lora_id, which is new with each load",
            source="lora/lora_registry.py: LoRARef; managers/schedule_batch.py",
            options=("*lora*",),
        ),
        Cache(
            name="grammars",
            treatment=Treatment.CLEARED,
            by="/flush_cache; no weight is in them",
            source=f"{_FLUSHED_AT}, grammar_manager.clear()",
            options=("disable_outlines_disk_cache",),
        ),
        Cache(
            name="CUDA graphs",
            treatment=Treatment.RECOMPUTED,
            by="they read the weights, and copies derived from them, where a load writes",
            source="model_executor/runner",
            options=("*cuda_graph*", "enable_cudagraph_gc"),
            sign=Sign.COPY,
        ),
        Cache(
            name="quantised, fused and transposed copies",
            treatment=Treatment.RECOMPUTED,
            by="process_weights_after_loading, at the end of each update",
            source="managers/scheduler_components/weight_updater.py",
            options=("*quant*", "*_experts*"),
            sign=Sign.COPY,
        ),
        Cache(
            name="weights shared by a daemon",
            treatment=Treatment.REFUSED,
            by="engines of other runs have the same weights, and a push would change theirs",
            source="weight_cache/daemon.py",
            options=("weight_cache_mode",),
            sign=Sign.COPY,
        ),
        Cache(
            name="routed-expert records",
            treatment=Treatment.CLEARED,
            by=f"{_FLUSH}: they are by places of the KV pool",
            source="state_capturer/routed_experts.py",
            options=("enable_return_routed_experts",),
        ),
        Cache(
            name="places of experts",
            treatment=Treatment.RECOMPUTED,
            by="a move copies the weights that the engine has",
            source="eplb/eplb_manager.py",
            options=("*eplb*",),
        ),
        Cache(
            name="reward and embedding heads",
            treatment=Treatment.RECOMPUTED,
            by="each request computes them; nothing of them is stored",
            source="layers/pooler.py",
            options=("is_embedding",),
        ),
    ),
    others=(
        "asr_max_concurrent_sessions",
        "custom_weight_loader",
        "disaggregation_enable_kv_checksum",
        "enable_cache_report",
        "enable_precise_embedding_interpolation",
        "enable_response_store",
        "enable_weights_cpu_backup",
        "*transfer*",
        "kt_weight_path",
        "kv_canary*",
        "kv_events_config",
        "mm_global_cache_backend",
        "mm_preprocess_cache_size_mb",
        "modelopt_checkpoint_restore_path",
        "remote_instance_weight_*",
        "startup_weight_load_mode",
        "uvicorn_access_log_exclude_prefixes",
        "weight_cache_[!m]*",
        "weight_loader_*",
        "weight_version",
    ),
)
