"""Requests with contracts over embedded engines, into which a push comes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import rollout
from rollout.runtime.local import launch_local
from tests.support import waits
from tests.support.models import plain_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
NUM = 1000
CONTRACTS: dict[str, dict[str, str]] = {
    "none": {},
    "exact": {"X-Weight-Version": "0"},
    "lag": {"X-Max-Version-Lag": "0"},
    "next": {"X-Weight-Version": "1"},
    "least": {"X-Min-Weight-Version": "1"},
}


def post(
    url: str, headers: dict[str, str], replies: list[str], *, stream: bool, is_openai: bool
) -> tuple[int, Any]:
    """Status, and the reply or the last event.

    Args:
        replies: gets a path when a reply has begun.
    """
    path, body = "/generate", {"input_ids": [1, 2, 3], "stream": stream}
    if is_openai:
        path, body = "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": NUM, "ignore_eos": True}
        body |= {"stream": stream, "temperature": 1}
    else:
        body["sampling_params"] = {"max_new_tokens": NUM, "ignore_eos": True}
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            replies.append(path)
            status, content = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, content = error.code, error.read()
    if stream and status == 200:
        lines = [line for line in content.split(b"\n") if line.startswith(b"data: {")]
        return status, json.loads(lines[-1][6:])
    return status, json.loads(content)


def versions_in(payload: Any) -> list[str]:
    meta = payload.get("meta_info") or payload.get("metadata") or {}
    return [span["version"] for span in meta.get("weight_versions") or ()]


async def test_a_push_in_the_middle_breaks_no_contract(tmp_path: Path) -> None:
    models = plain_models(tmp_path, 2)
    engine = {"kind": "embedded", "options": {"dtype": "float32"}}
    group = {"needs_offload": False, "engine": engine}
    policy = {"model_path": str(models[0]), "groups": {"main": group}}
    policy["lifecycle"] = {"drain": "retract"}
    settings = {"log_dir": str(tmp_path / "runs"), "servers": {"policy": policy}}
    with (
        launch_local(rollout.RolloutConfig.from_dict(settings)) as deployment,
        ThreadPoolExecutor(20) as threads,
    ):
        server = deployment["policy"]
        ways = [(stream, is_openai) for stream in (False, True) for is_openai in (False, True)]
        replies: list[str] = []
        pending = {
            (name, *way): threads.submit(
                post, server.url, headers, replies, stream=way[0], is_openai=way[1]
            )
            for name, headers in CONTRACTS.items()
            for way in ways
        }

        def has_all() -> bool:
            with urllib.request.urlopen(server.url + "/engines", timeout=10) as reply:
                found = json.loads(reply.read())
            is_admitted = found["num_in_flight"] == 12 and found["gate"]["num_held"] == 8
            return is_admitted and len(replies) == 6  # a stream that has not begun is a 409

        await waits.until(has_all)
        server.push(load_file(models[1] / "model.safetensors")).result(60)
        got = {key: found.result(120) for key, found in pending.items()}
    assert versions_in(got["none", False, False][1]) == ["0", "1"]  # it ran on over the push
    for (name, stream, is_openai), (status, payload) in got.items():
        error, where = payload.get("error"), (name, stream, is_openai, status, str(payload)[:300])
        if name == "exact" or (name == "lag" and stream):
            assert status == (200 if stream else 409), where
            assert error is not None, where
            assert (error["type"], error["weight_version"]) == ("weight_version", 1), where
        else:
            assert (status, error) == (200, None), where
            if name != "none":
                assert versions_in(payload) == ["1"], where
