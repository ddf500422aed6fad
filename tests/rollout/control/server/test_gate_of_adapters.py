"""The router gets the adapter that was pushed last, and the version of the base under it."""

from dataclasses import replace
from pathlib import Path

import pytest

from engines.protocol.errors import EngineRejected
from rollout.config import WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.adapter import AsAdapter
from tests.support.builders import ServerBench, push, started_server


def adapter(version: int) -> WeightPush:
    tensors = Manifest.of([TensorSpec("lora:policy:a", "float32", (2, 2))])
    route = AsAdapter("policy", {"r": 2, "lora_alpha": 4})
    return WeightPush(version, tensors, [b"adapter"], route, contents=WeightUpdate.LORA)


def base(version: int) -> WeightPush:
    return replace(push(version), contents=WeightUpdate.FULL)


def opened(bench: ServerBench) -> list[dict[str, object]]:
    return [gate for gate in bench.router.gates if gate["state"] == "open"]


def gate(version: int, name: str, base_version: int) -> dict[str, object]:
    weights = {"weight_version": version, "adapter": name, "base_version": base_version}
    return {"state": "open", **weights}


async def test_an_adapter_goes_over_the_base_until_a_base_is_pushed(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, update="lora")
    for one in (base(1), adapter(2), adapter(3), base(4)):
        await bench.server.serve_weights(one)
    assert opened(bench) == [
        gate(0, "", 0),
        gate(1, "", 1),
        gate(2, "policy", 1),
        gate(3, "policy", 1),
        gate(4, "", 4),
    ]


async def test_an_adapter_that_is_refused_is_not_the_one_that_serves(tmp_path: Path) -> None:
    bench = await started_server(tmp_path, {"main": {}}, update="lora")
    for engine in bench.engines:
        engine.fail_next("load_lora_adapter_from_tensors", EngineRejected("no", status=400))
    with pytest.raises(WeightMismatch):
        await bench.server.serve_weights(adapter(1))
    await bench.server.serve()
    assert opened(bench)[1:] == [gate(0, "", 0)]
