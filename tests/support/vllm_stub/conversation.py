"""The recorded conversation with a vLLM server, by which the stub is made and checked.

    python -m tests.support.vllm_stub.conversation

has it again, with CPU vLLM, our plugin and a tiny model, and writes
the replies into ``recorded.json``.  Of long replies it keeps what is read of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from engines.process.tcp_ports import reserve_port
from tests.support.waits import until

Json = Any
FILE = Path(__file__).with_name("recorded.json")
RECORD: Json = json.loads(FILE.read_text())
TALK: list[Json] = RECORD["talk"]
"""Requests and replies; a request that ``begin`` names runs until the reply with no path."""
# After an error vLLM closes a connection that the client would use again.
_NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)
_RUNNING = re.compile(r"^vllm:num_requests_running(?:\{[^}]*\})? 1\.0$", re.M)
_METRICS = re.compile(
    r"^vllm:(?:num_requests_(?:running|waiting)|generation_tokens_total)\b.*$", re.M
)
_CONFIG = {
    *("vllm_config", "model_config", "model", "enable_sleep_mode", "logprobs_mode"),
    *("generation_config", "override_generation_config", "parallel_config", "enable_eplb"),
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("weight_transfer_config", "backend"),
}
_ALIKE = {
    *(
        "aborted",
        "error",
        "finish_reason",
        "groups",
        "is_paused",
        "message",
        "object",
        "output_mode",
    ),
    *("released", "reply", "role", "status", "success", "tags", "type"),
}
_NUMBER = re.compile(r"\b\d\d?\b")
_MANY = 4


async def talk_with(
    http: httpx.AsyncClient, model: Path, kill_core: Callable[[], None]
) -> list[Json]:
    """The conversation with another server, which is dead then.

    Args:
        model: a folder with all tensors of its model.
        kill_core: ends the engine core, and not the API server.
    """
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port  # no process listens on it
    text = json.dumps(TALK).replace("$MODEL", str(model)).replace('"$PORT"', str(port))
    running: asyncio.Task[httpx.Response] | None = None
    talk = []
    for asked, step in zip(TALK, json.loads(text), strict=True):
        answer = None
        if "begin" in step:
            running = asyncio.create_task(http.post(step["begin"], json=step["body"]))
            await until(lambda: _has_begun(http))
        elif "kill" in step:
            kill_core()
        elif "get" in step:
            answer = await http.get(step["get"])
        elif "post" in step:
            answer = await http.post(step["post"], json=step["body"])
        else:
            assert running is not None
            answer = await running
        told = {"status": answer.status_code, "reply": _shorter(_read(answer))} if answer else {}
        talk.append(asked | told)
    return talk


async def _has_begun(http: httpx.AsyncClient) -> bool:
    return bool(_RUNNING.search((await http.get("/metrics")).text))


def _read(answer: httpx.Response) -> Json:
    """A value, the events of a stream, or a text."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        lines = [line[6:] for line in answer.content.split(b"\n") if line.startswith(b"data: ")]
        return [one.decode() if one == b"[DONE]" else json.loads(one) for one in lines]
    try:
        return answer.json()
    except ValueError:
        return "\n".join(_METRICS.findall(answer.text))


def _shorter(reply: Json) -> Json:
    """Without what no client reads, and with the first of many things of a kind."""
    if isinstance(reply, list):
        # Of a stream, what comes before the tokens, the first and the last of them, and the rest.
        words = [one for one in reply if isinstance(one, dict) and one.get("choices")]
        num_begun = sum("role" in one["choices"][0].get("delta", {}) for one in words)
        ends = [*words[: num_begun + 1], words[-1], *reply[len(words) :]]
        return [_few(one) for one in ends]
    if isinstance(reply, dict) and "paths" in reply:
        return {"paths": {path: {} for path in sorted(reply["paths"])}}
    return _chosen(reply) if "vllm_config" in reply else _few(reply)


def _chosen(config: Json) -> Json:
    if not isinstance(config, dict):
        return config
    return {name: _chosen(value) for name, value in config.items() if name in _CONFIG}


def _few(value: Json) -> Json:
    if isinstance(value, list):
        return [_few(one) for one in (value if len(value) < _MANY else value[:2])]
    if not isinstance(value, dict):
        return value
    few = {name: _few(one) for name, one in value.items() if name != "permission"}
    if "checksums" in few:
        few["checksums"] = dict(list(few["checksums"].items())[:1])
    return few


def differences(one: Json, other: Json, place: str = "") -> list[str]:
    """Where replies of two servers differ by more than their weights, their clock and how many
    tokens came at once."""
    name = place.rpartition("/")[2]
    if isinstance(one, dict) and isinstance(other, dict):
        if name == "top_logprobs" and "token" not in one:  # by the text of the token
            return []
        if one.keys() == other.keys():
            within = f"{place}/{one['name']}" if {"name", "status"} <= one.keys() else place
            pairs = [(one[key], other[key], f"{within}/{key}") for key in one]
            return [text for pair in pairs for text in differences(*pair)]
    elif isinstance(one, list) and isinstance(other, list) and not _is_words(one, name):
        if "[DONE]" not in one or len(one) == len(other):
            pairs = [(*pair, place) for pair in zip(one, other, strict=False)]
            return [text for pair in pairs for text in differences(*pair)]
    elif type(one) is type(other):
        texts = [_NUMBER.sub("#", value) if type(value) is str else value for value in (one, other)]
        if name not in _ALIKE or texts[0] == texts[1]:
            return []
    return [f"{place}: {one}, {other}"]


def _is_words(value: list[Json], name: str) -> bool:
    return name in _ALIKE and not any(isinstance(one, dict) for one in value)


async def talk_with_vllm(folder: Path) -> list[Json]:
    """The conversation with CPU vLLM, which is started for it."""
    from rollout.testing.tiny_model import make_tiny_model
    from tests.support.engine_keys import Keys
    from tests.support.real_policy import process_of
    from tests.support.real_vllm import real_vllm

    model = make_tiny_model(folder / "model", "qwen3", hidden_size=128, num_layers=1)
    with real_vllm(model, folder) as vllm:
        url = vllm.running.endpoint.url

        def kill_core() -> None:
            os.kill(process_of(vllm.running, "VLLM::EngineCore"), signal.SIGKILL)

        async with httpx.AsyncClient(
            base_url=url, timeout=120, limits=_NO_KEEP_ALIVE, auth=Keys(vllm.running)
        ) as http:
            talk = await talk_with(http, model, kill_core)
    # Its replies name the model.
    return list(json.loads(json.dumps(talk).replace(str(folder), "")))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(talk_with_vllm(Path(name)))
        lines = [f"  {json.dumps(step)}" for step in found]
    version = next(step for step in found if step.get("name") == "version")["reply"]["version"]
    made = json.dumps(RECORD | {"vllm": version, "talk": []}, indent=1)
    FILE.write_text(made.removesuffix("]\n}") + "\n" + ",\n".join(lines) + "\n ]\n}\n")
