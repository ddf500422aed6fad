"""On an engine's host: a process of ours makes whole tensors of deltas, and the engine loads files.

For engines that apply no deltas themselves.

Always true: a bucket is checked whole before a copy is changed; an engine loads the copies only
when each has the fingerprint that the trainer has of it, and they have a version only from then
until the next push.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.tensors.fingerprint import BYTES
from engines.tensors.payload.weight_payload import load_payload, tensors_in
from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.pushed_files import why_damaged
from rollout.weights.routes.buffers import ShmBufferPool

if TYPE_CHECKING:
    import torch


class KnownHost:
    """Where an engine is called: what is known of the copies on its host.

    Args:
        process: the engine's ``RunningEngine``; one without ``rebuild`` is on this host.

    Attributes:
        version: see ``EngineHost``.
    """

    def __init__(self, process: object) -> None:
        self.version = -1
        self._copies = None if hasattr(process, "rebuild") else HostCopies()
        self._process: Any = process

    async def rebuild(
        self, payload: bytes, version: int, fingerprints: Mapping[str, str] | None
    ) -> str:
        """See ``HostCopies.rebuild``."""
        self.version = -1
        if self._copies is None:
            path = str(await self._process.rebuild(payload, version, fingerprints))
        else:
            path = await asyncio.to_thread(self._copies.rebuild, payload, version, fingerprints)
        self.version = -1 if fingerprints is None else version
        return path

    def close(self) -> None:
        """Free the copies that are on this host; those on another one go with its process."""
        if self._copies is not None:
            self._copies.close()


class HostCopies:
    """The whole tensors of one engine, in files on its host.

    Args:
        root: a folder in tmpfs.
    """

    def __init__(self, root: str = "/dev/shm") -> None:
        self._root = root
        self._lock = threading.Lock()
        self._pool: ShmBufferPool | None = None
        self._clear()

    def _clear(self) -> None:
        self._version: int | None = None
        self._base: int | None = None  # of the push that is under way
        self._pushed: int | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._files: list[Path] = []
        self._folder: Path | None = None  # with links to all files

    def rebuild(self, payload: bytes, version: int, fingerprints: Mapping[str, str] | None) -> str:
        """Change the copies by a bucket.

        Args:
            fingerprints: with the last bucket, those of all tensors.

        Returns:
            With the last bucket, the folder of all files.

        Raises:
            WeightsUnavailable: the bucket is damaged or begins from another version, or there is
                no room; or a tensor is not what the trainer has.
        """
        with self._lock:
            if version != self._pushed:
                self._pushed, self._base = version, self._version
            self._version = None
            try:
                self._apply(payload)
            except WeightsUnavailable:
                raise
            except Exception as error:  # unpickling can raise anything
                raise WeightsUnavailable(
                    f"a bucket of weight version {version} is not for the copies of weight version "
                    f"{self._base} on the engine's host: {error}; push whole tensors"
                ) from error
            return "" if fingerprints is None else self._finished(version, fingerprints)

    def _apply(self, payload: bytes) -> None:
        import numpy as np
        import torch

        from engines.tensors.delta import apply_delta, is_delta, read_delta
        from engines.tensors.torch_fingerprint import dtype_name
        from rollout.weights.tensors.sources import Pairs

        whole, deltas = {}, []
        for one in tensors_in(load_payload(payload)):
            flat = torch.empty(one.content.nbytes, dtype=torch.uint8)
            flat.numpy()[:] = np.frombuffer(one.content, np.uint8)
            if is_delta(one.name):
                deltas.append(read_delta(one.name, flat))
            else:
                whole[one.name] = flat.view(getattr(torch, one.dtype)).view(one.shape)
        for delta, *_ in deltas:
            copy = self._copies[delta.name]
            own = (str(self._base), dtype_name(copy.dtype), list(copy.shape))
            if (delta.base, delta.dtype, list(delta.shape)) != own:
                raise ValueError(f"the delta of {delta.name!r} begins from {delta.base}")
        new = {}
        for name, tensor in whole.items():
            copy = self._copies.get(name, tensor[:0])
            if (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape):
                copy.copy_(tensor)
            else:
                new[name] = tensor
        if other := new.keys() & self._copies.keys():
            self._free()
            raise ValueError(f"{min(other)!r} has another shape or dtype than before")
        for delta, *elements in deltas:
            apply_delta(self._copies[delta.name], *elements)
        if new:
            self._write(Pairs.of(new.items()))

    def _write(self, pairs: Any) -> None:
        """Tensors that are new here, into a file of their own."""
        import torch

        from rollout.weights.routes.shared_memory import write_buffer

        if self._pool is None:
            self._pool = ShmBufferPool(self._root)
        buffer, _ = write_buffer(pairs, self._pool, method="")
        self._files.append(buffer.folder)
        self._folder = None
        whole = torch.frombuffer(buffer.view, dtype=torch.uint8)
        offsets = self._pool.layouts.of(pairs.specs).offsets
        for name, tensor in pairs:
            begin, end = offsets[name]
            self._copies[name] = whole[begin:end].view(tensor.dtype).view(tensor.shape)

    def _finished(self, version: int, fingerprints: Mapping[str, str]) -> str:
        assert self._pool is not None
        if self._folder is None:
            self._folder = self._pool.join(self._files)
        why = why_damaged(self._folder, fingerprints)
        if not all(text.startswith(BYTES) for text in fingerprints.values()):
            why = "the push has no fingerprints of bytes"
        if missing := self._copies.keys() ^ fingerprints.keys():
            why = f"the copies and the push differ by {sorted(missing)[:3]}"
        if why:
            raise WeightsUnavailable(f"weight version {version}: {why}; the engine did not load it")
        self._version = version
        return str(self._folder)

    def close(self) -> None:
        """Free them."""
        with self._lock:
            self._free()

    def _free(self) -> None:
        self._clear()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
