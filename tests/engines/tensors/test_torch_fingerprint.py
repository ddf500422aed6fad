"""What each kind of fingerprint sees.  The table is what the library promises of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engines.tensors import torch_fingerprint
from engines.tensors.torch_fingerprint import (
    as_bytes,
    bytes_fingerprint,
    device_fingerprint,
    device_fingerprints,
    fingerprints,
)

pytestmark = pytest.mark.embedded

Fingerprint = Callable[[str, torch.Tensor], str]
KINDS = [bytes_fingerprint, device_fingerprint]
DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn, torch.bool]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few words, so that a small tensor goes through the sums, not through its bytes."""
    monkeypatch.setattr(torch_fingerprint, "ROW_WORDS", 16)
    monkeypatch.setattr(torch_fingerprint, "COLUMN_WORDS", 24)


def weights(rows: int = 96, columns: int = 67) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, columns, generator=generator).to(torch.bfloat16)


def flip_a_bit(tensor: torch.Tensor) -> None:
    as_bytes(tensor)[1234] ^= 1


def flip_the_last_bit(tensor: torch.Tensor) -> None:
    as_bytes(tensor)[-1] ^= 128


def zero_a_row(tensor: torch.Tensor) -> None:
    tensor[41] = 0


def swap_rows(tensor: torch.Tensor) -> None:
    tensor[[3, 77]] = tensor[[77, 3]]


def swap_neighbours(tensor: torch.Tensor) -> None:
    flat = tensor.view(-1)
    flat[[100, 101]] = flat[[101, 100]]


def swap_columns(tensor: torch.Tensor) -> None:
    tensor[:, [0, 64]] = tensor[:, [64, 0]]


def flip_the_sign(tensor: torch.Tensor) -> None:
    tensor.neg_()


def flip_one_sign(tensor: torch.Tensor) -> None:
    tensor[5, 5].neg_()


def tear(tensor: torch.Tensor) -> None:
    tensor[48:] = weights().flip(0)[48:]


def shift(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.view(-1).roll(4).view_as(tensor))


DAMAGE = [
    flip_a_bit,
    flip_the_last_bit,
    zero_a_row,
    swap_rows,
    swap_neighbours,
    swap_columns,
    flip_the_sign,
    flip_one_sign,
    tear,
    shift,
]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen(kind: Fingerprint, damage: Callable[[torch.Tensor], None]) -> None:
    whole, damaged = weights(), weights()
    damage(damaged)
    assert not torch.equal(as_bytes(whole), as_bytes(damaged)), "the damage changed nothing"
    assert kind("w", whole) != kind("w", damaged)
    assert kind("w", whole) == kind("w", weights())


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_swapped_their_contents_are_seen(kind: Fingerprint) -> None:
    one, two = weights(), weights().flip(0)
    assert {kind("a", one), kind("b", two)}.isdisjoint({kind("a", two), kind("b", one)})


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", KINDS)
def test_swapped_rows_of_equal_sum_are_seen(kind: Fingerprint) -> None:
    """One-hot rows: with rows and columns of one width, both sums stay as they were."""
    hot = torch.eye(64, dtype=torch.int64)[:, :16].contiguous()
    swapped = hot.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert torch.equal(hot.sum(0), swapped.sum(0))
    assert torch.equal(hot.sum(1), swapped.sum(1))
    assert kind("w", hot) != kind("w", swapped)


def test_at_its_real_width_it_sees_a_bit_of_a_large_tensor() -> None:
    large = torch.zeros(3, torch_fingerprint.COLUMN_WORDS + 5, dtype=torch.int64)
    before = device_fingerprint("w", large)
    for word in (0, torch_fingerprint.COLUMN_WORDS * 2, large.numel() - 1):
        large.view(-1)[word] = 1
        assert device_fingerprint("w", large) != before
        large.view(-1)[word] = 0
    assert device_fingerprint("w", large) == before


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (7,), (5, 13), (3, 5, 31), (1031,)])
def test_every_shape_and_dtype_has_one(
    kind: Fingerprint, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = torch.zeros(shape).to(dtype)
    before = kind("w", tensor)
    assert before == kind("w", tensor.clone())
    if tensor.numel():
        as_bytes(tensor)[-1] ^= 1
        assert kind("w", tensor) != before


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_of_the_contents_not_of_how_they_lie(kind: Fingerprint) -> None:
    plain = weights()
    inside = torch.cat([torch.zeros(3, dtype=plain.dtype), plain.view(-1)])[3:].view_as(plain)
    transposed = plain.t().contiguous().t()
    assert inside.data_ptr() % 8
    assert not transposed.is_contiguous()
    assert kind("w", plain) == kind("w", inside) == kind("w", transposed)


@given(content=st.binary(min_size=200, max_size=900), data=st.data())
@example(content=b"\0" * 208, data=None)
def test_any_change_of_one_stretch_is_seen_by_sums(content: bytes, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_fingerprint, "ROW_WORDS", 4)
        patch.setattr(torch_fingerprint, "COLUMN_WORDS", 6)
        changed = bytearray(content)
        if data is None:
            changed[0] = 1
        else:
            begin = data.draw(st.integers(0, len(content) - 1))
            new = data.draw(st.binary(min_size=1, max_size=min(32, len(content) - begin)))
            changed[begin : begin + len(new)] = new
        before, after = (
            device_fingerprint("w", torch.frombuffer(bytearray(one), dtype=torch.uint8))
            for one in (content, changed)
        )
        assert (before == after) == (content == bytes(changed))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 8 * 1000, 8 * 100_000 + 3])
def test_cpu_and_cuda_agree(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randn(size).to(dtype)
    for kind in KINDS:
        assert kind("w", tensor) == kind("w", tensor.cuda())


def test_many_megabytes_have_the_fingerprints_and_the_order_of_few() -> None:
    tensors = {f"t{index}": torch.randn(1 << 20) for index in range(13)}
    found = fingerprints(tensors)
    assert list(found) == list(tensors)
    assert found == {name: bytes_fingerprint(name, one) for name, one in tensors.items()}


def test_of_many_at_once_odd_ones_are_as_one_by_one() -> None:
    tensors = {
        "plain": torch.randn(300, 7),
        "turned": torch.randn(40, 30).t(),
        "parameter": torch.nn.Parameter(torch.randn(100).to(torch.bfloat16)),
        "every second": torch.arange(600)[::2],
        "part of another": torch.randn(1000)[7:901],
        "small": torch.tensor(7.0),
        "none": torch.zeros(0, 4),
    }
    found = fingerprints(tensors)
    assert list(found) == list(tensors)
    assert found == {name: bytes_fingerprint(name, one) for name, one in tensors.items()}


def test_all_sums_of_a_bucket_are_copied_to_the_host_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [(700, 900), (0,), (5,), (40_000,), (300, 1001)]
    bucket = [
        (f"{index} {dtype}", torch.randn(shape).to(dtype))
        for index, shape in enumerate(shapes)
        for dtype in DTYPES
    ]
    alone = {name: device_fingerprint(name, tensor) for name, tensor in bucket}
    copies: list[int] = []
    copy = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(tensor.nbytes)
        return copy(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    assert device_fingerprints(bucket) == alone
    assert len(copies) == 1
    monkeypatch.setattr(torch_fingerprint, "_MOST_TOGETHER", copies[0] // 4)
    copies.clear()
    assert device_fingerprints(bucket) == alone
    assert 2 <= len(copies) <= 5
