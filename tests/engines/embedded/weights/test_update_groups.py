"""Groups for broadcasts, from the engine's side: joined, kept, and left without a request."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines.tensors.collective.bucket import BroadcastRefused
from engines.tensors.collective.groups import UpdateGroups
from rollout.weights.routes.trainer_groups import BroadcastRoot
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import PROMPT, Asker, Server
from tests.support.forking.starts import STARTS
from tests.support.waits import until


@asynccontextmanager
async def joined(engine: Asker, name: str) -> AsyncIterator[BroadcastRoot]:
    """A group of this process and the engine."""
    root = BroadcastRoot(name, "gloo", join_timeout_s=20, send_timeout_s=20)
    terms = root.terms(1)
    where = {"group_name": name, "backend": "gloo", "rank_offset": 1, **terms}
    joining = asyncio.create_task(engine.post("/init_weights_update_group", **where))
    try:
        await asyncio.to_thread(root.join)
        await joining
        yield root
    finally:
        root.close()


async def groups(engine: Asker) -> list[str]:
    return list((await engine.get("/server_info"))["weights_update_groups"])


async def until_it_has_left(engine: Asker) -> None:
    async def has_left() -> bool:
        return not await groups(engine)

    await until(has_left)


def is_half_closed(process: psutil.Process) -> bool:
    return any(one.status == psutil.CONN_CLOSE_WAIT for one in process.net_connections())


def asked(tensors: dict[str, torch.Tensor], group: str) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
        "group_name": group,
        "load_format": "flattened_bucket",
        "weight_version": "1",  # by which it is seen that the weights must be put back
    }


async def broadcast(engine: Asker, root: BroadcastRoot, tensors: dict[str, torch.Tensor]) -> None:
    asking = asyncio.create_task(
        engine.post("/update_weights_from_distributed", **asked(tensors, root.name))
    )
    flat = torch.cat([one.reshape(-1).view(torch.uint8) for one in tensors.values()])
    await asyncio.to_thread(root.send, [flat])
    await asking


async def test_a_bucket_comes_as_one_tensor_through_a_group_that_outlives_the_push(
    engine: Asker, models: dict[str, Path]
) -> None:
    new = reference.state_dict(models["second"])
    async with joined(engine, "kept") as root:
        for factor in (2, 1):
            await engine.post("/begin_weight_update")
            await broadcast(engine, root, {name: one * factor for name, one in new.items()})
            await engine.post("/end_weight_update")
        assert await groups(engine) == ["kept"]
    assert (await engine.generate())["output_ids"] == reference.greedy(models["second"], PROMPT)


async def test_a_bucket_that_does_not_fit_leaves_the_group_as_it_was(
    engine: Asker, models: dict[str, Path]
) -> None:
    new = reference.state_dict(models["second"])
    name = next(iter(new))
    wrong = asked({"x": torch.zeros(1).half(), name: new[name]}, "goes on")
    async with joined(engine, "goes on") as root:
        await engine.post("/begin_weight_update")
        words = await engine.refused(400, "/update_weights_from_distributed", **wrong)
        assert f"{name!r} begins at byte 2" in words
        await broadcast(engine, root, new)
        await engine.post("/end_weight_update")
    assert (await engine.generate())["output_ids"] == reference.greedy(models["second"], PROMPT)


async def test_a_group_is_left_when_its_rank_0_is_gone(
    engine: Asker, servers: dict[str, Server]
) -> None:
    process = psutil.Process(servers["plain"].process.report.pid)
    async with joined(engine, "first"):  # which opens what torch never closes
        pass
    await until_it_has_left(engine)
    await until(lambda: not is_half_closed(process))
    before = process.num_fds()
    async with joined(engine, "abandoned"):
        assert await groups(engine) == ["abandoned"]
    await until_it_has_left(engine)
    words = await engine.refused(400, "/destroy_weights_update_group", group_name="abandoned")
    assert "no weight update group" in words
    await until(lambda: process.num_fds() <= before)  # sockets are closed a moment later


async def test_an_engine_that_receives_when_the_trainer_goes_is_freed(
    engine: Asker, models: dict[str, Path]
) -> None:
    new = reference.state_dict(models["second"])
    await engine.post("/begin_weight_update")
    async with joined(engine, "cut off") as root:
        asking = asyncio.create_task(
            engine.refused(400, "/update_weights_from_distributed", **asked(new, root.name))
        )
        await groups(engine)  # asked after it: it waits now, or will: it is freed either way
    async with asyncio.timeout(10):
        assert "cut off" in await asking
    await until_it_has_left(engine)
    await engine.post("/end_weight_update")


async def test_an_error_of_a_receive_keeps_no_connection_open() -> None:
    """By their end, ranks that wait for this one notice that it has left."""
    streams = {"stdin": True, "stdout": True}
    trainer = STARTS.start_module("tests.support.group_trainer", "kept", 0, 1, **streams)
    assert trainer.stdout is not None
    terms = json.loads(trainer.stdout.readline())
    groups = UpdateGroups(torch.device("cpu"))
    groups.join(group_name="kept", backend="gloo", rank=1, **terms)
    joined = groups._groups["kept"]
    group = weakref.ref(joined.group)
    receiving = asyncio.ensure_future(
        asyncio.to_thread(groups.receive, [torch.ones(1)], group_name="kept")
    )

    async def receives() -> bool:
        return joined.in_use.locked()

    await until(receives)
    trainer.kill()
    trainer.communicate()
    with pytest.raises(BroadcastRefused, match=r"kept.*failed.*it was left") as error:
        await receiving
    assert error.value

    async def is_closed() -> bool:
        return group() is None

    await until(is_closed)


async def test_a_group_that_is_left_is_not_left_again(engine: Asker) -> None:
    async with joined(engine, "told"):
        await engine.post("/destroy_weights_update_group", group_name="told")
        assert await groups(engine) == []
        async with joined(engine, "other"):
            assert await groups(engine) == ["other"]
    await until_it_has_left(engine)
