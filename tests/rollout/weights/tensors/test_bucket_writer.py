"""A bucket in a slot: the bytes, and the fingerprints of those bytes.  Needs torch."""

from pathlib import Path

import pytest

from engines.tensors import bulk_copy
from engines.tensors.fingerprint import BYTES
from rollout.core.errors import WeightMismatch
from rollout.weights.routes.buffers import FILE_NAME, ShmBufferPool

torch = pytest.importorskip("torch")
from engines.tensors.torch_fingerprint import bytes_fingerprint  # noqa: E402
from rollout.weights.routes.shared_memory import write_buffer  # noqa: E402
from rollout.weights.tensors.sources import Pairs  # noqa: E402

pytestmark = pytest.mark.embedded


@pytest.fixture(params=["compiled", "python"], autouse=True)
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What copies and hashes."""
    if request.param == "python":
        monkeypatch.setattr(bulk_copy, "_library", None)
    elif not bulk_copy.is_compiled():
        pytest.skip("not compiled, or not for this processor")


@pytest.fixture
def pool(tmp_path: Path) -> ShmBufferPool:
    return ShmBufferPool(tmp_path)


def odd_tensors() -> dict[str, torch.Tensor]:
    matrix = torch.randn(8, 6)
    return {
        "whole": torch.randn(3, 5),
        "part of another": torch.randn(100)[7:9],
        "transposed": matrix.t(),
        "every second": torch.arange(20)[::2],
        "parameter": torch.nn.Parameter(torch.randn(2, 2).to(torch.bfloat16)),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "one number": torch.tensor(7.0),
        "none": torch.zeros(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "a piece": torch.randn(bulk_copy.PIECE_BYTES // 4),
        "more than two pieces": torch.randint(
            0, 255, (2 * bulk_copy.PIECE_BYTES + 1,), dtype=torch.uint8
        ),
    }


def read(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return dict(load_file(folder / FILE_NAME))


def test_any_tensor_is_in_the_file_with_the_fingerprint_of_its_bytes(pool: ShmBufferPool) -> None:
    tensors = odd_tensors()
    slot, found = write_buffer(Pairs.of(tensors.items()), pool, method=BYTES)
    held = read(slot.folder)
    assert held.keys() == found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(held[name], tensor)
        assert found[name] == bytes_fingerprint(name, tensor)
    pool.close()


def test_without_fingerprints_the_bytes_are_the_same(pool: ShmBufferPool) -> None:
    tensors = odd_tensors()
    slot, found = write_buffer(Pairs.of(tensors.items()), pool, method="")
    assert found == {}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read(slot.folder).items())
    pool.close()


def test_many_megabytes_are_copied_by_several_threads_and_still_right(pool: ShmBufferPool) -> None:
    tensors = {f"t{index}": torch.randn(1 << 20) for index in range(14)}
    slot, found = write_buffer(Pairs.of(tensors.items()), pool, method=BYTES)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read(slot.folder).items())
    assert found == {name: bytes_fingerprint(name, one) for name, one in tensors.items()}
    pool.close()


@pytest.mark.parametrize("method", [BYTES, ""])
def test_a_value_that_is_no_number_is_named_where_copies_are_checked(
    pool: ShmBufferPool, method: str
) -> None:
    """Rank 0 decides that they are, and another host may have no compiled code."""
    tensors = {f"t{index}": torch.randn(1 << 20) for index in range(14)}
    tensors |= {"ids": torch.arange(9), "view": torch.ones(4, 6)[:, ::2]}
    pairs = Pairs.of(tensors.items())
    slot, found = write_buffer(pairs, pool, method=method, model={})
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read(slot.folder).items())
    assert found.keys() == (tensors.keys() if method else set())
    for name, place in (("t5", (12_345,)), ("view", (3, 2))):
        tensors[name][place] = torch.inf
        with pytest.raises(WeightMismatch, match=rf"^1 of \d+ values of tensor '{name}'"):
            write_buffer(pairs, pool, method=method, model={})
        tensors[name][place] = 1.0
    pool.close()


def test_many_small_tensors_keep_their_names(pool: ShmBufferPool) -> None:
    # The wide ones lie first in the file, whatever the order in which they come.
    tensors = {
        f"t{index}": torch.randint(0, 99, (1 << 16,)).to((torch.uint8, torch.float64)[index % 2])
        for index in range(80)
    }
    slot, found = write_buffer(Pairs.of(tensors.items()), pool, method=BYTES)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read(slot.folder).items())
    assert found == {name: bytes_fingerprint(name, one) for name, one in tensors.items()}
    pool.close()


def test_a_header_that_another_process_damaged_is_written_again(pool: ShmBufferPool) -> None:
    pairs = Pairs.of([("a", torch.ones(4))])
    first, _ = write_buffer(pairs, pool, method="")
    first.view[:20] = b"?" * 20
    pool.give(first)
    second, _ = write_buffer(pairs, pool, method="")
    assert second is first
    assert read(second.folder)["a"].tolist() == [1.0] * 4
    pool.close()


def test_a_slot_that_is_written_again_holds_the_new_bucket(pool: ShmBufferPool) -> None:
    first, _ = write_buffer(
        Pairs.of([("a", torch.zeros(4)), ("b", torch.zeros(4))]), pool, method=BYTES
    )
    pool.give(first)
    new = [("c", torch.ones(4)), ("d", torch.ones(4))]
    second, _ = write_buffer(Pairs.of(new), pool, method=BYTES)
    assert second is first
    assert {name: one.tolist() for name, one in read(second.folder).items()} == {
        "c": [1.0] * 4,
        "d": [1.0] * 4,
    }
    pool.close()
