"""CUDA IPC handles on their way to vLLM's workers, with a double of CUDA."""

from __future__ import annotations

import base64
import inspect
import json
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions
from torch.nn.parameter import UninitializedParameter

from engines.vllm.update_info import update_info
from engines.vllm_plugin.kept_tensors import let_go
from engines.vllm_plugin.pushed_handles import tensors_behind
from rollout.weights.routes.cuda_ipc import ByHandles
from rollout.weights.tensors.payload import ExportSettings, Pairs, around_handle, ipc_handle
from tests.support import cuda_double
from tests.support.cuda_double import CudaDouble, some_pairs

pytestmark = pytest.mark.torch

REBUILD = reductions.rebuild_cuda_tensor  # torch's own
UUIDS = ["11111111-aaaa", "22222222-bbbb"]
GPUS = [torch.device("cuda", index) for index in range(2)]
SETTINGS = ExportSettings("", "")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble(UUIDS)
    double.install(monkeypatch.setattr)
    return double


def widest_last(seed: int) -> Pairs:
    return some_pairs(seed)[::-1]


def pushed(cuda: CudaDouble) -> dict[str, Any]:
    """What the workers get of a push of two ranks, whose tensors differ here."""
    handles = {}
    for index, uuid in enumerate(UUIDS):
        cuda.use(index)
        handle = ipc_handle(widest_last(index), GPUS[index], SETTINGS).handle
        handles[uuid] = base64.b64encode(handle).decode()
    head, tail = (base64.b64encode(part).decode() for part in around_handle(widest_last(0)))
    packed = ByHandles(tuple(UUIDS)).pack({"head": head, "tail": tail, "handles": handles})
    found: dict[str, Any] = json.loads(json.dumps(update_info([packed[uuid] for uuid in UUIDS])))
    return found


class Reduced:
    """Pickled as a call."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("index", [0, 1])
def test_each_worker_opens_the_handle_of_its_own_gpu(cuda: CudaDouble, index: int) -> None:
    info = pushed(cuda)
    assert info.keys() == {"layout", "handles"}
    assert list(info["handles"]) == UUIDS
    found = tensors_behind(info["layout"], info["handles"], GPUS[index])
    wanted = dict(widest_last(index))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype is wanted[name].dtype
        assert torch.equal(tensor, wanted[name])
    assert cuda_double.opened == [index]
    # All are views of the one memory that was opened.
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1


def test_what_torch_gets_to_open_is_what_the_trainers_torch_gave(
    cuda: CudaDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.use(1)
    flat = torch.arange(12, dtype=torch.uint8)
    _, given = reductions.reduce_tensor(flat)
    got: list[tuple[Any, ...]] = []

    def rebuild(*arguments: Any) -> torch.Tensor:
        got.append(arguments)
        return flat

    head, tail = around_handle([("a", flat)])
    made = head + ipc_handle([("a", flat)], GPUS[1], SETTINGS).handle + tail
    info = update_info([base64.b64encode(made).decode()])
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    tensors_behind(info["layout"], info["handles"], GPUS[1])
    names = list(inspect.signature(REBUILD).parameters)
    differing = {
        name for name, one, other in zip(names, got[0], given, strict=True) if one != other
    }
    # torch's typed storage of bytes is a cover of its untyped one, which the double names.
    assert differing == {"storage_cls"}


def test_a_worker_without_a_handle_of_its_own_gpu_names_both(cuda: CudaDouble) -> None:
    info = pushed(cuda)
    cuda.uuids = ["33333333-cccc", *UUIDS]
    with pytest.raises(ValueError, match=r"on GPU 33333333-cccc, .*of 11111111-aaaa, 22222222"):
        tensors_behind(info["layout"], info["handles"], GPUS[0])
    assert cuda_double.opened == []


def test_a_worker_on_a_cpu_opens_none(cuda: CudaDouble) -> None:
    info = pushed(cuda)
    with pytest.raises(ValueError, match=r"worker on cpu.*shared_memory, by_value or disk"):
        tensors_behind(info["layout"], info["handles"], torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"data_offsets": [0, 1 << 20]}, "'wide' ends at byte"),
        ({"data_offsets": [-4, 8576]}, "'wide' ends at byte"),
        ({"shape": [33, 64]}, "'wide' has 8580 bytes, float32 of shape"),
        ({"shape": [-33, -65]}, "'wide' has no dtype and shape"),
        ({"dtype": "object"}, "'wide' has an unknown dtype 'object'"),
        ({"data_offsets": [910, 9490]}, "overlaps"),
        ({"data_offsets": None}, "no pair of data_offsets"),
    ],
)
def test_a_wrong_layout_is_refused_before_anything_is_opened(
    cuda: CudaDouble, fields: Mapping[str, Any], why: str
) -> None:
    info = pushed(cuda)
    layout = {**info["layout"], "wide": {**info["layout"]["wide"], **fields}}
    with pytest.raises(ValueError, match=f"the pushed bucket.*{why}"):
        tensors_behind(layout, info["handles"], GPUS[0])
    assert cuda_double.opened == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"memory": "%"}, "damaged"),
        ({"event": None}, "damaged"),
        ({"num_bytes": -1}, "damaged"),
        ({"num_bytes": 8.0}, "damaged"),
        ({"num_bytes": 100}, "ends at byte"),
        ({"offset": True}, "damaged"),
        ({"waits": 1}, "damaged"),
    ],
)
def test_a_damaged_handle_is_refused_before_anything_is_opened(
    cuda: CudaDouble, fields: Mapping[str, Any], why: str
) -> None:
    info = pushed(cuda)
    handle = {**info["handles"][UUIDS[0]], **fields}
    with pytest.raises(ValueError, match=why):
        tensors_behind(info["layout"], {UUIDS[0]: handle}, GPUS[0])
    with pytest.raises(ValueError, match="damaged: KeyError"):
        tensors_behind(info["layout"], {UUIDS[0]: {}}, GPUS[0])
    with pytest.raises(ValueError, match="are JSON objects"):
        tensors_behind([], info["handles"], GPUS[0])
    assert cuda_double.opened == []


def test_a_payload_that_cannot_be_a_bucket_of_handles_is_not_sent(cuda: CudaDouble) -> None:
    cuda.use(0)
    head, tail = around_handle(widest_last(0))
    handle = ipc_handle(widest_last(0), GPUS[0], SETTINGS).handle
    whole = base64.b64encode(head + handle + tail).decode()
    other_head, other_tail = around_handle([("other", torch.ones(3))])
    other = base64.b64encode(other_head + handle + other_tail).decode()
    with pytest.raises(ValueError, match="of different buckets"):
        update_info([whole, other])
    by_number = reductions.reduce_tensor(torch.ones(3, dtype=torch.uint8))
    kind, _, strides, _, *rest = (*by_number[1][:6], UUIDS[0], *by_number[1][7:])
    for (function, arguments), why in [
        (by_number, "GPU 0, a number"),
        ((by_number[0], (kind, (2,), strides, 1, *rest)), "not of the bytes of a whole bucket"),
        ((by_number[0], (kind, (3,), strides, 4, *rest)), "smaller than its tensor"),
        ((by_number[0], by_number[1][:-1]), "missing 1 required"),
        ((exec, ("raise SystemExit",)), "names builtins.exec"),
    ]:
        pickled = pickle.dumps({"flattened_tensor": Reduced(function, arguments), "metadata": []})
        with pytest.raises(ValueError, match=why):
            update_info([base64.b64encode(pickled).decode()])


def test_only_what_shares_the_pushed_memory_is_copied() -> None:
    bucket = torch.zeros(64, dtype=torch.uint8)
    first, second = bucket[:32].view(torch.float32), bucket[32:].view(torch.bfloat16)
    parameter, own = torch.nn.Parameter(torch.ones(2, device="meta")), torch.ones(4)

    def loader(param: Any, loaded_weight: Any, *more: Any, shard: str = "q") -> None: ...

    kept = [
        inspect.signature(loader).bind(parameter, first.view(2, 4)[1:], own, shard="k"),
        inspect.signature(loader).bind(parameter, own, second[None], UninitializedParameter()),
    ]
    let_go(kept, [first, second])
    bucket.fill_(255)
    assert torch.equal(kept[0].arguments["loaded_weight"], torch.zeros(1, 4))
    assert torch.equal(kept[1].arguments["more"][0], torch.zeros(1, 16, dtype=torch.bfloat16))
    assert kept[0].args[0] is kept[1].args[0] is parameter
    assert kept[0].args[2] is kept[1].args[1] is own
    assert kept[0].kwargs == {"shard": "k"}
    assert isinstance(kept[1].args[3], UninitializedParameter)
