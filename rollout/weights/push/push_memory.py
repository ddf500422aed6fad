"""What a push takes, besides the weights that trainer and engines have: peaks, from sizes alone.

Measured on small models in ``tests/rollout/weights/push/test_push_memory.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engines.protocol.plain_text import size_text
from rollout.config import Transport, WeightsConfig, WeightUpdate
from rollout.weights.format.encoding import EncodingTerms
from rollout.weights.push.encodings import ENCODINGS
from rollout.weights.routes.route import BUCKETS_AHEAD
from rollout.weights.routes.shared_memory import stream_bytes


@dataclass(frozen=True, slots=True)
class PushSizes:
    """Bytes of a model.

    Attributes:
        largest_bytes: of the trainer's largest tensor, such as the stacked experts of a layer.
    """

    model_bytes: int
    largest_bytes: int

    def bucket_bytes(self, weights: WeightsConfig) -> int:
        """The most that is made together."""
        return min(self.model_bytes, max(weights.bucket_bytes, self.largest_bytes))


@dataclass(frozen=True, slots=True)
class PushMemory:
    """Peaks of one route.

    Attributes:
        is_streamed: a bucket is made while engines load the one before; else all are before.
        trainer_bytes: of each rank, on the device of its tensors; less if they are whole there.
        engine_bytes: of each rank of an engine, on its device.
        shared_memory_bytes: on each host, of files in ``weights.shared_memory_path``; with a store,
            on that of rank 0, and as much again while the store reads the push before.
        copies_bytes: of rank 0, in host memory: its copies of what engines hold, for an encoding.
        least_shared_bytes: with which it works.  Buckets of other sizes get files of their own,
            which stay for the next push while there is room.
    """

    route: str
    is_streamed: bool
    trainer_bytes: int
    engine_bytes: int
    shared_memory_bytes: int
    least_shared_bytes: int
    copies_bytes: int = 0


def push_memory(
    sizes: PushSizes, weights: WeightsConfig, *, ranks_per_host: int = 1
) -> Iterator[PushMemory]:
    """The peaks of each route that full pushes with these settings may take."""
    bucket = sizes.bucket_bytes(weights)
    wanted, kept = weights.transport, 0 if weights.store is None else sizes.model_bytes
    terms = EncodingTerms(weights.encoding, ranks_per_host)
    if wanted in (Transport.AUTO, Transport.CUDA_IPC):
        # The gathered bucket, and flat ones; a copy for the store keeps the bucket before.
        num_gathered = 1 if weights.store is None else 1 + BUCKETS_AHEAD
        on_gpu = (num_gathered + 1 + BUCKETS_AHEAD) * bucket
        yield PushMemory(Transport.CUDA_IPC, True, on_gpu, 0, kept, kept)
    if wanted in (Transport.AUTO, Transport.SHARED_MEMORY):
        whole = sizes.model_bytes
        streamed = kept or min(whole, stream_bytes(bucket, ranks_per_host))
        own = sizes.model_bytes if _is_read(Transport.SHARED_MEMORY, terms) else 0
        yield PushMemory(Transport.SHARED_MEMORY, True, bucket, 0, whole, streamed, own)
        yield PushMemory(Transport.SHARED_MEMORY, False, bucket, 0, whole, whole, own)
    if wanted in (Transport.AUTO, Transport.DISTRIBUTED):
        own = sizes.model_bytes if _is_read(Transport.DISTRIBUTED, terms) else 0
        yield PushMemory(Transport.DISTRIBUTED, True, 2 * bucket, bucket, kept, kept, own)
    route = Transport.DISK if wanted is Transport.DISK else Transport.BY_VALUE
    if wanted in (Transport.AUTO, route) and _is_read(route, terms):
        own = sizes.model_bytes
        yield PushMemory(route, route is Transport.BY_VALUE, bucket, 0, kept, kept, own)


def _is_read(route: Transport, terms: EncodingTerms) -> bool:
    """Whether an encoding may have a part in such a push, and keeps copies of it."""
    encodings = (make() for name, make in ENCODINGS.items() if terms.wants(name))
    return any(not isinstance(each.goes(route, None, terms), str) for each in encodings)


def push_memory_text(peaks: PushMemory) -> str:
    """One line of a plan."""
    how = "streamed" if peaks.is_streamed else "copied, as by window.push"
    parts = {
        "on each rank of the trainer": peaks.trainer_bytes,
        "on each GPU of an engine": peaks.engine_bytes,
        "in shared memory": peaks.shared_memory_bytes,
        "of copies on rank 0": peaks.copies_bytes,
    }
    text = ", ".join(f"{size_text(size)} {where}" for where, size in parts.items() if size)
    least = peaks.least_shared_bytes
    if least < peaks.shared_memory_bytes:
        text += f" ({size_text(least)} where there is no more)"
    return f"a push by {peaks.route}, {how}, takes {text}"


def why_too_small(sizes: PushSizes, weights: WeightsConfig, total_bytes: int) -> str:
    """Why no push fits into the folder of shared memory, whatever is in it.

    Args:
        total_bytes: of its file system.
    """
    takes_files = weights.transport in (Transport.AUTO, Transport.SHARED_MEMORY)
    if not takes_files or weights.update is not WeightUpdate.FULL:
        return ""
    of_files = [row for row in push_memory(sizes, weights) if row.route == Transport.SHARED_MEMORY]
    needed = min(row.least_shared_bytes for row in of_files)
    if needed <= total_bytes:
        return ""
    return (
        f"it has {size_text(total_bytes)} in all, and a push through it takes {size_text(needed)} "
        f"or more (a copied one {size_text(sizes.model_bytes)}): in Docker, give --shm-size="
        f"{-(-sizes.model_bytes >> 30) + 1}g; in Kubernetes, mount an emptyDir with medium Memory "
        "there; or set weights.shared_memory_path to another tmpfs"
    )
