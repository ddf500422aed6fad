"""The embedded engine and llama.cpp's server, each as a process with one thread for its model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from engines.embedded.command import MEMORY
from engines.process.tcp_ports import reserve_port

_PACKAGES = ("gguf", "safetensors", "xllamacpp")
_INSTALL_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        is_llama_cpp: it takes that server's requests, and not SGLang's.
        boot_cpu_s: CPU of its process, user and system, from exec to the first answer.
    """

    port: int
    process: psutil.Process
    is_llama_cpp: bool
    boot_cpu_s: float

    def cpu_s(self) -> float:
        return sum(self.process.cpu_times()[:2])

    async def generate(
        self, http: aiohttp.ClientSession, ids: Sequence[int], new_tokens: int
    ) -> int:
        """The number of tokens of one greedy completion."""
        if self.is_llama_cpp:
            body: dict[str, Any] = {"prompt": ids, "n_predict": new_tokens, "temperature": 0}
            body |= {"ignore_eos": True, "cache_prompt": False}
        else:
            sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
            body = {"input_ids": ids, "sampling_params": sampling}
        path = "completion" if self.is_llama_cpp else "generate"
        async with http.post(f"http://127.0.0.1:{self.port}/{path}", json=body) as response:
            response.raise_for_status()
            reply = await response.json()
        return reply["tokens_predicted"] if self.is_llama_cpp else len(reply["output_ids"])


@contextmanager
def embedded(model: Path) -> Iterator[Server]:
    port = _free_port()
    command = [sys.executable, "-m", "engines.embedded", "--model-path", str(model)]
    with _started([*command, "--port", str(port)], port, "/ready", MEMORY) as server:
        yield server


@contextmanager
def llama_cpp(python: Path, model: Path, num_parallel: int) -> Iterator[Server]:
    program, port = Path(__file__).with_name("llama_cpp.py"), _free_port()
    command = [str(python), str(program), str(model), str(port), "1", str(num_parallel)]
    with _started(command, port, "/health", {}) as server:
        yield server


def _free_port() -> int:
    with reserve_port() as reserved:
        return reserved.port


@contextmanager
def _started(
    command: list[str], port: int, ready: str, environment: dict[str, str]
) -> Iterator[Server]:
    log = subprocess.DEVNULL
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
    try:
        owned = psutil.Process(process.pid)
        began = time.monotonic()
        while not _answers(port, ready):
            if process.poll() is not None or time.monotonic() - began > _READY_TIMEOUT_S:
                raise RuntimeError(f"{' '.join(command)} does not answer: {process.poll()}")
            time.sleep(0.02)
        is_llama_cpp = ready == "/health"
        yield Server(port, owned, is_llama_cpp, sum(owned.cpu_times()[:2]))
    finally:
        process.kill()
        process.wait()


def _answers(port: int, path: str) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def install_llama_cpp() -> Path | str:
    """The interpreter of an environment in the user's cache folder, or why there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    place = cache / "ray-rollout" / "llama-cpp"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    pip = [str(python), "-m", "pip"]
    if not subprocess.run([*pip, "show", "-q", *_PACKAGES], capture_output=True).returncode:
        return python
    print(f"installing {', '.join(_PACKAGES)} into {place}", file=sys.stderr)
    command = [*pip, "install", "-q", "--only-binary", ":all:", *_PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"pip install xllamacpp took longer than {_INSTALL_TIMEOUT_S:.0f} s"
    return python if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
