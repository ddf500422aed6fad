"""Why a vLLM server cannot be driven, in words, and its draft model.

Plain functions over its replies and its options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from engines.plain_json import read_json
from engines.protocol.kind import ReadConfig, Shards
from engines.protocol.logprob_kind import LogprobRule, sampling_defaults
from engines.protocol.spec import spelled
from engines.vllm.routes import GENERATE, OF_DEV_MODE, PLUGIN_BACKEND

OLDEST, BELOW = (0, 27), (0, 34)
"""vLLM versions that can be driven: from the first on, up to and without the second.

0.27 is the first with weight versions; 0.33 is the newest whose endpoints were read.
"""
PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
"""vLLM's ``--logprobs-mode``: of what tokens are drawn from, or of the logits as they are."""
LOGPROB_RULES = {
    PROCESSED: LogprobRule(has_cuts=True, has_masks=False),
    RAW: LogprobRule(has_temperature=False, has_penalties=False, has_masks=False),
}
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def why_undrivable(version: str, paths: Set[str]) -> str:
    """Why this library cannot drive the server.

    Args:
        paths: endpoints it serves.
    """
    ours = f"vLLM {_text(OLDEST)} and later, below {_text(BELOW)}"
    if (parsed := parse_version(version)) is None:
        return f"vLLM {version!r} is not a known version; this drives {ours}"
    if not OLDEST <= parsed < BELOW:
        return f"vLLM {version} cannot be driven; this drives {ours}"
    if missing := sorted(OF_DEV_MODE - paths):
        return (
            f"vLLM {version} here lacks {', '.join(missing)}; "
            "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        )
    if GENERATE not in paths:
        return (
            f"vLLM {version} here lacks {GENERATE}; start it with --enable-scale-out (0.30 "
            "and later)"
        )
    return ""


def why_no_logprobs(mode: str) -> str:
    """Why a server in this mode reports no log-probs."""
    if mode in LOGPROB_RULES:
        return ""
    return f"logprobs-mode is {mode}, which gives no log-probs; use {PROCESSED} or {RAW}"


def logprob_rule(
    raw: Mapping[str, Any], env: Mapping[str, str], read_config: ReadConfig
) -> LogprobRule:
    """At which step of sampling the server takes its log-probs; see ``Kind``.

    Raises:
        ValueError: it reports none.
    """
    if why := why_no_logprobs(raw["logprobs_mode"]):
        raise ValueError(why)
    source, found = raw["generation_config"], dict[str, Any]()
    if source != "vllm":
        found.update(read_config(raw["model_path"] if source == "auto" else source))
    found.update(raw["override_generation_config"])
    return replace(
        LOGPROB_RULES[raw["logprobs_mode"]],
        defaults=sampling_defaults(found),
        has_masks=bool(raw.get("return_sampling_mask")),
    )


def why_no_pushes(backend: str) -> str:
    """Why pushed weights cannot reach the server.

    Args:
        backend: of its weight transfer.
    """
    if backend == PLUGIN_BACKEND:
        return ""
    return (
        f"its weight-transfer backend is {backend or 'not set'}, and pushes need the plugin of "
        f"this package: start it with --weight-transfer-config "
        f'\'{{"backend": "{PLUGIN_BACKEND}"}}\''
    )


WHY_NO_GROUPS = (
    "its workers join no broadcast groups: they run without the plugin of this package, or with an "
    "earlier one"
)
WHY_NO_HANDLES = (
    "its workers open no CUDA IPC handles: they run on a CPU, or without the plugin of this package"
)


def why_open(host: str, has_key: bool) -> str:
    """Why a server must not listen there.

    Args:
        has_key: its control calls need one, which ``engines.http.key_check`` checks.
    """
    if has_key or host in LOOPBACK:
        return ""
    return (
        f"at {host}, vLLM's control endpoints (pause, sleep, update_weights, collective_rpc) "
        "have no key of its own, so every program that reaches the port can call them; without a "
        "key of ours, engines of kind vllm listen on 127.0.0.1 only"
    )


def shards(options: Mapping[str, Any], num_gpus: int) -> Shards | None:
    """How an engine with these options divides its model, or None if they do not fit the GPUs.

    vLLM 0.32 (``FusedMoEParallelConfig.make``) divides experts over tensor x data ranks, with
    expert parallelism or without.
    """
    sizes = {name: options[name] for name in options if spelled(name) in SIZES}
    given = {spelled(name): size for name, size in sizes.items()}
    if not all(type(size) is int and size > 0 for size in given.values()):
        return None
    pipeline, data = (given.get(name, 1) for name in SIZES[1:])
    tensor = given.get(SIZES[0]) or max(1, num_gpus // (pipeline * data))
    if tensor * pipeline * data != num_gpus:
        return None
    return Shards(
        attention=tensor, dense=tensor, experts=tensor * data, pipeline=pipeline, pools=data
    )


def parse_version(version: str) -> tuple[int, int] | None:
    """``0.32.0+cpu`` counts as 0.32; a build without a number is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def transfer_backend(config: Mapping[str, Any]) -> str:
    """The backend in a server's ``vllm_config``, or empty for none."""
    return str((config.get("weight_transfer_config") or {}).get("backend") or "")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# -- drafts ---------------------------------------------------------------------------------------

_DRAFTING = "speculative_config"
_SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
# They draft from the tokens alone.
_WITHOUT_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")


def draft_of(options: Mapping[str, Any]) -> str:
    """The path of its draft model, or the method that has one, or empty if it has none.

    One that cannot be read counts as a draft: a copy of weights too many harms less.
    """
    config = _drafting(options)
    model, method = str(config.get("model") or ""), str(config.get("method") or "")
    if not any(config.values()) or (method or model) in _WITHOUT_WEIGHTS:
        return ""
    return model or method or _DRAFTING.replace("_", "-")


def _drafting(options: Mapping[str, Any]) -> dict[str, Any]:
    """Its speculative configuration, however it is given."""
    found: dict[str, Any] = {}
    for option, value in options.items():
        name, _, key = spelled(option).partition(".")
        if name in _SHORT:
            found[_SHORT[name]] = value
        elif name == _DRAFTING and key:
            found[key] = value
        elif name == _DRAFTING:
            found.update(_drafting_of(value))
    return found


def _drafting_of(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError:
            return {"unreadable": value}
    return value if isinstance(value, Mapping) else {"unreadable": value}
