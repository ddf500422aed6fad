"""What can go wrong with a delta on its way to an engine."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engines.protocol import Endpoint
from engines.tensors.torch_fingerprint import as_bytes
from rollout.core.types import EngineStatus
from rollout.weights.tensors.sources import Pairs
from tests.support.waits import until

REFUSED = ["another base", "cut", "flipped", "another model", "reordered", "the last repeated"]


class Faults:
    """Requests of clients with deltas go wrong on their way.

    Attributes:
        fault: what is done to them; empty for nothing.  ``killed``: an engine dies while it applies
            the second, or in the middle of a folder that it loads.
        engines: those that are killed.
        num_done: requests that went wrong.
        num_killed: engines that were killed.
    """

    def __init__(self) -> None:
        self.fault = ""
        self.num_done = self.num_killed = 0
        self.engines: Sequence[EngineStatus] = ()
        self._begun: set[str] = set()
        self._waiting: dict[int, tuple[Any, Any]] = {}

    def around(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of a client's ``update_weights_from_tensor`` or ``..._from_disk``."""

        async def update_weights(client: Any, payloads: Any, **more: Any) -> None:
            if self.fault:
                await self._send(client, send, payloads, more)
            else:
                await send(client, payloads, **more)

        return update_weights

    def around_send(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of ``BroadcastRoot.send``: what engines receive is not what was made."""

        def send_wrong(root: Any, tensors: Sequence[torch.Tensor]) -> None:
            if self.fault == "flipped":
                self.num_done += 1
                tensors = [one.clone() for one in tensors]
                as_bytes(tensors[-1])[-1] ^= 4
            send(root, tensors)

        return send_wrong

    def around_parts(self, parts: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of ``BroadcastPush.parts``: deltas are not broadcast."""

        def some_parts(push: Any, pairs: Pairs) -> Any:
            if self.fault == "lost" and len(pairs) > 1:
                self.num_done += 1
                pairs = pairs[1:]
            return parts(push, pairs)

        return some_parts

    async def _send(self, client: Any, send: Any, payloads: Any, more: dict[str, Any]) -> None:
        fault, is_last = self.fault, more["weight_version"] is not None
        self.num_done += 1
        if fault == "lost" and not is_last:
            return
        if fault == "killed":
            await self._send_and_kill(client.endpoint, payloads, send(client, payloads, **more))
            return
        if fault == "reordered":
            before = self._waiting.pop(id(client), None)
            if not is_last:
                if before is not None:
                    await send(client, before[0], **before[1])
                self._waiting[id(client)] = payloads, more
                return
            await send(client, payloads, **more)
            assert before is not None
            payloads, more = before
        if fault == "another base":
            await client.update_weight_version("77")
        if fault == "another content of the base" and self.num_done == 1:
            await client.weights_checker("reset_tensors")
        if fault in ("cut", "flipped", "another model"):
            if isinstance(payloads, str):  # a folder
                file = Path(payloads) / "bucket.safetensors"
                file.write_bytes(_damaged(fault, file.read_bytes()))
            else:
                content = _damaged(fault, base64.b64decode(payloads[0]))
                payloads = [base64.b64encode(content).decode()]
        await send(client, payloads, **more)
        if fault == "the last repeated" or (fault == "repeated" and not is_last):
            await send(client, payloads, **more | {"weight_version": None})

    async def _send_and_kill(
        self, endpoint: Endpoint, payloads: Any, send: Awaitable[None]
    ) -> None:
        applied = asyncio.ensure_future(send)
        if isinstance(payloads, str):
            await _kill_in_load(Path(payloads), applied, lambda: self._kill(endpoint))
        elif endpoint.url in self._begun:
            self._kill(endpoint)
        self._begun.add(endpoint.url)
        await applied

    def _kill(self, endpoint: Endpoint) -> None:
        (pid,) = [one.pid for one in self.engines if one.endpoint == endpoint]
        os.killpg(os.getpgid(pid), signal.SIGKILL)
        self.num_killed += 1


async def _kill_in_load(folder: Path, load: asyncio.Future[None], kill: Callable[[], None]) -> None:
    """Kill who loads a folder while it waits for the last file, which no process writes."""
    pipe = folder / "z.safetensors"
    os.mkfifo(pipe)

    def writer_of_a_load() -> int | None:
        if load.done():
            return -1
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # it is not read yet
            return None

    writer = await until(writer_of_a_load)
    if writer is not None and writer >= 0:
        kill()
        os.close(writer)
    pipe.unlink()


def _damaged(fault: str, payload: bytes) -> bytes:
    content = bytearray(payload)
    if fault == "cut":
        del content[len(content) // 2 :]
    elif fault == "flipped":
        content[len(content) // 2] ^= 4
    else:
        content = bytearray(content.replace(b"q_proj", b"k_proj"))
    return bytes(content)
