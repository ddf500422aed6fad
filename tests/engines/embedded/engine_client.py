"""An engine process to test, and asking it things."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from engines.process.guarded_process import KILL, TERMINATE, GuardedProcess
from tests.support.event_lines import async_lines_of
from tests.support.processes import wait_until

PROMPT = list(b"Once upon a time")


class Server:
    """An engine process under a guard: it ends with this process, however that ends.

    Attributes:
        log: all that it wrote, once it has ended.
    """

    def __init__(self, model_path: Path, *flags: str) -> None:
        self.model_path = model_path
        self.log = ""
        self.port = 0
        self._folder = tempfile.TemporaryDirectory()
        self._log_path = Path(self._folder.name, "engine.log")
        self.process = GuardedProcess(
            [
                *(sys.executable, "-m", "engines.embedded"),
                *("--model-path", str(model_path), "--port", "0", *flags),
            ],
            env=os.environ,
            log_path=self._log_path,
        )

    def wait_until_ready(self) -> Server:
        """The port is in the log, in a line that comes just before the engine listens."""
        # ``_has_ended`` first: it also hears the process id.
        assert wait_until(lambda: self._has_ended() or self._has_port(), 100)
        assert self.process.report.pid is not None
        assert self.port, self._log_path.read_text()
        with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
            assert client.get(f"{self.url}/ready").status_code == 200
        return self

    def _has_port(self) -> bool:
        found = re.search(r" serving .*:(\d+) after", self._log_path.read_text())
        self.port = int(found[1]) if found else 0
        return found is not None

    def _has_ended(self) -> bool:
        self.process.hear()
        return self.process.report.exit_status is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.report.pid).memory_info().rss)

    def stop(self) -> None:
        self.process.send(TERMINATE)
        try:
            assert wait_until(self._has_ended, 10), "SIGTERM did not end it within 10 s"
        finally:
            self.kill()

    def kill(self) -> None:
        """End whatever is left of it."""
        self.process.send(KILL)
        assert wait_until(self._is_gone, 10), "SIGKILL did not end it within 10 s"
        if self._log_path.exists():
            self.log = self._log_path.read_text()
            self._folder.cleanup()

    def _is_gone(self) -> bool:
        self.process.hear()
        return self.process.is_gone


@contextlib.contextmanager
def two_servers(models: Mapping[str, Path]) -> Iterator[dict[str, Server]]:
    """Two engines, started side by side since that is the slow part."""
    plain = Server(models["first"], "--enable-memory-saver", "--enable-lora")
    backed = Server(
        models["qwen"],
        *("--enable-memory-saver", "--enable-weights-cpu-backup"),
    )
    try:
        yield {"plain": plain.wait_until_ready(), "backed": backed.wait_until_ready()}
    finally:
        plain.stop()
        backed.stop()


class Asker:
    """Asks a server things; every answer but a refusal is unwrapped."""

    def __init__(self, server: Server, http: httpx.AsyncClient) -> None:
        self.server = server
        self.http = http

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def try_post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.try_post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content[:1] in (b"{", b"[") else None

    async def refused(self, status: int, path: str, **body: Any) -> str:
        """The words of a refusal with this status."""
        answer = await self.try_post(path, **body)
        assert answer.status_code == status, answer.text
        if answer.headers["content-type"].startswith("text/plain"):
            return answer.text
        assert answer.json()["success"] is False
        return str(answer.json()["error"]["message"])

    async def generate(self, input_ids: Any = None, **options: Any) -> Any:
        body: dict[str, Any] = {
            name: options.pop(name)
            for name in (
                "rid",
                "return_logprob",
                "return_routed_experts",
                "logprob_start_len",
                "text",
                "stream",
            )
            if name in options
        }
        if "text" not in body:
            body["input_ids"] = PROMPT if input_ids is None else input_ids
        return await self.post("/generate", sampling_params=sampling(**options), **body)

    @contextlib.asynccontextmanager
    async def in_flight(self, input_ids: Any = None, **options: Any) -> AsyncIterator[Stream]:
        """A stream that has given its first token and goes on until it is aborted."""
        rid = options.pop("rid", None)
        body = {
            "input_ids": PROMPT if input_ids is None else input_ids,
            "sampling_params": sampling(**{"max_new_tokens": 2000, "ignore_eos": True, **options}),
            "stream": True,
            "rid": rid,
        }
        async with self.http.stream("POST", "/generate", json=body) as response:
            assert response.status_code == 200
            stream = Stream(async_lines_of(response))
            await stream.next()
            yield stream


class Stream:
    """Chunks of a server-sent event stream."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.last: dict[str, Any] = {}

    async def next(self) -> dict[str, Any] | None:
        """The next chunk; None after the last."""
        async for line in self._lines:
            if line == "data: [DONE]":
                return None
            if line:
                self.last = json.loads(line.removeprefix("data: "))
                return self.last
        return None

    async def rest(self) -> dict[str, Any]:
        """The last chunk."""
        while await self.next() is not None:
            pass
        return self.last


def sampling(**options: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": 16, **options}


def payload(named: Mapping[str, Any]) -> list[str]:
    """SGLang's wire form of tensors, by value."""
    return [base64.b64encode(pickle.dumps(list(named.items()))).decode()]


@contextlib.asynccontextmanager
async def connected(server: Server, *, restores: bool = True) -> AsyncIterator[Asker]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        asker = Asker(server, http)
        yield asker
        if restores:
            await restore(asker)


async def restore(asker: Asker) -> None:
    info = await asker.get("/server_info")
    if info["released_tags"]:
        await asker.post("/resume_memory_occupation", tags=info["released_tags"])
    if info["is_weight_update_session_open"]:
        await asker.post("/end_weight_update")
    if info["is_paused"]:
        await asker.post("/continue_generation")
    await asker.post("/abort_request", abort_all=True)
    if info["weight_version"] != "0" or "weights" in info["released_tags"]:
        path = str(asker.server.model_path)
        await asker.post("/update_weights_from_disk", model_path=path, weight_version="0")
    await asker.post("/flush_cache?timeout=10")
