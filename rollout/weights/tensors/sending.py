"""From a trainer's tensors to a push on its way: one function per transport.

Always true: what does not fit the model is refused before anything is copied or sent; whatever a
push holds (slots, threads, sockets, a group) is let go by ``Outgoing.close``, in any state.

A push is *copied* (whole when the function returns: the trainer may change its tensors) or
*streamed* (made bucket by bucket while engines take it: they must not change until it has ended).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rollout.config import Transport, WeightsConfig, WeightUpdate
from rollout.errors import ConfigError
from rollout.weights.feeding import Bucket, Feed
from rollout.weights.manifest import Manifest
from rollout.weights.push import WeightPush
from rollout.weights.slots import Slot, SlotPool
from rollout.weights.tensors.broadcasting import Broadcast, KeptGroup
from rollout.weights.tensors.payload import flattened_bucket, ipc_bucket
from rollout.weights.tensors.sources import Weights
from rollout.weights.tensors.writing import (
    CheckpointWriter,
    fingerprints_of,
    write_slot,
)
from rollout.weights.transports.by_broadcast import ByBroadcast
from rollout.weights.transports.by_path import ByPath
from rollout.weights.transports.by_value import MOST_BUCKET_BYTES, ByValue

Pairs = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A push under way, with what it holds in this process.

    Attributes:
        close: lets go of that; called when the push has ended, whatever came of it.
    """

    push: WeightPush
    close: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True, slots=True)
class Sender:
    """How one server's pushes leave this process.

    Attributes:
        host: address of this machine that the server's groups can reach.
        pool: slots in tmpfs, if there is a tmpfs.
        timeout_s: for a bucket, engines' work included.
        model_path: checkpoint the engines started from.
        kept: where broadcasts leave their group for the next; None makes one for each push.
    """

    settings: WeightsConfig
    pool: SlotPool
    host: str = "127.0.0.1"
    timeout_s: float = 600.0
    model_path: str = ""
    kept: KeptGroup | None = None

    def send(
        self,
        weights: Weights,
        version: int,
        transport: Transport,
        contents: WeightUpdate | None = None,
        *,
        may_stream: bool = True,
    ) -> Outgoing:
        """A push of these weights by ``transport``.

        Args:
            may_stream: whether the tensors stay as they are until the push has ended.

        Raises:
            ConfigError: the transport can only stream, and may not.
            WeightsUnavailable: there is no room.
        """
        only_streams = transport in (Transport.DISTRIBUTED, Transport.CUDA_IPC)
        if only_streams and not may_stream:
            raise ConfigError(
                f"weights.transport = {transport}: it reads the tensors while engines take them, "
                "so push with onload(tensors) or sync_weights(tensors), not with a window's push",
                setting="weights.transport",
                value=transport.value,
            )
        streams = only_streams or (may_stream and self.settings.stream)
        if transport is Transport.DISK:
            return self._to_disk(weights, version, contents)
        if not streams:
            return self._copied(weights, version, transport, contents)
        if transport is Transport.DISTRIBUTED:
            return self._broadcast(weights, version, contents)
        make = {
            Transport.SHARED_MEMORY: self._slots,
            Transport.TENSOR: self._values,
            Transport.CUDA_IPC: self._handles,
        }[transport]
        feed = Feed(make(weights), host=self.host, timeout_s=self.timeout_s)
        carrier = (
            ByPath()
            if transport is Transport.SHARED_MEMORY
            else ByValue(load_format="flattened_bucket")
        )
        push = WeightPush(
            version, weights.manifest, carrier=carrier, feed=feed.address, contents=contents
        )
        return Outgoing(push, feed.close)

    # -- copied -----------------------------------------------------------------------------

    def _copied(
        self,
        weights: Weights,
        version: int,
        transport: Transport,
        contents: WeightUpdate | None,
    ) -> Outgoing:
        if transport is Transport.SHARED_MEMORY:
            return self._copied_to_slots(weights, version, contents)
        fingerprints: dict[str, str] = {}
        buckets = []
        for pairs, _ in weights.gathered(MOST_BUCKET_BYTES):
            buckets.append(flattened_bucket(pairs))
            fingerprints |= self._fingerprints(pairs)
            del pairs
        push = WeightPush(
            version,
            Manifest(weights.manifest.tensors, fingerprints),
            buckets,
            ByValue(load_format="flattened_bucket"),
            contents=contents,
        )
        return Outgoing(push)

    def _copied_to_slots(
        self, weights: Weights, version: int, contents: WeightUpdate | None
    ) -> Outgoing:
        slots: list[Slot] = []

        def close() -> None:
            for slot in slots:
                self.pool.give(slot)

        fingerprints: dict[str, str] = {}
        try:
            for pairs, _ in weights.gathered():
                slot, found = write_slot(pairs, self.pool, fingerprint=self.settings.fingerprint)
                slots.append(slot)
                fingerprints |= found
                del pairs
        except BaseException:
            close()
            raise
        push = WeightPush(
            version,
            Manifest(weights.manifest.tensors, fingerprints),
            [{"path": str(slot.folder)} for slot in slots],
            ByPath(),
            contents=contents,
        )
        return Outgoing(push, close)

    def _to_disk(self, weights: Weights, version: int, contents: WeightUpdate | None) -> Outgoing:
        if self.settings.disk_path is None:
            raise ConfigError(
                "weights.transport = disk needs weights.disk_path, a folder with {version} in it "
                "that trainer and engines both see",
                setting="weights.disk_path",
            )
        folder = self.settings.disk_path.replace("{version}", str(version))
        writer = CheckpointWriter(folder, self.model_path)
        fingerprints: dict[str, str] = {}
        try:
            for pairs, _ in weights.gathered():
                writer.add(pairs)
                fingerprints |= self._fingerprints(pairs)
                del pairs
            path = writer.finish()
        except BaseException:
            writer.drop()
            raise
        manifest = Manifest(weights.manifest.tensors, fingerprints)
        push = WeightPush(version, manifest, [{"path": str(path)}], ByPath(), contents=contents)
        return Outgoing(push)

    def _fingerprints(self, pairs: Pairs) -> dict[str, str]:
        return fingerprints_of(pairs) if self.settings.fingerprint else {}

    # -- streamed ---------------------------------------------------------------------------

    def _slots(self, weights: Weights) -> Iterator[Bucket]:
        taken: list[Slot] = []
        try:
            for pairs, is_last in weights.gathered():
                # The feed asks for this bucket when the last but one has been applied.
                while len(taken) > 1:
                    self.pool.give(taken.pop(0))
                slot, found = write_slot(pairs, self.pool, fingerprint=self.settings.fingerprint)
                taken.append(slot)
                del pairs
                yield Bucket({"path": str(slot.folder)}, is_last, found)
        finally:
            for slot in taken:
                self.pool.give(slot)

    def _values(self, weights: Weights) -> Iterator[Bucket]:
        for pairs, is_last in weights.gathered(MOST_BUCKET_BYTES):
            found = self._fingerprints(pairs)
            payload = flattened_bucket(pairs)
            del pairs
            yield Bucket(payload, is_last, found)

    def _handles(self, weights: Weights) -> Iterator[Bucket]:
        alive: list[torch.Tensor] = []
        for pairs, is_last in weights.gathered():
            found = self._fingerprints(pairs)
            payload, flat = ipc_bucket(pairs)
            alive = [*alive[-1:], flat]
            del pairs, flat
            yield Bucket(payload, is_last, found)

    def _broadcast(self, weights: Weights, version: int, contents: WeightUpdate | None) -> Outgoing:
        broadcast = Broadcast(weights, version, self.settings, self.host, self.kept)
        feed = Feed(
            broadcast.buckets(),
            host=self.host,
            timeout_s=self.timeout_s,
            terms=broadcast.terms,
            when_ended=broadcast.ended,
        )
        push = WeightPush(
            version, weights.manifest, carrier=ByBroadcast(), feed=feed.address, contents=contents
        )
        return Outgoing(push, feed.close)
