"""Buffers that are read after a push: by the store, or by engines that load all at once."""

from pathlib import Path

from rollout.weights.routes.buffers import (
    FILE_NAME,
    PushBuffers,
    ShmBuffer,
    ShmBufferPool,
    StoreCopies,
)


def test_held_buffers_are_taken_again_only_after_their_release(tmp_path: Path) -> None:
    pool = ShmBufferPool(tmp_path)
    held = PushBuffers(pool)
    first = held.take(5000)
    held.give(first)
    assert pool.take(5000) is not first
    held.release()
    assert pool.take(5000) is first
    pool.close()


def test_the_folders_of_other_ranks_are_joined_until_the_release(tmp_path: Path) -> None:
    own, other = ShmBufferPool(tmp_path), ShmBufferPool(tmp_path)
    held = PushBuffers(own)
    folders = [held.take(5000).folder, other.take(5000).folder]
    joined = held.joined(folders)
    links = sorted(joined.glob("*.safetensors"))
    assert [link.resolve() for link in links] == [folder / FILE_NAME for folder in folders]
    held.release()
    assert not joined.exists()
    assert all(folder.exists() for folder in folders)
    own.close()
    other.close()


def pushed(copies: StoreCopies, pool: ShmBufferPool, version: int, reads: int | None) -> ShmBuffer:
    """A push of one bucket; returns its buffer."""
    copies.free(reads)
    held = PushBuffers(pool)
    buffer = held.take(1000)
    copies.add(version, held)
    return buffer


def test_copies_take_the_memory_of_one_push_while_the_store_is_idle(tmp_path: Path) -> None:
    pool, copies = ShmBufferPool(tmp_path), StoreCopies()
    for version in range(5):
        pushed(copies, pool, version, None)
        assert pool.num_bytes() == 1000
    pool.close()


def test_what_the_store_reads_is_not_written_and_two_pushes_are_held_at_most(
    tmp_path: Path,
) -> None:
    pool, copies = ShmBufferPool(tmp_path), StoreCopies()
    read = pushed(copies, pool, 1, None)
    for version in range(2, 6):  # the store is slower than all of these
        assert pushed(copies, pool, version, 1) is not read
        assert pool.num_bytes() == 2000
    pushed(copies, pool, 6, None)
    assert pool.num_bytes() == 2000
    pool.close()
