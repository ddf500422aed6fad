"""What a vLLM server reports of itself, in the protocol's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from engines.protocol import MemoryTag, ServerInfo
from engines.vllm import routes
from engines.vllm.features import (
    RAW,
    WHY_NO_GROUPS,
    WHY_NO_HANDLES,
    transfer_backend,
    why_no_pushes,
)

METHODS_OF_PLUGIN = {
    "fingerprints": "rollout_fingerprints",
    "manifest": "rollout_manifest",
    "state": "rollout_state",
    "join": "rollout_join_group",
    "receive": "rollout_receive_bucket",
    "leave": "rollout_leave_group",
}
_OWN_OFFLOADS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_SAME = {
    routes.START_UPDATE: "/begin_weight_update",
    routes.FINISH_UPDATE: "/end_weight_update",
    routes.CHECKER: "/weights_checker",
}


def read_server_info(version: str, answer: Any) -> ServerInfo:
    """``/server_info?config_format=json``.  A sleep at level 1 keeps a copy of the weights, so
    every server with sleep mode has a backup.
    """
    config = answer["vllm_config"]
    if not isinstance(config, Mapping):
        raise ValueError("vllm_config is no object: this vLLM does not know config_format=json")
    model, parallel = config["model_config"], config["parallel_config"]
    can_sleep = bool(model.get("enable_sleep_mode"))
    return ServerInfo(
        version=version,
        engine="vllm",
        enable_memory_saver=can_sleep,
        enable_weights_cpu_backup=can_sleep,
        why_no_pushes=why_no_pushes(transfer_backend(config)),
        why_no_groups=WHY_NO_GROUPS,
        why_no_handles=WHY_NO_HANDLES,
        start=_start(config),
        raw={
            "model_path": str(model["model"]),
            "weight_transfer_backend": transfer_backend(config),
            "logprobs_mode": str(model.get("logprobs_mode") or RAW),
            "return_sampling_mask": bool(model.get("return_sampling_mask")),
            "generation_config": str(model.get("generation_config") or "auto"),
            "override_generation_config": dict(model.get("override_generation_config") or {}),
            "tp_size": int(parallel.get("tensor_parallel_size") or 1),
            "pp_size": int(parallel.get("pipeline_parallel_size") or 1),
            "dp_size": int(parallel.get("data_parallel_size") or 1),
            "enable_eplb": bool(parallel.get("enable_eplb")),
            "kv_transfer_config": _connector(config),
            "ec_transfer_config": bool(config.get("ec_transfer_config")),
            "speculative_config": _drafting(config),
        },
    )


def _start(config: Mapping[str, Any]) -> str:
    """It is made at each start (0.32: of the clock); of several API servers each makes its own."""
    num_front_ends = config["parallel_config"].get("_api_process_count") or 1
    name = str(config.get("instance_id") or "")
    return f"instance_id {name}" if name and num_front_ends == 1 else ""


def _connector(config: Mapping[str, Any]) -> str:
    """What has KV outside of it, or empty for nothing, and for what kv-offloading-size adds."""
    name = str((config.get("kv_transfer_config") or {}).get("kv_connector") or "")
    return "" if name in _OWN_OFFLOADS else name


def _drafting(config: Mapping[str, Any]) -> dict[str, str]:
    """How it drafts tokens, or empty if it does not."""
    found = config.get("speculative_config") or {}
    return {name: str(found[name]) for name in ("method", "model") if found.get(name)}


def has_plugin(info: ServerInfo) -> bool:
    """Whether our plugin is in its workers."""
    return bool(info.raw["weight_transfer_backend"] == routes.PLUGIN_BACKEND)


def info_with_state(info: ServerInfo) -> Callable[[Any], ServerInfo]:
    """Reads what the plugin's workers report, into the report."""

    def read(answer: Any) -> ServerInfo:
        workers = answer["results"]
        resident: dict[str, int] = {}
        for worker in workers:
            for tag, num in (worker.get("resident_bytes") or {}).items():
                resident[tag] = resident.get(tag, 0) + int(num)
        counts = all(worker.get("resident_bytes") for worker in workers)
        # One that does not count its memory does not know what is released either.
        reported = [worker["released"] for worker in workers] if counts else []
        # The plugin of an earlier version joins none.
        joins = all("groups" in worker for worker in workers)
        return replace(
            info,
            # A worker on a CPU counts what it releases; vLLM's own flag is for CUDA.
            enable_memory_saver=info.enable_memory_saver or counts,
            enable_weights_cpu_backup=info.enable_weights_cpu_backup or counts,
            resident_bytes=resident,
            released=_with_graphs(reported) if reported else None,
            update_groups=frozenset(_in_all(workers, "groups")) if joins else None,
            raw={**info.raw, "encodings": _in_all(workers, "encodings")},
            why_no_groups="" if joins else info.why_no_groups,
            fingerprints=str(workers[0].get("fingerprints") or ""),
            why_no_handles=""
            if all(worker.get("opens_handles") for worker in workers)
            else info.why_no_handles,
        )

    return read


def _in_all(workers: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """What each of the workers has in this list."""
    return sorted(
        frozenset.intersection(*(frozenset(worker.get(name) or ()) for worker in workers))
    )


def _with_graphs(reported: Sequence[Collection[str]]) -> frozenset[str]:
    """The released tags.  vLLM has no memory of CUDA graphs to release: they count as released with
    the KV cache."""
    released = frozenset[str]().union(*reported)
    return released | {MemoryTag.CUDA_GRAPH} if MemoryTag.KV_CACHE in released else released


def known_paths(paths: Set[str], *, has_plugin: bool) -> frozenset[str]:
    """Its paths, with SGLang's names of those that do the same."""
    same = {ours for theirs, ours in _SAME.items() if theirs in paths}
    of_plugin = {"/weights_manifest", "/weights_checker"} if has_plugin else set()
    return frozenset(paths) | same | of_plugin
