"""What depends on the version of an SGLang server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from importlib import metadata
from typing import Any

from engines.process.cuda_runtime import site_packages
from engines.protocol.kind import ReadConfig
from engines.protocol.logprob_kind import LogprobRule, sampling_defaults

OLDEST, BELOW = (0, 5, 20), (0, 6)
"""SGLang versions that can be driven: from the first on, up to and without the second.

0.5.20 is the oldest whose endpoints were looked at and are all there; older ones lack ``/ready``.
"""
_RETRACT_SAFE = _KEEPS_GRAPHS = (0, 5, 21)
# Earlier ones make sampling masks after the token was drawn, or have none (pull request 36630).
_HAS_MASKS = (0, 5, 23)
NEEDED = frozenset(
    {
        "/ready",
        "/generate",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/abort_request",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/update_weights_from_tensor",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/model_info",
    }
)
"""Endpoints without which one cannot be driven."""


_ORIGINAL_LOGPROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def logprob_rule(
    raw: Mapping[str, Any], env: Mapping[str, str], read_config: ReadConfig
) -> LogprobRule:
    """At which step of sampling the server takes its log-probs; see ``Kind``."""
    is_original = env.get(_ORIGINAL_LOGPROBS, "").lower() in ("1", "true")
    has_config = raw.get("sampling_defaults") == "model" and raw.get("model_path")
    found = read_config(str(raw["model_path"])) if has_config else {}
    has_masks = (_parse(str(raw.get("version"))) or _HAS_MASKS) >= _HAS_MASKS
    return LogprobRule(
        has_temperature=not is_original, defaults=sampling_defaults(found), has_masks=has_masks
    )


def is_retract_safe(version: str) -> bool:
    """Whether it may be flushed and released while requests are retracted."""
    return (_parse(version) or (0,)) >= _RETRACT_SAFE


def keeps_graphs(version: str) -> bool:
    """Whether CUDA graphs that were released are whole again after a resume, from a copy in host
    memory; an unknown version counts as a new one."""
    return (_parse(version) or _KEEPS_GRAPHS) >= _KEEPS_GRAPHS


def installed_version(python: str) -> str:
    """Version of the SGLang that an interpreter has, from its metadata.

    An empty ``python`` is this process's own interpreter, an empty result an unknown version.
    """
    if python:
        found = (info for at in site_packages(python) for info in at.glob("sglang-*.dist-info"))
        return next((info.name.split("-")[1].removesuffix(".dist") for info in found), "")
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return ""


def why_undrivable(version: str, paths: Set[str]) -> str:
    """Why this library cannot drive the server.

    Args:
        paths: endpoints it serves.
    """
    parsed = _parse(version)
    ours = f"SGLang {_text(OLDEST)} and later, below {_text(BELOW)}"
    if parsed is None:
        return f"SGLang {version!r} is not a known version; this drives {ours}"
    if not OLDEST <= parsed < BELOW:
        return f"SGLang {version} cannot be driven; this drives {ours}"
    if missing := sorted(NEEDED - paths):
        return f"SGLang {version} here lacks {', '.join(missing)}; this drives {ours}"
    return ""


def _parse(version: str) -> tuple[int, ...] | None:
    """``0.5.23.post1`` counts as 0.5.23; a build without a number is none."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in match.groups()) if match else None
    return numbers if numbers and any(numbers) else None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
