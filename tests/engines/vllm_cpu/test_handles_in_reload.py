"""CUDA IPC handles in vLLM's own reload of layers, in vLLM's own Python; CUDA is a double."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.vllm.update_info import update_info
from rollout.weights.tensors.payload import ExportSettings, around_handle, ipc_handle
from tests.support.cuda_double import CudaDouble
from tools.cpu_engines import install

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
UUIDS = ["11111111-aaaa", "22222222-bbbb"]
OLD = torch.full((8, 4), 0.5).tolist()
Q, K, V = (f"attention.{part}_proj.weight" for part in "qkv")


def bucket(*pairs: tuple[str, torch.Tensor]) -> dict[str, Any]:
    """As the trainer's rank on the second GPU sends it."""
    head, tail = around_handle(pairs)
    settings = ExportSettings("", "")
    made = head + ipc_handle(pairs, torch.device("cuda", 1), settings).handle + tail
    return update_info([base64.b64encode(made).decode()])


def pushed(*buckets: dict[str, Any], breaks_at: str = "") -> dict[str, Any]:
    """To a worker on the second GPU."""
    return {"index": 1, "buckets": buckets, "breaks_at": breaks_at}


def new(name: str) -> tuple[str, torch.Tensor]:
    rows = {Q: 4, K: 2, V: 2}[name]
    return name, torch.arange(rows * 4.0).reshape(rows, 4) + ord(name[10])


def pushes() -> dict[str, Any]:
    wrong = bucket(new(Q), new(K), new(V))
    wrong["layout"][V]["data_offsets"] = [96, 132]
    return {
        "half a layer each": pushed(bucket(new(Q), new(K)), bucket(new(V))),
        "breaks": pushed(bucket(new(Q)), bucket(new(K), new(V)), breaks_at=V),
        "wrong shape": pushed(bucket(new(Q), new(K), (V, torch.ones(2, 5)))),
        "wrong layout": pushed(wrong),
        "half": pushed(bucket(new(Q), new(K))),
        "with path": pushed({**bucket(new(Q)), "path": "x"}),
        "with content": pushed({**bucket(new(Q)), "content": "x"}),
        "without layout": pushed({**bucket(new(Q)), "layout": {}}),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What ``tests/support/vllm_reload.py`` reports of each push."""
    with pytest.MonkeyPatch.context() as patch:
        double = CudaDouble(UUIDS)
        double.install(patch.setattr)
        double.use(1)
        given = json.dumps({"uuids": UUIDS, "pushes": pushes()})
    done = subprocess.run(
        [str(install.python_of("vllm")), "-m", "tests.support.vllm_reload"],
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **install.variables_of("vllm")},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return reported


def test_a_layer_over_two_buckets_is_right_though_the_trainer_takes_its_memory_back(
    found: dict[str, Any],
) -> None:
    one = found["half a layer each"]
    assert one["error"] == ""
    assert one["weight"] == torch.cat([new(name)[1] for name in (Q, K, V)]).tolist()
    # It waits for the device while the memory is open, and then closes it.
    assert one["open_at_waits"] == [True, True]
    assert one["open_after"] == [False, False]


def test_a_bucket_that_fails_leaves_the_old_layer_and_no_reference(found: dict[str, Any]) -> None:
    one = found["breaks"]
    assert one["error"] == f"{V} breaks"
    assert one["weight"] == OLD
    assert one["open_at_waits"] == [True, True]
    assert one["open_after"] == [False, False]


def test_a_bucket_is_checked_whole_before_anything_is_loaded(found: dict[str, Any]) -> None:
    one = found["wrong shape"]
    assert one["error"] == f"tensor {V!r} has shape [2, 5]; the model takes [2, 4]"
    assert one["weight"] == OLD
    assert one["open_after"] == [False]
    one = found["wrong layout"]
    assert f"tensor {V!r} ends at byte 132" in one["error"]
    assert one["open_after"] == []


def test_half_a_layer_is_refused_at_the_end(found: dict[str, Any]) -> None:
    assert f"a part of a layer was not pushed: {V}" in found["half"]["error"]
    assert found["half"]["weight"] == OLD


@pytest.mark.parametrize("push", ["with path", "with content", "without layout"])
def test_an_update_is_of_one_kind(found: dict[str, Any], push: str) -> None:
    assert found[push]["error"].startswith("update_info needs either path or content, or handles")
