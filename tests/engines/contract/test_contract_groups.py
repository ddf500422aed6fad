"""Groups for broadcasts, on every kind of engine: made, kept, left, and what one brings.

The trainer's end is the library's own; a fake joins without one, for no numbers travel to it.
An update that fails ends the session of vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engines.protocol.errors import EngineRejected
from rollout.weights.routes.broadcast import leave_group
from tests.engines.conftest import KINDS, VLLM
from tests.support.contract import PROMPT, Bench
from tests.support.kinds import chaos_for, not_for

# That the embedded engine is on a logical GPU makes no difference here.
pytestmark = [pytest.mark.timeout(400), chaos_for("embedded-gpu")]

NOWHERE = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}


@pytest.fixture(params=[*KINDS, VLLM])
def kind(request: pytest.FixtureRequest) -> str:
    """One kind of engine after the other."""
    return str(request.param)


def is_vllm(bench: Bench) -> bool:
    return bench.kind == "vllm"


async def end_after_refusal(bench: Bench) -> None:
    if is_vllm(bench):
        with pytest.raises(EngineRejected, match=r"finish|active"):
            await bench.engine.end_weight_update()
        await bench.engine.continue_generation()
    else:
        await bench.engine.end_weight_update()


@asynccontextmanager
async def joined(bench: Bench, name: str) -> AsyncIterator[Any]:
    """The trainer's end of a group that the engine is in; None beside a fake."""
    where: dict[str, Any] = {"rank_offset": 1, "group_name": name, "backend": "gloo"}
    if bench.kind.startswith("fake"):
        await bench.engine.init_weights_update_group(**NOWHERE, **where)
        yield None
        return
    from rollout.weights.routes.trainer_groups import BroadcastRoot

    root = BroadcastRoot(name, "gloo", join_timeout_s=30, send_timeout_s=30)
    joining = asyncio.create_task(bench.engine.init_weights_update_group(**root.terms(1), **where))
    try:
        await asyncio.to_thread(root.join)
        await joining
        yield root
    finally:
        root.close()


def bucket(tensors: Mapping[str, Any], group: str) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtypes": [
            str(getattr(one, "dtype", "float32")).removeprefix("torch.") for one in tensors.values()
        ],
        "shapes": [list(one.shape) for one in tensors.values()],
        "group_name": group,
        "load_format": "flattened_bucket",
    }


async def update(bench: Bench, root: Any, group: str, version: str) -> None:
    """The second model's weights, as one tensor; what is narrower than the rest comes last."""
    tensors = bench.tensors("second")
    if root is not None:
        import torch

        name = next(name for name in tensors if name.endswith("norm.weight"))
        tensors[name] = tensors.pop(name).to(torch.bfloat16)  # of ones, so nothing is lost
        parts = [one.reshape(-1).view(torch.uint8) for one in tensors.values()]
    await bench.engine.begin_weight_update()
    asked = bench.engine.update_weights_from_distributed(
        **bucket(tensors, group), weight_version=version
    )
    asking = asyncio.create_task(asked)
    if root is not None:
        await asyncio.to_thread(root.send, [torch.cat(parts)])
    await asking
    await bench.engine.end_weight_update()


async def test_one_tensor_brings_many_through_a_group_that_outlives_the_push(bench: Bench) -> None:
    async with joined(bench, "kept") as root:
        for version in ("1", "2"):
            await update(bench, root, "kept", version)
        assert await bench.engine.weight_version() == "2"
        await bench.engine.destroy_weights_update_group("kept")
    if root is not None:
        from tests.engines.embedded import reference

        expected = reference.greedy(bench.models.second, list(PROMPT), max_new_tokens=8)
        assert list((await bench.greedy())[: len(expected)]) == expected


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes"),
    [
        ([], [], []),
        (["a", "lm_head.weight"], ["bfloat16", "float32"], [[1], [16, 8]]),
        (["lm_head.weight"], ["float32"], [[16, -8]]),
        (["lm_head.weight"], ["float33"], [[16, 8]]),
        (["lm_head.weight", "a"], ["float32"], [[16, 8]]),
    ],
    ids=["empty", "unaligned", "negative", "unknown", "lengths"],
)
async def test_a_bucket_that_cannot_be_is_refused_before_it_is_waited_for(
    bench: Bench, names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> None:
    """So neither side waits: the trainer's end does not exist."""
    async with joined(bench, "odd"):
        await bench.engine.begin_weight_update()
        with pytest.raises(EngineRejected) as refused:
            async with asyncio.timeout(20):
                await bench.engine.update_weights_from_distributed(
                    names=names,
                    dtypes=dtypes,
                    shapes=shapes,
                    group_name="odd",
                    load_format="flattened_bucket",
                )
        assert refused.value.status == 400
        await end_after_refusal(bench)
        await leave_group(bench.engine, "odd")


async def test_a_name_that_is_taken_is_refused_and_free_again_afterwards(bench: Bench) -> None:
    async with joined(bench, "name") as root:
        if root is None:
            where = NOWHERE
        else:
            from torch.distributed import TCPStore

            # Not the library's end: torch lets no process have two groups of one name.
            store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            where = {"master_address": "127.0.0.1", "master_port": store.port, "world_size": 2}
        with pytest.raises(EngineRejected) as refused:
            await bench.engine.init_weights_update_group(
                **where, rank_offset=1, group_name="name", backend="gloo"
            )
        assert refused.value.status == 400
        await update(bench, root, "name", "1")  # the group of that name goes on
        await bench.engine.destroy_weights_update_group("name")
    async with joined(bench, "name") as root:
        await update(bench, root, "name", "2")
        await leave_group(bench.engine, "name")


async def test_a_group_that_nobody_knows_is_refused(bench: Bench) -> None:
    with pytest.raises(EngineRejected) as refused:
        await bench.engine.destroy_weights_update_group("nobody's")
    assert refused.value.status == 400
    await leave_group(bench.engine, "nobody's")
    await bench.engine.begin_weight_update()
    with pytest.raises(EngineRejected) as refused:
        await bench.engine.update_weights_from_distributed(
            **bucket(bench.tensors("second"), "nobody's")
        )
    assert refused.value.status == 400
    await end_after_refusal(bench)


@not_for("fake", "fake-http")  # there is no rank 0 beside it
async def test_with_rank_0_gone_a_broadcast_fails_at_once_and_the_group_can_be_left(
    bench: Bench,
) -> None:
    async with joined(bench, "orphan"):
        pass
    await bench.engine.begin_weight_update()
    with pytest.raises(EngineRejected) as refused:
        async with asyncio.timeout(20):
            await bench.engine.update_weights_from_distributed(
                **bucket(bench.tensors("second"), "orphan")
            )
    assert refused.value.status == 400
    await end_after_refusal(bench)
    if bench.kind == "sglang":
        await bench.engine.destroy_weights_update_group("orphan")
    else:  # it has left by itself
        await leave_group(bench.engine, "orphan")
    async with joined(bench, "orphan") as root:
        await update(bench, root, "orphan", "1")
        await leave_group(bench.engine, "orphan")
