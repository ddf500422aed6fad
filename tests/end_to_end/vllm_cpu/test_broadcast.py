"""Pushes to real vLLM by broadcast over gloo, from one process and from a trainer of two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.vllm.client import VllmClient
from rollout.core.errors import RolloutError
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.weights.routes.trainer_groups import BroadcastRoot
from rollout.weights.tensors import bytes_fingerprint
from tests.engines.embedded import reference
from tests.support.contract import GREEDY, PROMPT
from tests.support.engine_keys import client_of
from tests.support.rank_processes import Ranks, drawn
from tests.support.real_policy import DEADLINES, RealPolicy
from tests.support.waits import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
def handle(policy: RealPolicy) -> ServerHandle:
    """The same server, pushed to by broadcast, in buckets so small that layers are split."""
    config = policy.handle._config
    settings = {"transport": "distributed", "bucket_bytes": 20_000, "group_timeout_s": 20}
    changed = config.weights.model_validate({**config.weights.model_dump(), **settings})
    caller = policy.handle._caller
    return ServerHandle("policy", config.model_copy(update={"weights": changed}), caller)


@asynccontextmanager
async def client(engine: EngineStatus) -> AsyncIterator[VllmClient]:
    made = client_of(engine, VllmClient, deadlines=DEADLINES)
    try:
        yield made
    finally:
        await made.aclose()


async def groups_of(policy: RealPolicy) -> list[frozenset[str] | None]:
    """Those that each engine is in."""
    found = []
    for engine in policy.engines():
        async with client(engine) as one:
            found.append((await one.server_info()).update_groups)
    return found


async def until_all_have_left(policy: RealPolicy) -> None:
    async def have_left() -> bool:
        return not any(await groups_of(policy))

    await until(have_left)


async def served(policy: RealPolicy) -> list[list[int]]:
    """The greedy ids of each engine."""
    found = []
    for engine in policy.engines():
        async with client(engine) as one:
            reply = await one.generate(input_ids=PROMPT, sampling_params=GREEDY)
            found.append(list(reply.output_ids))
    return found


async def check_held(policy: RealPolicy, wanted: dict[str, str]) -> None:
    for engine in policy.engines():
        async with client(engine) as one:
            [found] = (await one.weights_checker()).tensors
            assert found == {name: wanted[name] for name in found}


def fingerprints(tensors: Any) -> dict[str, str]:
    return {name: bytes_fingerprint(name, one) for name, one in tensors.items()}


async def test_a_trainer_broadcasts_to_two_engines_through_a_group_that_is_kept(
    policy: RealPolicy, handle: ServerHandle
) -> None:
    answers = [await served(policy)]
    groups = []
    for _ in range(2):
        new = policy.next_tensors()
        version = (await handle.push(new)).weight_version
        await check_held(policy, fingerprints(new))
        found = await served(policy)
        wanted = reference.greedy(policy.weights_of(version), list(PROMPT), max_new_tokens=8)
        assert found == [wanted, wanted]
        assert {one.weight_version for one in policy.engines()} == {version}
        answers.append(found)
        groups.append(await groups_of(policy))
    assert answers[0] != answers[1] != answers[2]
    assert groups[0] == groups[1] == [groups[0][0]] * 2
    assert len(groups[0][0] or ()) == 1
    handle.close()
    await until_all_have_left(policy)


async def test_a_trainer_that_leaves_in_a_push_fails_it_and_the_next_one_works(
    policy: RealPolicy, handle: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, num_sent = BroadcastRoot.send, 0

    def leaves(root: BroadcastRoot, tensors: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == 3:
            root.close()
            raise RuntimeError("the trainer is gone")
        send(root, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(BroadcastRoot, "send", leaves)
        with pytest.raises(RolloutError) as failed:
            await handle.push(policy.next_tensors())
    assert "the trainer is gone" in str(failed.value)
    assert await groups_of(policy) == [frozenset(), frozenset()]
    new = policy.next_tensors()
    await handle.push(new)
    await check_held(policy, fingerprints(new))
    assert policy.is_whole()
    handle.close()


async def test_the_ranks_of_a_trainer_broadcast_to_engines_on_other_hosts(
    policy: RealPolicy, handle: ServerHandle, tmp_path: Path
) -> None:
    """The ranks are on two hosts as far as they know: rank 0 sends for both."""
    server = SimpleNamespace(model_path=policy.models[0])
    config = SimpleNamespace(log_dir=policy.log_dir, run_id="run", servers={"policy": server})
    ranks = Ranks(SimpleNamespace(config=config), tmp_path, 2)
    try:
        where = {"far": "all", "own_host": "127.0.0.2", "hosts": [0, 1]}
        found = await asyncio.to_thread(ranks.do, "push_far", seed=70, **where)
        version = policy.handle.weight_version
        assert [one.get("version") for one in found] == [version] * 2, found
        assert found[0]["ways"] == {"all": "ByBroadcast"}
        await check_held(policy, drawn(policy.models[0], 70))
        assert [len(names or ()) for names in await groups_of(policy)] == [1, 1]
    finally:
        ranks.end()
    # What the other tests of this package hold the answers against.
    new = policy.next_tensors()
    await handle.push(new)
    await check_held(policy, fingerprints(new))
    handle.close()
