"""An engine that keeps the bytes of what it is sent, as the readers of real engines find them.

Files are read with ``safetensors``, payloads and broadcasts with the code of our engines; what is
broadcast arrives in another process, as in an engine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pybase64


class Received(NamedTuple):
    """A tensor as it came: the name of its type, shape, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def contents(tensor: Any) -> Received:
    """What a tensor is, through a copy that torch makes row by row."""
    import torch

    plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    flat = plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0).byte()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Received(dtype, tuple(tensor.shape), flat.numpy().tobytes())


class ByteReceiver:
    """The part of an engine that a push calls.

    Args:
        broadcasts: the process that receives broadcasts; without it there are none.

    Attributes:
        tensors: what has come, by name.
        flushes: whether each update cleared the cache.
    """

    def __init__(self, broadcasts: BroadcastProcess | None = None) -> None:
        self.tensors: dict[str, Received] = {}
        self.flushes: list[bool] = []
        self._broadcasts = broadcasts

    def __getattr__(self, name: str) -> Any:
        if name not in ("begin_weight_update", "end_weight_update", "update_weight_version"):
            raise AttributeError(name)

        async def call(*_: Any) -> None:
            """A call that moves no tensors."""

        return call

    async def weight_version(self) -> str:
        return "0"

    async def update_weights_from_disk(self, path: str, *, flush_cache: bool, **_: Any) -> None:
        self._add(await asyncio.to_thread(_in_files, Path(path)))
        self.flushes.append(flush_cache)

    async def update_weights_from_tensor(
        self, payloads: list[str], *, flush_cache: bool, **_: Any
    ) -> None:
        self._add_payload(pybase64.b64decode(payloads[0]))
        self.flushes.append(flush_cache)

    async def unload_lora_adapter(self, name: str) -> None:
        """It has none."""

    async def load_lora_adapter_from_tensors(
        self, name: str, config: Mapping[str, Any], payloads: list[str]
    ) -> Mapping[str, str]:
        self._add_payload(pybase64.b64decode(payloads[0]))
        return {}

    async def init_weights_update_group(self, **group: Any) -> None:
        assert self._broadcasts is not None
        await asyncio.to_thread(self._broadcasts.call, "join", group)

    async def update_weights_from_distributed(self, *, flush_cache: bool, **update: Any) -> None:
        assert self._broadcasts is not None
        found = await asyncio.to_thread(self._broadcasts.call, "receive", update)
        self._add({name: Received(*parts) for name, parts in found.items()})
        self.flushes.append(flush_cache)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        assert self._broadcasts is not None
        await asyncio.to_thread(self._broadcasts.call, "leave", {"group_name": group_name})

    def _add_payload(self, payload: bytes) -> None:
        from engines.tensors.payload.weight_payload import load_payload, tensors_in

        loaded = load_payload(payload)
        if isinstance(loaded, dict) and "flattened_tensor" not in loaded:  # an adapter
            loaded = loaded.items()
        self._add(
            {
                found.name: Received(found.dtype, found.shape, bytes(found.content))
                for found in tensors_in(loaded)
            }
        )

    def _add(self, tensors: Mapping[str, Received]) -> None:
        twice = self.tensors.keys() & tensors.keys()
        assert not twice, f"they came twice: {sorted(twice)}"
        self.tensors |= tensors


def _in_files(folder: Path) -> dict[str, Received]:
    from safetensors import safe_open

    found: dict[str, Received] = {}
    for file in sorted(folder.glob("*.safetensors")):
        opened: Any = safe_open(file, framework="pt")
        with opened as reader:
            names: list[str] = reader.keys()
            found |= {name: contents(reader.get_tensor(name)) for name in names}
    return found


class BroadcastProcess:
    """A process that is a member of broadcast groups, one after the other; ``with`` ends it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end,), daemon=True)
        self._process.start()
        end.close()

    def call(self, operation: str, given: Mapping[str, Any]) -> Any:
        """The result of an operation there.

        Raises:
            RuntimeError: it failed.
        """
        self._line.send((operation, dict(given)))
        found, why = self._line.recv()
        if why:
            raise RuntimeError(why)
        return found

    def __enter__(self) -> BroadcastProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._line.close()
        self._process.join(timeout=20)
        self._process.kill()
        self._process.join()


def _serve(line: Any) -> None:
    import torch

    from engines.tensors.collective.groups import UpdateGroups

    groups = UpdateGroups(torch.device("cpu"))

    def join(group: Mapping[str, Any]) -> None:
        names = ("group_name", "backend", "master_address", "master_port", "world_size")
        groups.join(rank=group["rank_offset"], **{name: group[name] for name in names})

    def receive(update: Mapping[str, Any]) -> dict[str, Any]:
        from engines.tensors.collective.bucket import content_of, parts_of, pieces_of

        content = content_of(update)
        pieces = pieces_of(content)
        buffer = torch.zeros(max(pieces[-1].end, 1), dtype=torch.uint8)
        parts = parts_of(pieces, buffer, is_flat=content.is_flat)
        groups.receive(parts, group_name=update["group_name"])
        return {piece.name: tuple(contents(piece.of(buffer))) for piece in pieces}

    def leave(group: Mapping[str, Any]) -> None:
        groups.leave(group["group_name"])

    operations = {"join": join, "receive": receive, "leave": leave}
    while True:
        try:
            name, given = line.recv()
        except EOFError:
            return
        try:
            line.send((operations[name](given), ""))
        except Exception as error:
            line.send((None, f"{name}: {error!r}"))
