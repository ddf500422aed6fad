"""The configuration of a run on an engine that somebody else launched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rollout
from tests.support.engine_keys import Reachable, keys_of


def config(
    theirs: str | Reachable,
    model: Path,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    weights: Mapping[str, Any] | None = None,
    lifecycle: Mapping[str, Any] | None = None,
    takeover: bool = False,
    kind: str = "attached",
    **group: Any,
) -> rollout.RolloutConfig:
    url = theirs if isinstance(theirs, str) else theirs.endpoint.url
    keys = {} if isinstance(theirs, str) else keys_of(theirs)
    engine: dict[str, Any] = {
        "kind": kind,
        "urls": [url],
        **keys,
        "start_timeout_s": 20,
        "env": env or {},
    }
    engine["takeover"] = takeover
    # In a session, which somebody else may have opened; files need none.
    transport = "shared_memory" if kind == "vllm" else "by_value"
    return rollout.RolloutConfig.from_dict(
        {
            "log_dir": str(folder),
            "servers": {
                "policy": {
                    "model_path": str(model),
                    "groups": {"theirs": {"engine": engine, **group}},
                    "weights": {"transport": transport, **(weights or {})},
                    "lifecycle": lifecycle or {},
                    "health": {"probe_interval_s": 0.2},
                }
            },
        }
    )
