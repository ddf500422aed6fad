"""Every method against the path, method and body SGLang 0.5.23 expects, and its answers."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.http.client import EngineClient
from engines.protocol import (
    Endpoint,
    Engine,
    FinishReason,
    MemoryTag,
    PauseMode,
    SamplingParams,
    TensorInfo,
    VersionSpan,
)
from engines.protocol.errors import EngineRejected, EngineUnreachable
from tests.support.asking import asking

DONE = {"success": True, "message": ""}
ONE_RANK = {"version": "0.5.23", "tp_size": 1, "pp_size": 1}
COMPLETION = {
    "text": " four",
    "output_ids": [3116],
    "meta_info": {
        "id": "r-1",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 5,
        "completion_tokens": 1,
        "cached_tokens": 4,
        "weight_version": 7,
        "weight_versions": [{"version": "7", "start": 0, "end": 1}],
        "output_token_logprobs": [[-0.5, 3116, None]],
    },
}


@dataclass
class Case:
    name: str
    call: Callable[[EngineClient], Awaitable[Any]]
    path: str
    body: dict[str, Any] | None
    answer: Any = field(default_factory=lambda: DONE)
    result: Any = None


ORDERS = [
    Case(
        "pause_in_place",
        lambda c: c.pause_generation(PauseMode.IN_PLACE),
        "/pause_generation",
        {"mode": "in_place"},
        {"status": "ok"},
    ),
    Case(
        "pause", lambda c: c.pause_generation(), "/pause_generation", {"mode": "abort"}, {"ok": 1}
    ),
    Case("continue", lambda c: c.continue_generation(), "/continue_generation", {}, {"ok": 1}),
    Case("flush", lambda c: c.flush_cache(), "/flush_cache", {}, "Cache flushed.\n"),
    Case("flush_waiting", lambda c: c.flush_cache(2.5), "/flush_cache?timeout=2.5", {}, "ok"),
    Case("abort_all", lambda c: c.abort_request(), "/abort_request", {"abort_all": True}, ""),
    Case("abort_one", lambda c: c.abort_request("r-1"), "/abort_request", {"rid": "r-1"}, ""),
    Case(
        "release",
        lambda c: c.release_memory_occupation([MemoryTag.KV_CACHE, MemoryTag.WEIGHTS]),
        "/release_memory_occupation",
        {"tags": ["kv_cache", "weights"]},
        "null",
    ),
    Case(
        "resume",
        lambda c: c.resume_memory_occupation([MemoryTag.CUDA_GRAPH]),
        "/resume_memory_occupation",
        {"tags": ["cuda_graph"]},
        "null",
    ),
]
CHANGES = [
    Case("begin", lambda c: c.begin_weight_update(), "/begin_weight_update", {}),
    Case("end", lambda c: c.end_weight_update(), "/end_weight_update", {}),
    Case(
        "tensor",
        lambda c: c.update_weights_from_tensor(["QUJD"]),
        "/update_weights_from_tensor",
        {"serialized_named_tensors": ["QUJD"], "flush_cache": True},
    ),
    Case(
        "tensor_bucket",
        lambda c: c.update_weights_from_tensor(
            ["QUJD"], load_format="flattened_bucket", flush_cache=False, weight_version="8"
        ),
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": ["QUJD"],
            "flush_cache": False,
            "load_format": "flattened_bucket",
            "weight_version": "8",
        },
    ),
    Case(
        "init_group",
        lambda c: c.init_weights_update_group(
            master_address="10.0.0.1",
            master_port=29000,
            rank_offset=1,
            world_size=3,
            group_name="push",
            backend="gloo",
        ),
        "/init_weights_update_group",
        {
            "master_address": "10.0.0.1",
            "master_port": 29000,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "push",
            "backend": "gloo",
        },
    ),
    Case(
        "destroy_group",
        lambda c: c.destroy_weights_update_group("push"),
        "/destroy_weights_update_group",
        {"group_name": "push"},
    ),
    Case(
        "distributed",
        lambda c: c.update_weights_from_distributed(
            names=["w"], dtypes=["float32"], shapes=[(2, 3)], group_name="push", flush_cache=False
        ),
        "/update_weights_from_distributed",
        {
            "names": ["w"],
            "dtypes": ["float32"],
            "shapes": [[2, 3]],
            "group_name": "push",
            "flush_cache": False,
        },
    ),
    Case(
        "disk",
        lambda c: c.update_weights_from_disk("model", weight_version="9"),
        "/update_weights_from_disk",
        {
            "model_path": "model",
            "load_format": "auto",
            "flush_cache": True,
            "weight_version": "9",
        },
    ),
    Case(
        "version",
        lambda c: c.update_weight_version("9"),
        "/update_weight_version",
        {"new_version": "9", "abort_all_requests": False},
    ),
    Case(
        "checker",
        lambda c: c.weights_checker("reset_tensors"),
        "/weights_checker",
        {"action": "reset_tensors"},
    ),
    Case(
        "load_lora",
        lambda c: c.load_lora_adapter("a", "adapters/a"),
        "/load_lora_adapter",
        {"lora_name": "a", "lora_path": "adapters/a"},
    ),
    Case(
        "load_lora_from_tensors",
        lambda c: c.load_lora_adapter_from_tensors("a", {"r": 8}, ["QUJD"]),
        "/load_lora_adapter_from_tensors",
        {"lora_name": "a", "config_dict": {"r": 8}, "serialized_named_tensors": ["QUJD"]},
    ),
    Case(
        "unload_lora",
        lambda c: c.unload_lora_adapter("a"),
        "/unload_lora_adapter",
        {"lora_name": "a"},
    ),
]
GENERATIONS = [
    Case(
        "generate_text",
        lambda c: c.generate(text="2+2"),
        "/generate",
        {"text": "2+2", "sampling_params": {"max_new_tokens": 128}},
        COMPLETION,
    ),
    Case(
        "generate_ids",
        lambda c: c.generate(
            input_ids=(1, 2),
            sampling_params=SamplingParams(max_new_tokens=4, stop=("\n",)),
            rid="r-1",
            return_logprob=True,
        ),
        "/generate",
        {
            "input_ids": [1, 2],
            "sampling_params": {"max_new_tokens": 4, "stop": ["\n"]},
            "rid": "r-1",
            "return_logprob": True,
        },
        COMPLETION,
    ),
    Case(
        "generate_logprobs_of_the_prompt",
        lambda c: c.generate(
            input_ids=(1, 2), return_logprob=True, logprob_start_len=0, lora_path="mine"
        ),
        "/generate",
        {
            "input_ids": [1, 2],
            "sampling_params": {"max_new_tokens": 128},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": "mine",
        },
        COMPLETION,
    ),
]
QUESTIONS = [
    Case(
        "weight_version",
        lambda c: c.weight_version(),
        "/model_info",
        None,
        {"model_path": "m", "weight_version": "3"},
        "3",
    ),
    Case(
        "endpoints",
        lambda c: c.endpoints(),
        "/openapi.json",
        None,
        {"paths": {"/ready": {}, "/generate": {}}},
        frozenset({"/ready", "/generate"}),
    ),
    Case(
        "manifest",
        lambda c: c.weights_manifest(),
        "/weights_manifest",
        None,
        [{"name": "w", "dtype": "float32", "shape": [2, 3]}],
        (TensorInfo("w", "float32", (2, 3)),),
    ),
    Case("ready", lambda c: c.is_ready(), "/ready", None, "", True),
    Case("healthy", lambda c: c.is_healthy(), "/health", None, "", True),
]


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@named(ORDERS + CHANGES + GENERATIONS)
async def test_what_changes_something_is_posted_with_a_json_body(case: Case):
    async with asking(case.answer, info=ONE_RANK) as (client, requests):
        await case.call(client)
    request, *more = requests
    assert {one.path for one in more} <= {"/server_info"}
    assert (request.method, request.path) == ("POST", case.path)
    assert json.loads(request.content) == case.body
    assert request.headers["content-type"] == "application/json"


@pytest.mark.parametrize("name", ["disk", "release"])
@pytest.mark.parametrize(
    ("sizes", "num_asked"),
    [
        ({"tp_size": 1, "pp_size": 1}, 0),
        ({"tp_size": 2, "pp_size": 1}, 1),
        ({"tp_size": 8, "pp_size": 1}, 3),
        ({"tp_size": 5, "pp_size": 1}, 3),
        ({"tp_size": 1, "pp_size": 3}, 5),
        ({"tp_size": 8, "pp_size": 2}, 6),
        ({"tp_size": 8, "pp_size": 2, "engine": "embedded"}, 0),
    ],
)
async def test_what_the_first_rank_answers_for_all_ends_when_all_have_done_it(
    name: str, sizes: dict[str, Any], num_asked: int
):
    (case,) = [one for one in ORDERS + CHANGES if one.name == name]
    async with asking(case.answer, info={"version": "0.5.23", **sizes}) as (client, requests):
        await client.server_info()
        requests.clear()
        await case.call(client)
    assert [one.path for one in requests] == [case.path] + ["/server_info"] * num_asked


async def test_if_the_other_ranks_cannot_be_waited_for_it_may_have_been_done():
    async with asking(DONE, info="<html>") as (client, _):
        with pytest.raises(EngineUnreachable, match="done by the first rank; of the others") as at:
            await client.update_weights_from_disk("model")
    assert at.value.maybe_executed
    assert at.value.operation == "update_weights_from_disk"


@named(QUESTIONS)
async def test_a_question_is_a_get_and_its_answer_is_read(case: Case):
    async with asking(case.answer) as (client, requests):
        assert await case.call(client) == case.result
    (request,) = requests
    assert (request.method, request.path) == ("GET", case.path)


@named(ORDERS + CHANGES + GENERATIONS + QUESTIONS)
async def test_an_error_status_is_a_rejection_that_quotes_the_engine(case: Case):
    async with asking("not now\n", status=400, engine_id="decode-1") as (client, _):
        with pytest.raises(EngineRejected, match=r"answered 400 after 0\.\d s: not now") as caught:
            await case.call(client)
    assert (caught.value.status, caught.value.engine) == (400, "decode-1")
    assert str(caught.value).startswith(f"engine decode-1: {caught.value.operation} ")


@named(ORDERS + CHANGES)
async def test_a_200_that_says_failure_is_a_rejection(case: Case):
    async with asking({"success": False, "message": "bad shape"}) as (client, _):
        with pytest.raises(EngineRejected, match="bad shape") as caught:
            await case.call(client)
    assert caught.value.status == 200


@named(CHANGES + GENERATIONS + QUESTIONS[:3])
@pytest.mark.parametrize("answer", ["<html>", "null", "7", "[]x"])
async def test_an_answer_of_another_shape_is_a_rejection(case: Case, answer: str):
    async with asking(answer) as (client, _):
        with pytest.raises(EngineRejected, match="not understood"):
            await case.call(client)


def test_the_tables_hold_every_method_of_the_protocol():
    told = {case.path.lstrip("/").partition("?")[0] for case in ORDERS + CHANGES + GENERATIONS}
    asked = {"is_ready", "is_healthy", "model_info", "server_info", "loads", "weight_version"}
    asked |= {"weights_manifest", "process_start"}
    elsewhere = {"aclose", "authorize", "endpoints", "stream_generate"}
    methods = {name for name in vars(Engine) if not name.startswith("_")}
    assert methods == told | asked | elsewhere


def test_the_client_is_an_engine():
    engine: Engine = EngineClient(Endpoint("127.0.0.1", 20000))
    assert engine is not None


async def test_a_completion_is_read_with_all_its_accounting():
    async with asking(COMPLETION) as (client, _):
        reply = await client.generate(text="2+2")
    assert (reply.rid, reply.text, reply.output_ids) == ("r-1", " four", (3116,))
    assert reply.output_logprobs == (-0.5,)
    assert reply.finish_reason == FinishReason("stop", matched=2)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (5, 1, 4)
    assert reply.weight_version == "7"
    assert reply.weight_versions == (VersionSpan("7", 0, 1),)


async def test_an_aborted_completion_without_tokens_is_read():
    reason = {"type": "abort", "message": "Aborted"}
    answer = {"text": "", "meta_info": {"id": "r-1", "finish_reason": reason}}
    async with asking(answer) as (client, _):
        reply = await client.generate(text="2+2")
    assert reply.finish_reason == FinishReason("abort", message="Aborted")
    assert (reply.output_ids, reply.output_logprobs) == ((), None)


async def test_server_info_tells_whether_memory_is_really_released():
    answer = {"version": "0.5.23", "enable_memory_saver": True, "tp_size": 2}
    async with asking(answer) as (client, _):
        info = await client.server_info()
    assert (info.version, info.engine) == ("0.5.23", "sglang")
    assert (info.enable_memory_saver, info.enable_weights_cpu_backup) == (True, False)
    assert info.raw["tp_size"] == 2


async def test_loads_are_summed_over_ranks():
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 3}
    async with asking({"loads": [rank, rank]}) as (client, _):
        loads = await client.loads()
    assert (loads.num_running_reqs, loads.num_waiting_reqs) == (4, 6)
    assert (loads.tokens_per_s, loads.num_output_tokens) == (None, None)


async def test_throughput_and_tokens_of_loads_are_summed_over_ranks():
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 0}
    rank |= {"gen_throughput": 10.5, "num_output_tokens": 7}
    async with asking({"loads": [rank, rank]}) as (client, _):
        loads = await client.loads()
    assert (loads.tokens_per_s, loads.num_output_tokens) == (21.0, 14)


async def test_drafts_of_loads_are_counted_or_those_of_an_interval():
    rank = {"num_running_reqs": 1, "num_waiting_reqs": 0}
    counted = rank | {"num_drafted": 30, "num_accepted": 20}
    async with asking({"loads": [counted, counted]}) as (client, _):
        loads = await client.loads()
    assert (loads.num_drafted, loads.num_accepted, loads.accepted_share) == (60, 40, None)
    # As LoadSnapshot.to_dict of SGLang 0.5.23 has them.
    ranks = [rank | {"speculative": {"accept_length": 2.5, "accept_rate": at}} for at in (0.5, 0.7)]
    async with asking({"loads": ranks}) as (client, _):
        loads = await client.loads()
    assert (loads.num_drafted, loads.accepted_share) == (None, pytest.approx(0.6))
    assert loads.interval == "[(0.5, 2.5), (0.7, 2.5)]"
    async with asking({"loads": [rank]}) as (client, _):
        loads = await client.loads()
    assert (loads.num_drafted, loads.accepted_share) == (None, None)


async def test_an_engine_without_requests_generates_no_tokens():
    rank = {"num_running_reqs": 0, "num_waiting_reqs": 0, "gen_throughput": 0.0}
    async with asking({"loads": [rank]}) as (client, _):
        assert (await client.loads()).tokens_per_s == 0


async def test_a_weights_report_holds_the_digests_of_every_rank():
    ranks = [{"checksums": {"w": "ab"}, "per_gpu_checksum": "cd"}]
    async with asking(DONE | {"ranks": ranks, "per_engine_checksum": "ef"}) as (client, _):
        report = await client.weights_checker()
    assert (report.checksum, report.tensors) == ("ef", ({"w": "ab"},))
    assert report.why_partial == ""


async def test_a_report_of_one_of_two_pipeline_stages_says_so():
    """As SGLang 0.5.23 answers with ``--pp-size 2``."""
    info = {"role": "target", "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 2}
    rank = {"checksums": {"w": "ab"}, "parallelism_info": [info]}
    async with asking(DONE | {"ranks": [rank]}) as (client, _):
        report = await client.weights_checker()
    assert report.why_partial == "it reports fingerprints of 1 of its 2 pipeline stages"
    ranks = [rank, {**rank, "parallelism_info": [{**info, "pp_rank": 1}]}]
    async with asking(DONE | {"ranks": ranks}) as (client, _):
        assert (await client.weights_checker()).why_partial == ""


@pytest.mark.parametrize("probe", ["is_ready", "is_healthy"])
async def test_a_503_is_a_no_and_anything_else_unknown_is_an_error(probe: str):
    async with asking(status=503) as (client, _):
        assert await getattr(client, probe)() is False
    async with asking(status=404) as (client, _):
        with pytest.raises(EngineRejected, match="404"):
            await getattr(client, probe)()


@pytest.mark.parametrize(
    "prompt",
    [{}, {"text": "a", "input_ids": [1]}, {"text": "a", "sampling_params": SamplingParams(n=2)}],
)
async def test_a_request_that_has_no_single_completion_is_refused_unsent(prompt: dict[str, Any]):
    async with asking(COMPLETION) as (client, requests):
        with pytest.raises(ValueError, match="generate"):
            await client.generate(**prompt)
    assert requests == []


async def test_a_long_body_is_cut_for_the_log():
    async with asking("x" * 9000, status=500) as (client, _):
        with pytest.raises(EngineRejected) as caught:
            await client.flush_cache()
    assert len(caught.value.body) < 520
    assert len(str(caught.value)) < 700


async def test_what_a_long_value_cannot_be_read_as_is_cut_too():
    meta = COMPLETION["meta_info"] | {"output_token_logprobs": [["x" * 9000, 1, None]]}
    async with asking(COMPLETION | {"meta_info": meta}) as (client, _):
        with pytest.raises(EngineRejected, match="could not convert string to float") as caught:
            await client.generate(input_ids=[1], sampling_params=SamplingParams())
    assert len(str(caught.value)) < 1000


async def test_what_an_engine_says_of_an_abort_is_cut():
    meta = COMPLETION["meta_info"] | {"finish_reason": {"type": "abort", "message": "x" * 9000}}
    async with asking(COMPLETION | {"meta_info": meta}) as (client, _):
        reply = await client.generate(input_ids=[1], sampling_params=SamplingParams())
    assert reply.finish_reason == FinishReason("abort", message="x" * 497 + "...")


async def test_a_body_of_many_pieces_arrives_whole_and_with_its_length():
    payload = "x" * 5_000_001
    async with asking(DONE) as (client, requests):
        await client.update_weights_from_tensor([payload])
    (request,) = requests
    assert json.loads(request.content)["serialized_named_tensors"] == [payload]
    assert request.headers["content-length"] == str(len(request.content))
    assert "transfer-encoding" not in request.headers


async def test_the_keys_that_sglang_reports_are_in_no_info():
    secrets = {"api_key": "hush", "admin_api_key": "hush", "launch_command": "--api-key hush"}
    states = [{"server_args": {**secrets, "tp_size": 1}, "memory_usage": {}}]
    answer = {"version": "0.5.23", "internal_states": states, "tp_size": 1, **secrets}
    async with asking(answer) as (engine, _):
        info = await engine.server_info()
    assert info.raw["internal_states"][0]["server_args"] == {"tp_size": 1}
    assert "hush" not in repr(info)
