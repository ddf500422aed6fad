"""Payloads: tensors come through unchanged, everything else is refused."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest
from engines.embedded.core.errors import Invalid

pytestmark = pytest.mark.embedded


def encoded(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def read(value: Any, load_format: str | None = None) -> dict[str, Any]:
    from engines.embedded.weights.restricted_unpickler import read_payload

    payload = value if isinstance(value, str) else encoded(value)
    return dict(read_payload(payload, load_format))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
def test_a_tensor_of_any_dtype_comes_through(dtype: str) -> None:
    import torch

    tensor = torch.arange(6).view(2, 3).to(getattr(torch, dtype))
    assert torch.equal(read([("a", tensor), ("b", torch.nn.Parameter(torch.ones(2)))])["a"], tensor)


def test_an_array_comes_through() -> None:
    import numpy
    import torch

    got = read([("a", numpy.arange(4, dtype=numpy.float32))])["a"]
    assert torch.equal(got, torch.arange(4, dtype=torch.float32))


def test_a_flattened_bucket_is_split() -> None:
    import torch
    from engines.embedded.weights.restricted_unpickler import _split_bucket
    from engines.tensors.weight_payload import BucketEntry

    first, second = torch.randn(2, 2), torch.randn(3).to(torch.bfloat16)
    flat = torch.cat([first.view(-1).view(torch.uint8), second.view(torch.uint8)])
    entries = [
        BucketEntry("a", (2, 2), torch.float32, 0, 16, 16),
        BucketEntry("b", (3,), torch.bfloat16, 16, 22, 6),
    ]
    got = dict(_split_bucket({"flattened_tensor": flat, "metadata": entries}))
    assert torch.equal(got["a"], first)
    assert torch.equal(got["b"], second)


class Gadget:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def gadgets() -> list[Any]:
    import os

    import torch

    inner = pickle.dumps(Gadget(os.system, "true"))
    return [
        Gadget(os.system, "true"),
        Gadget(eval, "1"),
        Gadget(getattr, "text", "upper"),
        Gadget(torch.load, "file"),
        Gadget(torch.storage._load_from_bytes, inner),
    ]


@pytest.mark.parametrize("index", range(5))
def test_a_payload_that_calls_something_is_refused(index: int) -> None:
    with pytest.raises(Invalid):
        read([("a", gadgets()[index])])


@pytest.mark.parametrize("value", ["not base64!", "AAAA", 5, [1], [("a", "text")], [(1, 2)]])
def test_what_is_no_list_of_tensors_is_refused(value: Any) -> None:
    with pytest.raises(Invalid):
        read(value)


def test_what_a_cuda_tensor_of_another_process_names_is_read_on_a_gpu_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from torch.multiprocessing import reductions

    # reduce_tensor hands these to pickle for a tensor on a GPU, besides bytes and numbers.
    named = [reductions.rebuild_cuda_tensor, torch.Tensor, torch.storage.TypedStorage, torch.Size]
    for kind in named:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(Invalid, match="a is neither a tensor nor an array"):
            read([("a", kind)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Invalid, match="TypedStorage"):
        read([("a", torch.storage.TypedStorage)])
