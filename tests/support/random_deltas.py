"""Random deltas, pushed one after the other, to engines that must hold every bit of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engines.kinds import kind_of
from engines.protocol import Engine
from engines.tensors.delta import bits_of
from rollout.core.types import EngineStatus, StepReport
from rollout.runtime.handle import ServerHandle
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import push_weights
from rollout.weights.ranks.leader import push_of_one_rank
from rollout.weights.ranks.trainer_rank import TrainerRank
from rollout.weights.routes.route import EnginePlace, PushTarget
from rollout.weights.tensors import bytes_fingerprint
from tests.support.delta_faults import REFUSED, Faults
from tests.support.engine_keys import client_of
from tests.support.real_policy import DEADLINES
from tests.support.still_server import HERE, StillServer, server_config

NUM = int(os.environ.get("ROLLOUT_RANDOM_DELTAS", "100"))
"""So many tensors are changed by deltas of their own; in the long run 3400 on each engine kind."""

Tensors = dict[str, torch.Tensor]


def pushed_by_deltas(handle: ServerHandle, **weights: Any) -> ServerHandle:
    """The same server, pushed to by value with ``encoding: delta``."""
    settings = {"transport": "by_value", "encoding": "delta", "bucket_bytes": 100_000, **weights}
    changed = handle._config.weights.model_validate(
        {**handle._config.weights.model_dump(), **settings}
    )
    config = handle._config.model_copy(update={"weights": changed})
    return ServerHandle(handle.name, config, handle._caller)


def changed(tensors: Mapping[str, torch.Tensor], share: float | None = None) -> Tensors:
    """As a step of training: of each tensor, a share of the elements has other bits.

    Args:
        share: None draws one for each tensor, from none to a quarter.
    """
    found = {}
    for name, tensor in tensors.items():
        most = float(torch.rand(()) ** 3 / 4) if share is None else share
        bits, new = bits_of(tensor).clone(), bits_of(torch.randn(tensor.shape).to(tensor.dtype))
        chosen = torch.rand(bits.shape) < most
        bits[chosen] = new[chosen]
        found[name] = bits.view(tensor.dtype).view(tensor.shape)
    return found


def sent(report: StepReport) -> Any:
    """The stage of a push that says what was sent."""
    (stage,) = [one for one in report.push_stages if one.stage == "copy"]
    return stage


def engines_of(handle: ServerHandle) -> list[EngineStatus]:
    return [one for group in handle.status().result(30).groups for one in group.engines]


def checksums_of(engine: EngineStatus, kind: str) -> Mapping[str, str]:
    """By its own word."""

    async def ask() -> Mapping[str, str]:
        made = kind_of(kind).client
        client = client_of(engine, made, engine_id=engine.engine_id, deadlines=DEADLINES)
        try:
            [found] = (await client.weights_checker()).tensors
            return found
        finally:
            await client.aclose()

    return asyncio.run(ask())


def fingerprints(tensors: Tensors, names: Any) -> dict[str, str]:
    return {name: bytes_fingerprint(name, tensors[name]) for name in names}


def check(
    handle: ServerHandle,
    tensors: Tensors,
    held: Callable[[Tensors], None],
    num: int = NUM,
    route: str = "by_value",
) -> int:
    """Push until so many tensors were changed by deltas; every push must end as one of deltas.

    Args:
        held: raises if an engine has other bits than these.
    """
    handle.push(tensors).result(120)
    num_done = 0
    while num_done < num:
        new = changed(tensors)
        num_done += sum(not torch.equal(new[name], tensors[name]) for name in new)
        tensors = new
        report = handle.push(tensors).result(120)
        assert sent(report).route == f"{route} delta"
        held(tensors)
    return num_done


class DirectPushes:
    """Pushes to one engine with no server around it, so that none is fenced.

    Attributes:
        holds: the version of the last push that succeeded.
    """

    def __init__(self, engine: Engine, tensors: Tensors) -> None:
        settings = {"transport": "by_value", "encoding": "delta", "bucket_bytes": 100_000}
        self._rank = TrainerRank(server_config(**settings))
        self._target = PushTarget(engine)
        self.tensors = tensors
        self.holds: int | None = None

    async def push(self, version: int) -> tuple[str, Exception | None]:
        """The encoding of a push, and why it failed."""
        place = EnginePlace("engine", HERE, encodings=("delta",), weight_version=self.holds)
        server = _Server(engines=[place])
        request = PushRequest(self.tensors, version)
        with push_of_one_rank(self._rank, server, request, may_stream=True) as made:
            found = made.weights.route_of("engine")
            assert found is not None
            target = replace(self._target, weight_version=self.holds)
            answers = await push_weights(made.weights, {"engine": target}, budget_s=60)
            failure = answers["engine"].failure
            if failure is None:
                made._after_success()
                self.holds = version
        return "delta" if found.payload == "by_value delta" else "full", failure

    async def aclose(self) -> None:
        self._rank.close()
        await self._target.engine.aclose()


class _Server(StillServer):
    def record_push(self, spans: Any) -> None:
        """Nothing is recorded."""


_REASONS = ("push whole tensors", "nothing was updated", "payload", "is damaged")


async def check_faults(
    pushes: DirectPushes,
    faults: Faults,
    held: Callable[[], Awaitable[Mapping[str, str]]],
    harmless: Sequence[str] = (),
) -> None:
    """Each fault is refused by the engine itself, and whole tensors follow.

    Args:
        held: the fingerprints that the engine reports.
        harmless: faults after which the engine has every bit.
    """

    async def check_held() -> None:
        found = await held()
        assert found == fingerprints(pushes.tensors, found)

    for number, fault in enumerate([*REFUSED, "repeated"]):
        version = 10 * number + 10
        pushes.holds, faults.fault, faults.num_done = None, "", 0
        assert await pushes.push(version) == ("full", None)
        await check_held()
        pushes.tensors = changed(pushes.tensors, 0.01)
        faults.fault = fault
        encoding, failure = await pushes.push(version + 1)
        assert (encoding, failure is None) == ("delta", fault in harmless), fault
        assert faults.num_done
        assert failure is None or any(text in str(failure) for text in _REASONS), failure
        if failure is None:
            await check_held()
