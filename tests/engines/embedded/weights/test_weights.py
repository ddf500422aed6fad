"""Weight updates: checked whole, applied in place, versioned, and refused out of order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engines.process.tcp_ports import reserve_port
from engines.tensors.collective.groups import join
from engines.tensors.fingerprint import way_of
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import PROMPT, Asker, payload

pytestmark = pytest.mark.embedded
TENSOR = "/update_weights_from_tensor"


async def test_pushed_weights_answer_as_the_new_model_under_the_new_version(
    engine: Asker, models: dict[str, Path]
) -> None:
    prompt = PROMPT * 4
    await engine.generate(prompt)  # leaves a prefix of the old weights in the cache
    await engine.post("/begin_weight_update")
    tensors = list(reference.state_dict(models["second"]).items())
    half = len(tensors) // 2
    first, second = (payload(dict(part)) for part in (tensors[:half], tensors[half:]))
    await engine.post(TENSOR, serialized_named_tensors=first, flush_cache=False)
    await engine.post(TENSOR, serialized_named_tensors=second, weight_version="1")
    await engine.post("/end_weight_update")
    reply = await engine.generate(prompt)
    assert reply["meta_info"]["cached_tokens"] == 0
    assert reply["meta_info"]["weight_version"] == "1"
    assert reply["output_ids"] == reference.greedy(models["second"], prompt)
    assert (await engine.get("/model_info"))["weight_version"] == "1"


async def test_a_push_outside_a_session_is_refused(engine: Asker, models: dict[str, Path]) -> None:
    tensors = payload(reference.state_dict(models["second"]))
    words = await engine.refused(400, TENSOR, serialized_named_tensors=tensors)
    assert "begin_weight_update" in words
    await engine.post("/begin_weight_update")
    assert "open already" in await engine.refused(409, "/begin_weight_update")
    await engine.post("/end_weight_update")
    assert "no weight update session" in await engine.refused(409, "/end_weight_update")


def wrong_name(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "model.layers.9.nonsense": tensors["model.norm.weight"]}


def wrong_shape(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"][:-1].clone()}


def wrong_dtype(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "model.norm.weight": tensors["model.norm.weight"].long()}


@pytest.mark.parametrize("spoil", [wrong_name, wrong_shape, wrong_dtype])
async def test_one_wrong_tensor_leaves_all_as_they_were(
    engine: Asker, models: dict[str, Path], spoil: Any
) -> None:
    before = (await engine.post("/weights_checker"))["ranks"]
    spoiled = spoil(reference.state_dict(models["second"]))
    (odd,) = (
        name for name in spoiled
        if name.endswith("nonsense") or (name == "model.norm.weight" and spoil is not wrong_name)
    )  # fmt: skip
    await engine.post("/begin_weight_update")
    body = {"serialized_named_tensors": payload(spoiled), "weight_version": "9"}
    assert odd in await engine.refused(400, TENSOR, **body)
    assert (await engine.post("/weights_checker"))["ranks"] == before
    assert (await engine.get("/model_info"))["weight_version"] == "0"


async def test_a_payload_that_would_run_code_is_refused(engine: Asker) -> None:
    await engine.post("/begin_weight_update")
    words = await engine.refused(400, TENSOR, serialized_named_tensors=payload({"x": Sneaky()}))
    assert "system" in words


class Sneaky:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("true",)


@pytest.mark.parametrize(
    "body", [{"serialized_named_tensors": []}, {}, {"serialized_named_tensors": ["%%"]}]
)
async def test_a_payload_that_is_none_is_refused(engine: Asker, body: dict[str, Any]) -> None:
    await engine.post("/begin_weight_update")
    assert await engine.refused(400, TENSOR, **body)


async def test_weights_come_from_disk_without_a_session(
    engine: Asker, models: dict[str, Path]
) -> None:
    for source in (models["second"], models["second"] / "model.safetensors"):
        path = str(source)
        await engine.post("/update_weights_from_disk", model_path=path, weight_version="2")
        assert (await engine.generate())["output_ids"] == reference.greedy(models["second"], PROMPT)
        first = str(models["first"])
        await engine.post("/update_weights_from_disk", model_path=first, weight_version="0")
        assert (await engine.generate())["output_ids"] == reference.greedy(models["first"], PROMPT)


async def test_a_checkpoint_of_another_shape_changes_nothing(
    engine: Asker, models: dict[str, Path], tmp_path: Path
) -> None:
    before = (await engine.post("/weights_checker"))["ranks"]
    path = "/update_weights_from_disk"
    assert "shape" in await engine.refused(400, path, model_path=str(models["other_shape"]))
    assert "no safetensors" in await engine.refused(400, path, model_path=str(tmp_path))
    assert (await engine.post("/weights_checker"))["ranks"] == before


async def test_an_update_waits_for_what_runs_and_holds_what_comes(
    engine: Asker, models: dict[str, Path]
) -> None:
    async with engine.in_flight(rid="runs") as stream:
        path = str(models["second"])
        update = asyncio.create_task(
            engine.post("/update_weights_from_disk", model_path=path, weight_version="3")
        )
        late = []
        while (await engine.get("/server_info"))["num_held_requests"] == 0:
            assert not update.done()
            # Those that arrive before the update are not held.
            late.append(asyncio.create_task(engine.generate()))
        await engine.post("/abort_request", rid="runs")
        assert (await stream.rest())["meta_info"]["weight_version"] == "0"
    await update
    versions = [reply["meta_info"]["weight_version"] for reply in await asyncio.gather(*late)]
    assert versions[-1] == "3"


async def test_an_update_that_flushes_under_frozen_requests_is_refused(
    engine: Asker, models: dict[str, Path]
) -> None:
    path = str(models["second"])
    async with engine.in_flight() as stream:
        await engine.post("/pause_generation", mode="in_place")
        body = {"model_path": path, "weight_version": "4"}
        words = await engine.refused(409, "/update_weights_from_disk", **body)
        assert "flush_cache false" in words
        await engine.post("/update_weights_from_disk", **body, flush_cache=False)
        await engine.post("/continue_generation")
        while stream.last["meta_info"]["weight_version"] != "4":
            assert await stream.next() is not None


async def test_a_trainer_broadcasts_weights_through_a_group(
    engine: Asker, models: dict[str, Path]
) -> None:
    import torch

    new = reference.state_dict(models["second"])
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port
    where = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    name = {"group_name": "push", "backend": "gloo"}
    asked = asyncio.create_task(
        engine.post("/init_weights_update_group", **where, **name, rank_offset=1)
    )
    group = await asyncio.to_thread(lambda: join(**where, **name, rank=0))
    await asked
    await engine.post("/begin_weight_update")
    asked = asyncio.create_task(
        engine.post(
            "/update_weights_from_distributed",
            names=list(new),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in new.values()],
            shapes=[list(tensor.shape) for tensor in new.values()],
            group_name="push",
            weight_version="5",
        )
    )

    def broadcast() -> None:
        for tensor in new.values():
            torch.distributed.broadcast(tensor, src=0, group=group)

    await asyncio.to_thread(broadcast)
    await asked
    await engine.post("/end_weight_update")
    await engine.post("/destroy_weights_update_group", group_name="push")
    torch.distributed.destroy_process_group(group)
    assert (await engine.generate())["output_ids"] == reference.greedy(models["second"], PROMPT)
    assert "push" in await engine.refused(400, "/destroy_weights_update_group", group_name="push")


async def test_the_manifest_lists_the_checkpoint_once_tied_or_not(
    backed: Asker, models: dict[str, Path]
) -> None:
    from safetensors import safe_open

    manifest = await backed.get("/weights_manifest")
    with safe_open(models["qwen"] / "model.safetensors", framework="pt") as checkpoint:
        expected = {name: checkpoint.get_slice(name).get_shape() for name in checkpoint.keys()}  # noqa: SIM118
    own = {entry["name"]: entry["shape"] for entry in manifest if not entry["is_tied"]}
    assert own == expected
    assert [entry["name"] for entry in manifest if entry["is_tied"]] == ["lm_head.weight"]
    assert {entry["dtype"] for entry in manifest} == {"float32"}


async def test_it_reports_the_method_of_its_fingerprints(engine: Asker) -> None:
    checksums = (await engine.post("/weights_checker"))["ranks"][0]["checksums"]
    assert (await engine.get("/server_info"))["fingerprints"] == way_of(checksums)


async def test_the_checker_sees_lost_weights(engine: Asker) -> None:
    assert "snapshot" in await engine.refused(400, "/weights_checker", action="compare")
    await engine.post("/weights_checker", action="snapshot")
    await engine.post("/weights_checker", action="compare")
    assert "no snapshot" in await engine.refused(400, "/weights_checker", action="compare")
    await engine.post("/weights_checker", action="snapshot")
    checksums = (await engine.post("/weights_checker"))["ranks"][0]["checksums"]
    await engine.post("/weights_checker", action="reset_tensors")
    assert "differ from" in await engine.refused(400, "/weights_checker", action="compare")
    assert (await engine.post("/weights_checker"))["ranks"][0]["checksums"] != checksums
    await engine.post("/update_weight_version", new_version="6")


async def test_a_version_can_be_set_by_itself(engine: Asker) -> None:
    async with engine.in_flight() as stream:
        body = {"new_version": "8", "abort_all_requests": False}
        await engine.post("/update_weight_version", **body)
        while stream.last["meta_info"]["weight_version"] != "8":
            assert await stream.next() is not None
        await engine.post("/update_weight_version", new_version="9")
        assert (await stream.rest())["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_checker_reports_how_many_bytes_it_read(
    engine: Asker, models: dict[str, Path]
) -> None:
    told = await engine.post("/weights_checker")
    tensors = reference.state_dict(models["first"]).values()
    assert told["num_bytes"] == sum(tensor.nbytes for tensor in tensors)
