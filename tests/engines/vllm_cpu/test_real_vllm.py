"""Real vLLM on the CPU with our plugin: memory, pushes, fingerprints.

One server for the whole file.  A test that needs other weights than the one before pushes them; the
last one ends it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.kinds import KINDS
from engines.protocol.spec import spelled
from rollout.router.continuation.reply import Reply
from rollout.testing.tiny_model import make_tiny_model
from tests.engines.embedded.reference import greedy
from tests.rollout.router.continuation.replies import CHAT, COMPLETIONS, VLLM_GENERATE, read
from tests.support.contract import Models
from tests.support.processes import wait_until
from tests.support.real_vllm import (
    PROMPT,
    RealVllm,
    expected_fingerprints,
    real_vllm,
    write_buckets,
)
from tools.cpu_engines import install

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

KV_BYTES = install.OPTIONS["vllm"]["kv-cache-memory-bytes"]
# The model has 9.6 MB of weights; what else the processes take meanwhile is less than the rest.
WEIGHT_BYTES = 8 << 20


def test_the_options_that_are_known_are_those_of_the_pinned_server() -> None:
    code = (
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser())\n"
        "words = [word for one in parser._actions for word in one.option_strings]\n"
        "print(*(word[2:] for word in words if word.startswith(chr(45) * 2)))"
    )
    python, env = install.python_of("vllm"), os.environ | install.variables_of("vllm")
    asked = [python, "-c", code]
    printed = subprocess.run(asked, env=env, capture_output=True, text=True, check=True)
    known = {spelled(word) for word in printed.stdout.splitlines()[-1].split()} - {"help"}
    assert KINDS["vllm"].known_options() == known


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Heads of 64: the CPU kernels of vLLM know no smaller ones than 32."""
    root = tmp_path_factory.mktemp("models")
    first, second = (
        make_tiny_model(root / f"model-{seed}", "qwen3", seed, hidden_size=256, num_layers=4)
        for seed in (0, 1)
    )
    return Models(first, second)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealVllm]:
    with real_vllm(models.first, tmp_path_factory.mktemp("vllm")) as served:
        yield served


@pytest.fixture
def vllm(server: RealVllm, models: Models, tmp_path: Path) -> RealVllm:
    """It serves the first model."""
    if server.fingerprints() != expected_fingerprints(models.first):
        push(server, models.first, tmp_path / "first", "again")
    server.ask("/reset_prefix_cache")
    return server


def push(vllm: RealVllm, model: Path, folder: Path, version: str) -> None:
    vllm.update(*({"path": str(one)} for one in write_buckets(model, folder, 2)), version=version)


def refusal(vllm: RealVllm, path: str, body: object = None) -> str:
    answer = vllm.http.post(path, json=body)
    assert answer.status_code == 500
    return answer.text


def test_fingerprints_are_of_the_checkpoints_own_bytes(vllm: RealVllm, models: Models) -> None:
    assert vllm.fingerprints() == expected_fingerprints(models.first)
    listed = {one["name"]: one for one in vllm.call_worker("rollout_manifest")}
    assert listed.keys() == expected_fingerprints(models.first).keys()
    assert listed["lm_head.weight"] == {
        "name": "lm_head.weight",
        "dtype": "float32",
        "shape": [259, 256],
        "is_tied": False,
    }


def test_no_worker_polls_for_work_in_a_process_of_its_own(vllm: RealVllm) -> None:
    """Two that poll take the cores from every client: its aborts came after the last token."""
    config = vllm.http.get("/server_info", params={"config_format": "json"}).json()
    assert config["vllm_config"]["parallel_config"]["distributed_executor_backend"] == "uni"


def reply_to(path: str, raw: dict[str, Any]) -> Reply:
    reply = read(path, json.dumps(raw).encode(), dialects="vllm")
    assert reply is not None
    return reply


def ask_as_router(vllm: RealVllm, path: str, reply: Reply) -> list[Any]:
    """Absorb the events of this request, and return them."""
    headers = {"content-type": "application/json"}
    answer = vllm.http.post(path, content=reply.body(0, "vllm"), headers=headers)
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.content.split(b"\n") if line.startswith(b"data: {")]
    events = [json.loads(line[6:]) for line in lines]
    for event in events:
        reply.absorb(event)
    return events


def test_a_request_of_the_router_continues_on_vllms_own_route(vllm: RealVllm) -> None:
    sampling = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    raw = {"token_ids": list(PROMPT), "sampling_params": sampling}
    first, rest = reply_to(VLLM_GENERATE, raw), vllm.greedy(8)
    ask_as_router(vllm, VLLM_GENERATE, first)
    assert first.payload()["choices"][0]["token_ids"] == rest[:5]

    sampling["max_tokens"] = 8
    lost = reply_to(VLLM_GENERATE, raw)
    lost.body(0, "vllm")
    entries = first.payload()["choices"][0]["logprobs"]["content"]
    lost.absorb({"choices": [{"token_ids": rest[:5], "logprobs": {"content": entries}}]})
    assert lost.lose_engine() == ""
    ask_as_router(vllm, VLLM_GENERATE, lost)
    (choice,) = lost.payload()["choices"]
    assert choice["token_ids"] == rest
    assert len(choice["logprobs"]["content"]) == 8
    assert choice["finish_reason"] == "length"
    assert lost.num_kept == 5


def test_a_completion_of_the_router_has_its_ids(vllm: RealVllm) -> None:
    raw = {"model": str(vllm.model), "temperature": 0, "ignore_eos": True, "max_tokens": 8}
    raw |= {"prompt": list(PROMPT), "logprobs": 0, "return_token_ids": True}
    asked = reply_to(COMPLETIONS, raw)
    ask_as_router(vllm, COMPLETIONS, asked)
    (choice,) = asked.payload()["choices"]
    assert choice["token_ids"] == vllm.greedy(8)
    assert choice["prompt_token_ids"] == list(PROMPT)
    assert len(choice["logprobs"]["token_logprobs"]) == 8


def test_a_chat_continues_from_its_ids_at_every_event(vllm: RealVllm) -> None:
    """vLLM takes the ids in ``kv_transfer_params`` without a connector too."""
    asked = [[{"role": "user", "content": text}] for text in ("Hi", "one", "Say 3", "é")]
    begun = [*asked[0], {"role": "assistant", "content": "It is "}]
    common = {"model": str(vllm.model), "temperature": 0, "ignore_eos": True, "max_tokens": 8}
    kept = 0
    for messages in (*asked, begun):
        raw = {**common, "messages": messages, "logprobs": True}
        raw |= {"continue_final_message": True} if messages is begun else {}
        whole = reply_to(CHAT, raw)
        events = ask_as_router(vllm, CHAT, whole)
        (expected,) = whole.payload()["choices"]
        for cut in range(1, len(events) - 1):
            lost = reply_to(CHAT, raw)
            lost.body(0, "vllm")
            for event in events[:cut]:
                lost.absorb(event)
            if lost.is_finished:
                break
            assert lost.lose_engine() == ""
            kept += lost.num_kept
            ask_as_router(vllm, CHAT, lost)
            (choice,) = lost.payload()["choices"]
            assert choice["message"] == expected["message"]
            assert choice["finish_reason"] == "length"
            assert lost.all().ids == whole.all().ids
            logprobs, others = [
                [entry["logprob"] for entry in one["logprobs"]["content"]]
                for one in (expected, choice)
            ]
            assert others == pytest.approx(logprobs, abs=1e-4)
    assert kept > 20


def test_vllms_own_checksums_are_of_something(vllm: RealVllm) -> None:
    of_nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    checksums = vllm.ask("/weight_checker", json={"action": "checksum"})["checksums"]
    assert of_nothing not in checksums.values()


def test_a_push_in_parts_is_what_the_engine_then_computes_with(
    vllm: RealVllm, models: Models, tmp_path: Path
) -> None:
    assert vllm.greedy() == greedy(models.first, list(PROMPT), 8)
    vllm.ask("/pause", params={"mode": "abort"})
    vllm.ask("/start_weight_update")
    for folder in write_buckets(models.second, tmp_path, 3):
        vllm.ask("/update_weights", json={"update_info": {"path": str(folder)}})
        file = folder / "bucket.safetensors"  # the trainer's next bucket, in the same memory
        with file.open("r+b") as written:
            written.write(bytes(file.stat().st_size))
    assert vllm.info("/weight_info")["weight_version"] != "7"
    vllm.ask("/finish_weight_update", json={"weight_version": "7"})
    vllm.ask("/reset_prefix_cache")
    vllm.ask("/resume")
    assert vllm.info("/weight_info")["weight_version"] == "7"
    assert vllm.fingerprints() == expected_fingerprints(models.second)
    assert vllm.greedy() == greedy(models.second, list(PROMPT), 8)


def test_a_push_by_value_holds_the_file_itself(vllm: RealVllm, models: Models) -> None:
    content = (models.second / "model.safetensors").read_bytes()
    vllm.update({"content": base64.b64encode(content).decode()}, version="8")
    assert vllm.fingerprints() == expected_fingerprints(models.second)


def test_a_bucket_that_does_not_fit_is_refused_before_anything_changes(
    vllm: RealVllm, models: Models, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    def refused(name: str, tensors: dict[str, torch.Tensor]) -> str:
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "bucket.safetensors")
        vllm.ask("/start_weight_update")
        refusal(vllm, "/update_weights", {"update_info": {"path": str(folder)}})
        return vllm.log_tail()

    assert "the model has no tensor 'model.extra'" in refused(
        "unknown", {"model.extra": torch.ones(2)}
    )
    assert "'model.norm.weight' has shape [3]; the model takes [256]" in refused(
        "shape", {"model.norm.weight": torch.ones(3)}
    )
    vllm.ask("/start_weight_update")
    refusal(vllm, "/update_weights", {"update_info": {"path": str(tmp_path / "nothing")}})
    assert "no safetensors at" in vllm.log_tail()
    vllm.ask("/start_weight_update")
    refusal(vllm, "/update_weights", {"update_info": {"content": "AAAA"}})
    assert "it has only 3 bytes" in vllm.log_tail()
    assert vllm.fingerprints() == expected_fingerprints(models.first)
    assert vllm.greedy() == greedy(models.first, list(PROMPT), 8)


def test_half_a_layer_is_refused_at_the_end_and_the_next_push_works(
    vllm: RealVllm, models: Models, tmp_path: Path
) -> None:
    left_out = "model.layers.1.self_attn.k_proj.weight"
    [folder] = write_buckets(models.second, tmp_path / "half", 1, [left_out])
    vllm.ask("/start_weight_update")
    vllm.ask("/update_weights", json={"update_info": {"path": str(folder)}})
    refusal(vllm, "/finish_weight_update", {"weight_version": "9"})
    assert f"a part of a layer was not pushed: {left_out}; push the whole layer" in vllm.log_tail()
    assert vllm.info("/weight_info")["weight_version"] != "9"
    push(vllm, models.second, tmp_path / "whole", "10")
    assert vllm.info("/weight_info")["weight_version"] == "10"
    assert vllm.fingerprints() == expected_fingerprints(models.second)


def test_a_worker_on_a_cpu_refuses_handles_in_words(vllm: RealVllm, models: Models) -> None:
    handles = {"layout": {"a": {}}, "handles": {"11111111-aaaa": {}}}
    vllm.ask("/start_weight_update")
    refusal(vllm, "/update_weights", {"update_info": handles})
    assert "CUDA IPC handles came to a worker on cpu, which cannot open them" in vllm.log_tail()
    assert vllm.fingerprints() == expected_fingerprints(models.first)


def test_level_1_frees_memory_and_brings_the_weights_back(vllm: RealVllm, models: Models) -> None:
    held = vllm.resident_bytes()
    vllm.sleep(1)
    vllm.sleep(2)  # answered and ignored
    assert vllm.call_worker("rollout_state") == {
        "released": ["kv_cache", "weights"],
        "resident_bytes": {"weights": 0, "kv_cache": 0},
        "fingerprints": "xxh3",
        "opens_handles": False,
        "encodings": ["delta"],
        "groups": [],
    }
    assert held - vllm.resident_bytes() > KV_BYTES * 0.9
    vllm.wake_up("weights")
    assert vllm.fingerprints() == expected_fingerprints(models.first)
    assert vllm.call_worker("rollout_state")["released"] == ["kv_cache"]
    vllm.wake_up("kv_cache")
    assert vllm.info("/is_paused") == {"is_paused": False}  # the last tag resumes
    assert vllm.greedy() == greedy(models.first, list(PROMPT), 8)


def test_level_2_loses_the_weights_and_only_a_whole_push_ends_that(
    vllm: RealVllm, models: Models, tmp_path: Path
) -> None:
    vllm.sleep(2)
    asleep = vllm.resident_bytes()
    refusal(vllm, "/start_weight_update")
    assert "the weights are released; call /wake_up?tags=weights first" in vllm.log_tail()
    vllm.wake_up("weights")
    assert vllm.resident_bytes() - asleep > WEIGHT_BYTES
    lost = vllm.fingerprints()
    assert all(lost[name] != text for name, text in expected_fingerprints(models.first).items())

    names = [f"model.layers.2.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    [part] = write_buckets(models.second, tmp_path / "part", 1, names)
    vllm.ask("/start_weight_update")
    vllm.ask("/update_weights", json={"update_info": {"path": str(part)}})
    refusal(vllm, "/finish_weight_update", {"weight_version": "11"})
    assert "released without a backup, and 3 of" in vllm.log_tail()
    push(vllm, models.second, tmp_path / "whole", "12")
    assert vllm.fingerprints() == expected_fingerprints(models.second)
    vllm.wake_up("kv_cache")
    assert vllm.greedy() == greedy(models.second, list(PROMPT), 8)


def test_the_kv_cache_can_be_released_alone(vllm: RealVllm, models: Models) -> None:
    vllm.ask("/pause", params={"mode": "abort"})
    vllm.ask("/release_kv_cache_memory")
    state = vllm.call_worker("rollout_state")
    assert state["released"] == ["kv_cache"]
    assert state["resident_bytes"]["kv_cache"] == 0
    assert vllm.fingerprints() == expected_fingerprints(models.first)
    vllm.wake_up("kv_cache")
    vllm.ask("/resume")
    assert vllm.greedy() == greedy(models.first, list(PROMPT), 8)


def test_a_pause_that_waits_has_no_end(vllm: RealVllm) -> None:
    with endless_request(vllm) as asked:
        with pytest.raises(httpx.ReadTimeout):
            vllm.http.post("/pause", params={"mode": "wait"}, timeout=1.0)
        vllm.ask("/abort_requests", json={})
        assert asked.result(60).json()["choices"][0]["finish_reason"] == "abort"
    vllm.ask("/resume")
    assert len(vllm.greedy()) == 8


@pytest.mark.chaos
def test_a_request_while_an_update_is_open_ends_the_engine(models: Models, tmp_path: Path) -> None:
    """Without a pause: its layers are elsewhere meanwhile, and the update is never answered."""
    with real_vllm(models.first, tmp_path) as vllm, endless_request(vllm) as asked:
        vllm.ask("/start_weight_update")
        answer = asked.result(60)
        assert answer.status_code == 500
        assert "EngineCore encountered an issue" in answer.text
        assert "Meta tensors" in vllm.log_tail()


@contextmanager
def endless_request(vllm: RealVllm) -> Iterator[Future[httpx.Response]]:
    """A request that is generating, and takes much longer than a test."""
    sampling = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": list(PROMPT), "sampling_params": sampling}
    running = re.compile(r"^vllm:num_requests_running(?:\{[^}]*\})? 1\.0$", re.MULTILINE)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(vllm.http.post, "/inference/v1/generate", json=body)
        assert wait_until(
            lambda: asked.done() or bool(running.search(vllm.http.get("/metrics").text)), 60
        )
        assert not asked.done(), asked.result().text
        yield asked


def test_what_touches_released_weights_ends_the_engine(vllm: RealVllm) -> None:
    """As on a GPU; the last test, for nothing serves after it.

    vLLM's server closes its port.  It waits for the call in which its engine core died, and so
    neither answers that call nor exits.
    """
    vllm.sleep(2)
    with pytest.raises(httpx.TransportError):
        vllm.http.post("/weight_checker", json={"action": "checksum"}, timeout=10)
    assert wait_until(lambda: not serves(vllm), 60)
    assert "EngineDeadError" in vllm.log_tail()


def serves(vllm: RealVllm) -> bool:
    try:
        return vllm.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False
