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
    from engines.embedded.weights.payload_tensors import read_payload

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
    from rollout.weights.tensors.payload import flattened_bucket

    first, second = torch.randn(2, 2), torch.randn(3).to(torch.bfloat16)
    bucket = flattened_bucket([("a", first), ("b", second)])
    got = read(base64.b64encode(bucket).decode(), "flattened_bucket")
    assert torch.equal(got["a"], first)
    assert torch.equal(got["b"], second)


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_every_form_of_a_tensor_comes_through(protocol: int) -> None:
    import numpy
    import torch

    whole = torch.arange(24.0).view(4, 6)
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)
    sent = {
        "transposed": whole.t(),
        "every second": whole[1:, ::2],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "bytes": torch.tensor([True, False]),
        "tied": whole,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "columns": numpy.asfortranarray(array),
        "rows": array,
        "one": numpy.array(1, dtype=numpy.uint8),
    }
    got = read(base64.b64encode(pickle.dumps({**sent, "again": whole}, protocol)).decode())
    for name, value in sent.items():
        assert torch.equal(got[name], torch.as_tensor(value)), name
        assert got[name].dtype == torch.as_tensor(value).dtype
    assert got["again"].data_ptr() == got["tied"].data_ptr()


def test_what_is_read_does_not_lie_in_the_payload_where_it_may_begin_anywhere() -> None:
    import torch

    for length in range(8):
        got = read([("a" * length, torch.ones(5)), ("b", torch.ones(3, dtype=torch.float64))])
        assert all(one.data_ptr() % one.element_size() == 0 for one in got.values())


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
