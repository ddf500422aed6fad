"""The client of vLLM over a stub: what it sends, in which order, and refuses."""

from __future__ import annotations

import asyncio
import base64
import math
import pickle
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeTensor, faults, pack_tensors
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, write_checkpoint
from engines.kinds import KINDS
from engines.protocol import Endpoint, MemoryTag, PauseMode, SamplingParams
from engines.protocol.errors import EngineRejected
from engines.vllm import vllm_json
from engines.vllm.client import VllmClient
from engines.vllm.server_report import read_server_info
from engines.vllm.update_info import update_info
from tests.support.contract import features_of
from tests.support.vllm_stub.asking import admitted, generating, stub_with
from tests.support.vllm_stub.stub import StubVllm
from tests.support.vllm_stub.wire import connect_to_stub

W, KV, GRAPH = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
PROMPT = (5, 6, 7)
SHORT = SamplingParams(max_new_tokens=4, temperature=0.0)
LONG = SamplingParams(max_new_tokens=200, temperature=0.0)


def payload(version: float) -> list[str]:
    tensors = {one.name: FakeTensor(one.shape, version) for one in DEFAULT_TENSORS}
    return [base64.b64encode(pack_tensors(tensors)).decode()]


async def push(client: VllmClient, version: str) -> None:
    await client.begin_weight_update()
    await client.update_weights_from_tensor(payload(float(version)), weight_version=version)
    await client.end_weight_update()


@pytest.mark.parametrize(
    ("reported", "found"),
    [
        ({"method": "eagle3", "model": "/draft", "num_speculative_tokens": 2}, "/draft"),
        ({"method": "mtp", "model": None}, "mtp"),
        ({"method": "ngram", "model": "ngram"}, ""),
        (None, ""),
    ],
)
def test_a_server_reports_its_draft(reported: dict[str, Any] | None, found: str) -> None:
    config = {
        "model_config": {"model": "/m", "enable_sleep_mode": True},
        "parallel_config": {},
        "speculative_config": reported,
    }
    info = read_server_info("0.32.0", {"vllm_config": config})
    assert KINDS["vllm"].draft(info.raw) == found


def test_drafted_tokens_are_counted_over_all_replicas() -> None:
    names = ("draft", "accepted")
    lines = [
        f'vllm:spec_decode_num_{name}_tokens_total{{engine="{rank}",model_name="/m"}} {number}'
        for rank, numbers in enumerate([("1.2e+06", "3.0"), ("30.0", "20.0")])
        for name, number in zip(names, numbers, strict=True)
    ]
    lines.append('vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 7.0')
    loads = vllm_json.read_loads("\n".join(lines))
    assert (loads.num_drafted, loads.num_accepted) == (1_200_030, 23)
    assert vllm_json.read_loads("").num_drafted is None


@pytest.mark.parametrize(("num_front_ends", "is_known"), [(None, True), (1, True), (2, False)])
def test_a_start_of_vllm_is_known_by_what_its_one_front_end_made(
    num_front_ends: int | None, is_known: bool
) -> None:
    def start(name: str) -> str:
        parallel = {} if num_front_ends is None else {"_api_process_count": num_front_ends}
        config = {"model_config": {"model": "/m"}, "parallel_config": parallel}
        return read_server_info("0.32.0", {"vllm_config": config | {"instance_id": name}}).start

    assert bool(start("1700000000000")) is is_known
    assert (start("1700000000000") != start("1700000000001")) is is_known
    assert start("") == ""


async def test_it_is_still_paused_after_the_last_memory_is_awake() -> None:
    engine = StubVllm()
    client = connect_to_stub(engine)
    await client.pause_generation()
    await client.release_memory_occupation([W, KV, GRAPH])
    assert engine.level == 2
    await client.resume_memory_occupation([W])
    await push(client, "1")
    await client.resume_memory_occupation([KV, GRAPH])
    assert not await client.is_ready()
    assert not engine.weights_are_garbage
    await client.continue_generation()
    assert await client.is_ready()


async def test_weights_are_woken_before_the_cache() -> None:
    engine = StubVllm(weights_cpu_backup=True)
    client = connect_to_stub(engine)
    await client.release_memory_occupation([W, KV])
    assert engine.level == 1
    await client.resume_memory_occupation([KV, W])
    woken = [
        call.arguments["tags"]
        for call in engine.calls
        if call.operation == "resume_memory_occupation"
    ]
    assert woken[0] == (W,)


async def test_kept_requests_survive_a_release_and_go_on() -> None:
    engine = StubVllm(token_s=0.001, weights_cpu_backup=True)
    client = connect_to_stub(engine)
    long = SamplingParams(max_new_tokens=50)
    whole = await client.generate(input_ids=PROMPT, sampling_params=long)
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=long))
    await admitted(engine)
    await client.pause_generation(PauseMode.RETRACT)
    await client.flush_cache()
    await client.release_memory_occupation([W, KV])
    await client.resume_memory_occupation([W])
    await client.resume_memory_occupation([KV])
    await client.continue_generation()
    assert (await running).output_ids == whole.output_ids


async def test_a_version_is_published_when_the_update_is_finished() -> None:
    client = connect_to_stub(StubVllm())
    await client.begin_weight_update()
    await client.update_weights_from_tensor(payload(7), weight_version="7")
    assert await client.weight_version() == "0"
    await client.end_weight_update()
    assert await client.weight_version() == "7"


async def test_a_push_without_a_pause_has_one_of_its_own() -> None:
    """A token between start and finish would end the server."""
    engine = StubVllm(token_s=0.001)
    client = connect_to_stub(engine)
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=LONG))
    await generating(engine)
    await push(client, "1")
    assert "pause_generation" in engine.operations()
    assert await client.is_ready()
    old, new = (await running).weight_versions
    assert (old.version, old.start, new.version) == ("0", 0, "1")
    assert (new.start, new.end) == (old.end, LONG.max_new_tokens)
    assert not engine.is_cache_stale


async def test_a_push_from_files_without_a_pause_has_one_of_its_own(tmp_path: Path) -> None:
    engine = StubVllm(token_s=0.001)
    client = connect_to_stub(engine)
    folder = str(write_checkpoint(tmp_path))
    running = asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=LONG))
    await generating(engine)
    await client.update_weights_from_disk(folder, flush_cache=False)
    assert not await client.is_ready()
    await client.update_weights_from_disk(folder, weight_version="1")
    assert await client.is_ready()
    assert [span.version for span in (await running).weight_versions] == ["0", "1"]


async def test_a_push_in_a_pause_leaves_it_paused() -> None:
    client = connect_to_stub(StubVllm())
    await client.pause_generation()
    await push(client, "1")
    assert not await client.is_ready()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_push_that_is_not_whole_leaves_it_paused(fails: bool) -> None:
    engine = StubVllm()
    client = connect_to_stub(engine)
    await client.begin_weight_update()
    if fails:
        engine.faults.strike("update_weights_from_tensor", faults.reject())
        with pytest.raises(EngineRejected):
            await client.update_weights_from_tensor(payload(1), weight_version="1")
    else:
        await client.update_weights_from_tensor(payload(1), flush_cache=False)
    await client.end_weight_update()
    assert not await client.is_ready()
    await push(client, "2")
    assert await client.is_ready()


async def test_buckets_from_files_are_one_session(tmp_path: Path) -> None:
    engine = StubVllm()
    client = connect_to_stub(engine)
    folder = str(write_checkpoint(tmp_path))
    for version in ("1", "2"):
        await client.update_weights_from_disk(folder, flush_cache=False)
        await client.update_weights_from_disk(folder, weight_version=version)
        assert await client.weight_version() == version
    assert engine.operations().count("begin_weight_update") == 2
    assert not engine.is_cache_stale


async def test_a_push_from_files_that_was_given_up_does_not_block_the_next(tmp_path: Path) -> None:
    client = connect_to_stub(StubVllm())
    folder = str(write_checkpoint(tmp_path))
    await client.update_weights_from_disk(folder, flush_cache=False)
    await push(client, "3")
    assert await client.weight_version() == "3"


async def test_a_flush_is_repeated_until_nothing_holds_the_cache() -> None:
    engine = StubVllm(token_s=0.001)
    client = connect_to_stub(engine)
    running = asyncio.create_task(
        client.generate(input_ids=PROMPT, sampling_params=SamplingParams(max_new_tokens=100))
    )
    await admitted(engine)
    with pytest.raises(EngineRejected, match="requests still hold the cache"):
        await client.flush_cache()
    await client.flush_cache(timeout_s=20)
    assert engine.operations().count("flush_cache") > 2
    await running


async def test_a_completion_has_tokens_logprobs_and_versions() -> None:
    client = connect_to_stub(StubVllm())
    reply = await client.generate(
        input_ids=PROMPT,
        sampling_params=SHORT,
        rid="mine",
        return_logprob=True,
        logprob_start_len=0,
    )
    assert (reply.rid, reply.completion_tokens, reply.prompt_tokens) == ("mine", 4, 3)
    assert reply.output_logprobs == (-1.0,) * 4
    assert reply.input_logprobs is not None
    assert len(reply.input_logprobs) == 2
    assert [(one.version, one.start, one.end) for one in reply.weight_versions] == [("0", 0, 4)]
    streamed = [
        one async for one in client.stream_generate(input_ids=PROMPT, sampling_params=SHORT)
    ]
    assert [len(one.output_ids) for one in streamed] == [1, 2, 3, 4]
    assert streamed[-1].output_ids == reply.output_ids
    assert streamed[-1].finish_reason is not None


async def test_a_request_for_no_tokens_is_one_that_vllm_takes() -> None:
    """vLLM 0.32 refuses ``max_tokens`` 0."""
    client = connect_to_stub(StubVllm())
    reply = await client.generate(
        input_ids=PROMPT,
        sampling_params=SamplingParams(max_new_tokens=0),
        return_logprob=True,
        logprob_start_len=0,
    )
    assert (await client.loads()).num_output_tokens == 1
    assert (reply.output_ids, reply.output_logprobs, reply.weight_versions) == ((), (), ())
    assert reply.completion_tokens == 0
    assert reply.input_logprobs is not None


async def test_an_abort_names_the_request_as_the_server_does() -> None:
    engine = StubVllm(token_s=0.001)
    client = connect_to_stub(engine)
    long = SamplingParams(max_new_tokens=10_000)
    one, ten = (
        asyncio.create_task(client.generate(input_ids=PROMPT, sampling_params=long, rid=rid))
        for rid in ("p-1", "p-10")
    )
    await admitted(engine, 2)
    await client.abort_request("p-1")
    reason = (await one).finish_reason
    assert reason is not None
    assert reason.kind == "abort"
    assert not ten.done()
    await client.abort_request()
    await ten


@pytest.mark.parametrize("has_plugin", [True, False])
async def test_the_checker_sees_what_changed(has_plugin: bool) -> None:
    client = connect_to_stub(stub_with(has_plugin=has_plugin))
    first = await client.weights_checker()
    await client.weights_checker("snapshot")
    await client.weights_checker("compare")
    await client.weights_checker("snapshot")
    await client.weights_checker("reset_tensors")
    with pytest.raises(EngineRejected, match="differ"):
        await client.weights_checker("compare")
    assert (await client.weights_checker()).checksum != first.checksum
    assert len(first.tensors) == 1


def test_the_tensors_of_all_pipeline_stages_are_listed_once() -> None:
    def listed(name: str, *, is_tied: bool = False) -> dict[str, Any]:
        return {"name": name, "dtype": "float32", "shape": [2, 3], "is_tied": is_tied}

    first = [listed("embed"), listed("layers.0")]
    last = [listed("embed"), listed("layers.1"), listed("head", is_tied=True)]
    found = vllm_json.read_manifest({"results": [first, last]})
    assert [(one.name, one.is_tied) for one in found] == [
        ("embed", False),
        ("layers.0", False),
        ("layers.1", False),
        ("head", True),
    ]
    # Where a worker has its part of each tensor, or names of vLLM's own, it lists none.
    assert vllm_json.read_manifest({"results": [first, []]}) == ()


def test_the_checksum_of_nothing_is_refused() -> None:
    answer = {"checksums": {"dp0:pp0:pcp0:tp0:lm_head.weight": vllm_json.EMPTY_CHECKSUM}}
    with pytest.raises(ValueError, match="equal checksums say nothing"):
        vllm_json.read_checksums(answer)


async def test_a_server_without_dev_mode_says_what_would_help() -> None:
    client = connect_to_stub(stub_with(without=frozenset({"/server_info"})))
    with pytest.raises(EngineRejected, match="VLLM_SERVER_DEV_MODE=1"):
        await client.server_info()


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"vllm_version": "0.26.1"}, "this drives vLLM 0.27 and later, below 0.34"),
        ({"vllm_version": "0.34.0"}, "this drives vLLM 0.27 and later, below 0.34"),
        ({"vllm_version": "dev"}, "is not a known version"),
        ({"without": frozenset({"/pause"})}, "VLLM_SERVER_DEV_MODE=1"),
        ({"without": frozenset({"/inference/v1/generate"})}, "--enable-scale-out"),
    ],
)
async def test_a_server_that_lacks_what_is_needed_is_refused(
    settings: dict[str, Any], advice: str
) -> None:
    client = connect_to_stub(stub_with(**settings))
    found = await features_of(client)
    assert advice in found.undrivable


async def test_a_server_of_a_known_version_is_driven() -> None:
    for version in ("0.27.0", "0.32.0+cpu", "0.33.1"):
        client = connect_to_stub(stub_with(vllm_version=version))
        found = await features_of(client)
        assert found.undrivable == ""
        assert found.has_weight_session
        assert found.num_payloads == 1
        assert found.why_no_groups == ""
        assert "run on a CPU" in found.why_no_handles


async def test_what_vllm_cannot_do_is_refused_in_words() -> None:
    client = connect_to_stub(StubVllm())
    with pytest.raises(EngineRejected, match="loads adapters from a folder"):
        await client.load_lora_adapter_from_tensors("a", {}, [])
    with pytest.raises(ValueError, match="no sampling parameter stop_regex"):
        await client.generate(input_ids=PROMPT, sampling_params=SamplingParams(stop_regex=("a+",)))
    two = SamplingParams(regex="[ab]+", ebnf='root ::= "a"')
    with pytest.raises(ValueError, match="leave out all but one of regex, ebnf"):
        await client.generate(input_ids=PROMPT, sampling_params=two)
    with pytest.raises(EngineRejected, match="400"):  # by vLLM, which is sent it
        await client.generate(input_ids=PROMPT, sampling_params=SamplingParams(max_new_tokens=-1))


async def test_a_broadcast_through_a_group_is_a_bucket_of_the_session() -> None:
    engine = StubVllm()
    client = connect_to_stub(engine)
    await client.pause_generation()
    where = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2, "rank_offset": 1}
    bucket: Any = {
        "names": ["lm_head.weight"],
        "dtypes": ["float32"],
        "shapes": [(16, 8)],
        "load_format": "flattened_bucket",
    }
    await client.init_weights_update_group(**where, group_name="g", backend="gloo")
    assert (await client.server_info()).update_groups == {"g"}
    before = dict(engine.weights.digests)
    await client.begin_weight_update()
    await client.update_weights_from_distributed(**bucket, group_name="g", weight_version="7")
    assert await client.weight_version() == "0"  # published by the session's end
    await client.end_weight_update()
    assert await client.weight_version() == "7"
    changed = {name for name, one in engine.weights.digests.items() if one != before[name]}
    assert changed == {"lm_head.weight"}
    await client.destroy_weights_update_group("g")
    assert (await client.server_info()).update_groups == frozenset()
    with pytest.raises(EngineRejected, match="no weight update group 'g'"):
        await client.destroy_weights_update_group("g")


class OfEarlierPlugin(StubVllm):
    """Its workers know nothing of groups."""

    async def rollout_state(self) -> Any:
        state = await super().rollout_state()
        return {name: value for name, value in state.items() if name != "groups"}


async def test_a_server_without_the_plugin_or_with_an_earlier_one_says_so() -> None:
    client = connect_to_stub(stub_with(has_plugin=False))
    found = await features_of(client)
    assert "without the plugin" in found.why_no_groups
    client = connect_to_stub(OfEarlierPlugin())
    found = await features_of(client)
    assert "or with an earlier one" in found.why_no_groups


async def test_no_pickle_reaches_the_server() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(4, dtype=torch.float32)
    packed = base64.b64encode(pickle.dumps([("lm_head.weight", tensor)])).decode()
    content = base64.b64decode(update_info([packed, packed])["content"])
    from safetensors.torch import load

    assert torch.equal(load(content)["lm_head.weight"], tensor)
    client = VllmClient(Endpoint("127.0.0.1", 1))
    with pytest.raises(EngineRejected, match="tensors by value and CUDA IPC handles"):
        await client.update_weights_from_tensor([base64.b64encode(b"no tensors").decode()])


async def test_the_log_prob_of_nan_is_read_as_nan() -> None:
    engine = StubVllm()
    engine.computes_nan = True
    client = connect_to_stub(engine)
    two = SamplingParams(max_new_tokens=2)
    reply = await client.generate(input_ids=PROMPT, sampling_params=two, return_logprob=True)
    assert reply.output_logprobs is not None
    assert [math.isnan(one) for one in reply.output_logprobs] == [True, True]


@pytest.mark.parametrize("returns_masks", [False, True])
async def test_a_server_that_returns_masks_takes_our_greedy_requests(returns_masks: bool) -> None:
    """It refuses temperature 0, which probes and canaries would have."""
    engine = stub_with()
    engine.returns_masks = returns_masks
    client = connect_to_stub(engine)
    assert await client.is_healthy()
    reply = await client.generate(input_ids=PROMPT, sampling_params=SHORT, return_logprob=True)
    assert len(reply.output_ids) == 4
    if returns_masks:
        with pytest.raises(EngineRejected, match="requires top_k"):
            await client.generate(input_ids=PROMPT, sampling_params=SamplingParams())
