"""Which engines of a policy have requests."""

from __future__ import annotations

import json
import urllib.request

from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from tests.support.engine_keys import request_to


def busy_engines(policy: ServerHandle) -> list[EngineStatus]:
    (group,) = policy.status().result(30).groups
    return [engine for engine in group.engines if num_running(engine)]


def num_running(engine: EngineStatus) -> int:
    with urllib.request.urlopen(request_to(engine, "/v1/loads"), timeout=30) as answer:
        return sum(rank["num_running_reqs"] for rank in json.load(answer)["loads"])
