"""Carry one push to many engines: session, buckets, version, flush.

Always true: a session that was begun is ended, also after a failure; the prefix cache is flushed
and the version set by the last bucket only; an engine that failed in between gets no further
bucket and is reported, because it now holds half of a push and must not serve.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.protocol import Engine
from rollout.fanout import Answer, fan_out
from rollout.weights.manifest import Manifest

# What a call gets when the deadline has passed: enough to close a session with.
_LEAST_BUDGET_S = 5.0


@dataclass(frozen=True, slots=True)
class WeightPush:
    """New weights on their way.

    Attributes:
        version: the weight version they make.
        manifest: every tensor in them.
        buckets: payloads of ``update_weights_from_tensor`` before base64: bytes, or something
            to await for them (a Ray ObjectRef), so that only one bucket is in memory at a time.
    """

    version: int
    manifest: Manifest
    buckets: Sequence[bytes | Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class PushTarget:
    """One engine of a push.

    Attributes:
        payload_copies: how often SGLang wants the payload: once per tensor-parallel rank.
        has_session: it wants the update between begin and end (SGLang 0.5.21 and later).
    """

    engine: Engine
    payload_copies: int = 1
    has_session: bool = True


async def push_weights(
    push: WeightPush, targets: Mapping[str, PushTarget], *, budget_s: float
) -> dict[str, Answer[None]]:
    """Send ``push`` to all targets; answers by engine id.

    Args:
        budget_s: seconds for the whole push; an engine that is late then is reported.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + budget_s
    answers: dict[str, Answer[None]] = {}
    elapsed = dict.fromkeys(targets, 0.0)

    async def ask(
        operation: str, wanted: Sequence[str], call: Callable[[PushTarget], Awaitable[None]]
    ) -> None:
        asked = await fan_out(
            {one: _bind(call, targets[one]) for one in wanted},
            operation=operation,
            budget_s=max(deadline - clock(), _LEAST_BUDGET_S),
        )
        for engine_id, answer in asked.items():
            elapsed[engine_id] += answer.elapsed_s
            if answer.failure is not None:
                answers.setdefault(engine_id, answer)

    def going() -> list[str]:
        return [engine_id for engine_id in targets if engine_id not in answers]

    begun = list(targets)
    try:
        await ask("begin_weight_update", begun, _begin)
        begun = going()
        for index, bucket in enumerate(push.buckets):
            payload = bucket if isinstance(bucket, bytes) else await bucket
            is_last = index == len(push.buckets) - 1
            await ask("update_weights", going(), _sender(payload, push.version, is_last))
    finally:
        await ask("end_weight_update", begun, _end)
    return {engine_id: answers.get(engine_id, Answer(elapsed[engine_id])) for engine_id in targets}


async def _begin(target: PushTarget) -> None:
    if target.has_session:
        await target.engine.begin_weight_update()


async def _end(target: PushTarget) -> None:
    if target.has_session:
        await target.engine.end_weight_update()


def _sender(payload: bytes, version: int, is_last: bool) -> Callable[[PushTarget], Awaitable[None]]:
    text = base64.b64encode(payload).decode("ascii")

    async def send(target: PushTarget) -> None:
        await target.engine.update_weights_from_tensor(
            [text] * target.payload_copies,
            flush_cache=is_last,
            weight_version=str(version) if is_last else None,
        )

    return send


def _bind(
    call: Callable[[PushTarget], Awaitable[None]], target: PushTarget
) -> Callable[[], Awaitable[Any]]:
    return lambda: call(target)
