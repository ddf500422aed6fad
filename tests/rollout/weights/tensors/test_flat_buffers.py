"""Small tensors as one: their bytes, where they lie, and their fingerprints.  Needs torch."""

from __future__ import annotations

import pytest

from engines.tensors.dtypes import BROADCAST_TYPES, SAFETENSORS_WORDS
from engines.tensors.fingerprint import BYTES, SUMS
from engines.tensors.flattened_bucket import lay_out

torch = pytest.importorskip("torch")
from engines.tensors.torch_fingerprint import (  # noqa: E402
    as_bytes,
    bytes_fingerprint,
    device_fingerprint,
)
from rollout.weights.tensors.bucket_bytes import (  # noqa: E402  only where there is torch
    FlatLayoutCache,
    Flattener,
    is_flattened,
    split_bucket,
)
from rollout.weights.tensors.sources import Pairs  # noqa: E402

pytestmark = pytest.mark.embedded
CPU = torch.device("cpu")


def odd_pairs() -> Pairs:
    matrix = torch.randn(8, 6)
    tensors = {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "transposed": matrix.t(),
        "half": torch.randn(3).to(torch.bfloat16),
        "every second": torch.arange(20)[::2],
        "parameter": torch.nn.Parameter(torch.randn(2, 2).to(torch.bfloat16)),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3.5),
        "flags": torch.tensor([True, False, True]),
    }
    return Pairs.of(tensors.items())


@pytest.mark.parametrize("method", [BYTES, SUMS, ""])
def test_the_bytes_follow_one_another_wide_elements_first(method: str) -> None:
    pairs = odd_pairs()
    found = Flattener(FlatLayoutCache()).flatten(pairs, CPU, method=method)
    given = dict(pairs)
    names = found.description["names"]
    assert sorted(names) == sorted(given)
    assert found.description["shapes"] == [list(given[name].shape) for name in names]
    places = lay_out(names, found.description["dtypes"], found.description["shapes"])
    for name, (begin, end) in zip(names, places, strict=True):
        assert torch.equal(found.tensor[begin:end], as_bytes(given[name])), name
    assert found.tensor.numel() == places[-1][1]
    make = {BYTES: bytes_fingerprint, SUMS: device_fingerprint}.get(method)
    assert found.fingerprints == {name: make(name, one) for name, one in pairs if make}


def test_the_next_bucket_lies_where_the_one_before_did_until_there_is_rest() -> None:
    gatherer = Flattener(FlatLayoutCache())
    first = gatherer.flatten(Pairs.of([("a", torch.ones(100))]), CPU, method="")
    address = first.tensor.data_ptr()
    second = gatherer.flatten(Pairs.of([("b", torch.zeros(50))]), CPU, method="")
    assert second.tensor.data_ptr() == address
    assert not second.tensor.any()
    larger = gatherer.flatten(Pairs.of([("c", torch.ones(1 << 20))]), CPU, method="")
    assert larger.tensor.numel() == 4 << 20
    gatherer.free()
    assert torch.equal(larger.tensor.view(torch.float32), torch.ones(1 << 20))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_device_they_are_joined_there(device: str) -> None:
    gatherer, home = Flattener(FlatLayoutCache()), torch.device(device)
    tensors = [tensor.to(home) for tensor in odd_pairs().tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    first = gatherer._concatenate(tensors, size, home)
    assert torch.equal(first.cpu(), torch.cat([as_bytes(one).cpu() for one in tensors]))
    second = gatherer._concatenate(tensors[:2], tensors[0].nbytes + tensors[1].nbytes, home)
    assert second.data_ptr() == first.data_ptr()
    third = gatherer._concatenate(tensors, size, home)
    assert third.data_ptr() == first.data_ptr()
    assert third.numel() == size


def test_a_bucket_of_the_same_names_that_changed_is_laid_out_anew() -> None:
    layouts = FlatLayoutCache()
    for dtype in (torch.float32, torch.float16, torch.float32):
        pairs = [("a", torch.ones(3, dtype=torch.float16)), ("b", torch.ones(2, dtype=dtype))]
        found = Flattener(layouts).flatten(Pairs.of(pairs), CPU, method="")
        wide = dtype is torch.float32
        assert found.description["names"] == (["b", "a"] if wide else ["a", "b"])
        assert found.tensor.numel() == 6 + 2 * dtype.itemsize


def test_only_small_tensors_are_worth_a_copy() -> None:
    small, large = torch.empty(10), torch.empty(8 << 20, dtype=torch.uint8)
    assert is_flattened(Pairs.of([("a", small), ("b", small)]))
    assert not is_flattened(Pairs.of([("a", small)]))
    assert not is_flattened(Pairs.of([("a", large), ("b", large)]))
    assert is_flattened(Pairs.of([("a", large), *(("b", small),) * 9]))


@pytest.mark.parametrize("dtype", SAFETENSORS_WORDS)
def test_a_type_that_a_backend_refuses_is_sent_as_bytes(dtype: str) -> None:
    tensor = torch.zeros(4 << 20, dtype=getattr(torch, dtype))
    assert is_flattened(Pairs.of([("a", tensor)])) is (dtype not in BROADCAST_TYPES)


def test_no_more_is_gathered_at_once_than_the_hosts_memory_shall_hold() -> None:
    sizes = (60, 40, 1, 200, 0, 5)
    pairs = Pairs.of((str(size), torch.empty(size, dtype=torch.uint8)) for size in sizes)
    parts = [[int(name) for name, _ in part] for part in split_bucket(pairs, CPU, 100)]
    assert parts == [[60, 40], [1], [200], [0, 5]]
    assert split_bucket(pairs, torch.device("cuda"), 100) == [pairs]
