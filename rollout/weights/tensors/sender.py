"""Makes a push from a trainer's tensors: one function per transport.

Always true: ``OutgoingPush.close`` releases what a push holds (buffers, threads, sockets, a group),
in any state.

A push is *copied* (complete when the function returns: the trainer may change its tensors) or
*streamed* (made bucket by bucket while engines load it: the tensors must not change until it has
ended).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from engines.tensors.fingerprint import BYTES
from rollout.config import Transport, WeightsConfig, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.held_buffers import HeldBuffers
from rollout.weights.push.shm_buffers import ShmBufferPool
from rollout.weights.push.stream_server import PushStreamServer, StreamedBucket
from rollout.weights.push.transport_choice import ONLY_STREAM
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.tensors.broadcast_sender import BroadcastPush, KeptGroup, NcclTerms
from rollout.weights.tensors.bucket_writer import (
    CheckpointWriter,
    fingerprints_of,
    write_shm_buffer,
)
from rollout.weights.tensors.payload import flattened_bucket, ipc_bucket
from rollout.weights.tensors.tensor_sources import BucketsOfTensors
from rollout.weights.transports.carriers import MOST_BUCKET_BYTES, ByBroadcast, ByPath, ByValue

_CARRIERS = {
    Transport.SHARED_MEMORY: ByPath(),
    Transport.TENSOR: ByValue(load_format="flattened_bucket"),
    Transport.CUDA_IPC: ByValue(load_format="flattened_bucket"),
    Transport.DISTRIBUTED: ByBroadcast(),
}


@dataclass(frozen=True, slots=True)
class OutgoingPush:
    """A push, with its resources in this process.

    Attributes:
        close: releases them; called when the push has ended, also after a failure.
    """

    push: WeightPush
    close: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True, slots=True)
class PushSender:
    """Makes the pushes of one server.

    Attributes:
        host: address of this machine for the server's groups.
        pool: buffers in tmpfs, if there is a tmpfs.
        timeout_s: for a bucket, including the engines' work.
        model_path: checkpoint that the engines started from.
        kept: keeps the broadcast group for the next push; None closes it.
        nccl: what NCCL needs to know of the engines.
        fingerprints: the method of the fingerprints that are taken; empty takes none.
    """

    settings: WeightsConfig
    pool: ShmBufferPool
    host: str = "127.0.0.1"
    timeout_s: float = 600.0
    model_path: str = ""
    kept: KeptGroup | None = None
    nccl: NcclTerms | None = None
    fingerprints: str = BYTES

    def send(
        self,
        weights: BucketsOfTensors,
        version: int,
        transport: Transport,
        contents: WeightUpdate | None = None,
        *,
        may_stream: bool = True,
        at_once: bool = False,
    ) -> OutgoingPush:
        """A push of these weights by ``transport``.

        Args:
            may_stream: whether the tensors do not change until the push has ended.
            at_once: all files of a push by shared memory are loaded in one call.

        Raises:
            ConfigError: the transport can only stream, and may not.
            WeightsUnavailable: there is no space.
        """
        if transport in ONLY_STREAM and not may_stream:
            raise ConfigError(
                f"weights.transport = {transport}: it reads the tensors while engines load them, "
                "so push with serve_weights(tensors), not with a window's push",
                setting="weights.transport",
                value=transport.value,
            )
        if transport is Transport.CUDA_IPC and not weights.is_on_cuda:
            raise ConfigError(
                "weights.transport = cuda_ipc: the tensors are in host memory; leave "
                "weights.transport out, or set it to shared_memory",
                setting="weights.transport",
                value=transport.value,
            )
        if transport is Transport.DISK:
            return self._to_disk(weights, version, contents)
        if self.streams(transport, may_stream=may_stream, at_once=at_once):
            return self.stream(weights, version, transport, contents)
        return self._copied(weights, version, transport, contents, at_once=at_once)

    def streams(self, transport: Transport, *, may_stream: bool, at_once: bool) -> bool:
        """Whether ``send`` makes a streamed push."""
        if transport in ONLY_STREAM or transport is Transport.DISK:
            return transport is not Transport.DISK
        return may_stream and self.settings.stream and not at_once

    def stream(
        self,
        weights: BucketsOfTensors,
        version: int,
        transport: Transport,
        contents: WeightUpdate | None = None,
    ) -> OutgoingPush:
        """A push whose buckets are made while engines load the ones before; not to disk."""
        if transport is Transport.DISTRIBUTED:
            broadcast = BroadcastPush(
                version,
                self.settings,
                self.host,
                self.kept,
                self.nccl,
                self.fingerprints,
                is_on_cuda=weights.is_on_cuda,
            )
            server = PushStreamServer(
                broadcast.buckets(weights),
                host=self.host,
                timeout_s=self.timeout_s,
                terms=broadcast.terms,
                when_ended=broadcast.ended,
            )
        else:
            make = {
                Transport.SHARED_MEMORY: self._buffers,
                Transport.TENSOR: self._values,
                Transport.CUDA_IPC: self._handles,
            }[transport]
            server = PushStreamServer(make(weights), host=self.host, timeout_s=self.timeout_s)
        push = WeightPush(
            version,
            weights.manifest,
            carrier=_CARRIERS[transport],
            stream=server.address,
            contents=contents,
        )
        return OutgoingPush(push, server.close)

    def _copied(
        self,
        weights: BucketsOfTensors,
        version: int,
        transport: Transport,
        contents: WeightUpdate | None,
        *,
        at_once: bool,
    ) -> OutgoingPush:
        held = HeldBuffers(self.pool)
        is_shared = transport is Transport.SHARED_MEMORY
        try:
            buckets = list(self._written(weights, held) if is_shared else self._values(weights))
            payloads = [bucket.payload for bucket in buckets]
            if is_shared and at_once and len(buckets) > 1:
                payloads = [{"path": str(held.joined())}]
        except BaseException:
            held.release()
            raise
        fingerprints: dict[str, str] = {}
        for bucket in buckets:
            fingerprints |= bucket.fingerprints
        push = WeightPush(
            version,
            Manifest(weights.manifest.tensors, fingerprints),
            payloads,
            _CARRIERS[transport],
            contents=contents,
        )
        return OutgoingPush(push, held.release)

    def _to_disk(
        self, weights: BucketsOfTensors, version: int, contents: WeightUpdate | None
    ) -> OutgoingPush:
        writer = self.checkpoint_writer(version)
        try:
            for pairs, _ in weights.gathered():
                writer.add(pairs)
                del pairs
            path = writer.finish()
        except BaseException:
            writer.drop()
            raise
        manifest = Manifest(weights.manifest.tensors, writer.fingerprints)
        push = WeightPush(version, manifest, [{"path": str(path)}], ByPath(), contents=contents)
        return OutgoingPush(push)

    def checkpoint_writer(self, version: int) -> CheckpointWriter:
        """Writes the folder of this version, for ``transport: disk``.

        Raises:
            ConfigError: there is no setting for it.
        """
        if self.settings.disk_path is None:
            raise ConfigError(
                "weights.transport = disk needs weights.disk_path, a folder with {version} in it "
                "that trainer and engines can both read",
                setting="weights.disk_path",
            )
        folder = self.settings.disk_path.replace("{version}", str(version))
        return CheckpointWriter(folder, self.model_path, self.fingerprints)

    # -- buckets ----------------------------------------------------------------------------

    def _written(self, weights: BucketsOfTensors, held: HeldBuffers) -> Iterator[StreamedBucket]:
        """Buckets in tmpfs."""
        for pairs, is_last in weights.gathered():
            buffer, found = write_shm_buffer(pairs, held, method=self.fingerprints)
            del pairs
            yield StreamedBucket({"path": str(buffer.folder)}, is_last, found)

    def _buffers(self, weights: BucketsOfTensors) -> Iterator[StreamedBucket]:
        held = HeldBuffers(self.pool)
        try:
            for bucket in self._written(weights, held):
                yield bucket
                # The next bucket is made when engines have applied the last but one.
                held.release(but=1)
        finally:
            held.release()

    def _values(self, weights: BucketsOfTensors) -> Iterator[StreamedBucket]:
        for pairs, is_last in weights.gathered(MOST_BUCKET_BYTES):
            found = fingerprints_of(pairs, self.fingerprints)
            payload = flattened_bucket(pairs)
            del pairs
            yield StreamedBucket(payload, is_last, found)

    def _handles(self, weights: BucketsOfTensors) -> Iterator[StreamedBucket]:
        alive: list[torch.Tensor] = []
        for pairs, is_last in weights.gathered():
            found = fingerprints_of(pairs, self.fingerprints)
            payload, flat = ipc_bucket(pairs)
            alive = [*alive[-1:], flat]
            del pairs, flat
            yield StreamedBucket(payload, is_last, found)
