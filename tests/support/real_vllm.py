"""A real vLLM on this machine's CPU, with our plugin, spoken to by its own HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engines.launch import EngineSpec, LocalLauncher, RunningEngine
from engines.tensors.fingerprint import host_fingerprint
from tests.support.contract import Background
from tests.support.engine_keys import Keys
from tools.cpu_engines import install

START_S = 600.0
"""It takes under a minute alone; other tests may use the cores."""
# After an error vLLM closes a connection that the client would use again.
_NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
PROMPT = tuple(b"Once upon a time")


@dataclass
class RealVllm:
    """One that serves.

    Attributes:
        model: the checkpoint it started from.
    """

    running: RunningEngine
    background: Background
    http: httpx.Client
    model: Path

    def ask(self, path: str, **request: Any) -> Any:
        """The answer of a POST that must succeed."""
        answer = self.http.post(path, **request)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    def info(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def call_worker(self, method: str) -> Any:
        """What the only worker answers."""
        [result] = self.ask("/collective_rpc", json={"method": method})["results"]
        return result

    def greedy(self, num_tokens: int = 8) -> list[int]:
        request = {
            "token_ids": list(PROMPT),
            "sampling_params": {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True},
            "model": str(self.model),
        }
        tokens: list[int] = self.ask("/inference/v1/generate", json=request)["choices"][0][
            "token_ids"
        ]
        return tokens

    def fingerprints(self) -> dict[str, str]:
        checksums: dict[str, str] = self.call_worker("rollout_fingerprints")["checksums"]
        return checksums

    def update(self, *buckets: Mapping[str, str], version: str) -> None:
        """A whole push."""
        self.ask("/start_weight_update")
        for bucket in buckets:
            self.ask("/update_weights", json={"update_info": bucket})
        self.ask("/finish_weight_update", json={"weight_version": version})

    def sleep(self, level: int) -> None:
        self.ask("/sleep", params={"level": level})

    def wake_up(self, tag: str) -> None:
        self.ask("/wake_up", params={"tags": tag})

    def resident_bytes(self) -> int:
        """Host memory of all its processes."""
        resident = self.background.run(self.running.resident_bytes(), 10)
        assert resident is not None
        return resident

    def log_tail(self) -> str:
        return self.background.run(self.running.log_tail(200), 10)

    def is_alive(self) -> bool:
        return self.background.run(self.running.is_alive(), 10)


@contextmanager
def real_vllm(model: Path, folder: Path) -> Iterator[RealVllm]:
    """Start one; it is gone at the end."""
    spec = EngineSpec(
        engine_id="vllm-0",
        model_path=str(model),
        log_path=str(folder / "vllm.log"),
        start_timeout_s=START_S,
        **install.launch_settings("vllm"),
    )
    background = Background()
    running = background.run(LocalLauncher().launch(spec), START_S + 60)
    try:
        with httpx.Client(
            base_url=running.endpoint.url,
            timeout=120,
            trust_env=False,
            limits=_NO_KEEP_ALIVE,
            auth=Keys(running),
        ) as http:
            yield RealVllm(running, background, http, model)
    finally:
        background.run(running.kill(), 60)
        background.close()


def expected_fingerprints(model: Path) -> dict[str, str]:
    """Of the bytes in a checkpoint of one file."""
    from safetensors.torch import load_file

    return {
        name: host_fingerprint(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor.contiguous().numpy().tobytes(),
        )
        for name, tensor in load_file(model / "model.safetensors").items()
    }


def write_buckets(model: Path, folder: Path, num: int, leave_out: Sequence[str] = ()) -> list[Path]:
    """Its tensors in folders of one file each, so that neighbours lie in different ones."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors.keys() - set(leave_out))
    folders = []
    for part in range(num):
        place = folder / f"bucket-{part}"
        place.mkdir(parents=True)
        bucket = {name: tensors[name].contiguous() for name in names[part::num]}
        save_file(bucket, place / "bucket.safetensors")
        folders.append(place)
    return folders
