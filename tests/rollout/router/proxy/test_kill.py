"""``kill -9`` of an embedded engine while hundreds of requests run on it.

The greedy chats get the text that they get without the kill, or an error.
"""

import asyncio
import json

import aiohttp
import pytest

from engines.launch import EngineSpec, LocalLauncher
from rollout.router import Backend, RouterHost
from rollout.testing.tiny_model import make_tiny_model
from tests.rollout.router.conftest import router_config

NUM = 200
TOKENS = 64

pytestmark = [pytest.mark.embedded, pytest.mark.slow]


def request(number):
    """Every route on each of two engines in turn, half of them streamed."""
    is_streamed = number // 8 % 2 == 0
    options = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": is_streamed}
    prompt = [number % 200 + 10, 7, 8, 9]
    match number // 2 % 4:
        case 2:
            return "/v1/completions", {
                **options,
                "prompt": prompt,
                "logprobs": 0,
                "return_token_ids": True,
            }
        case 3:
            messages = [{"role": "user", "content": str(number)}]
            usage = {"stream_options": {"include_usage": True}} if is_streamed else {}
            return "/v1/chat/completions", {**options, "messages": messages, **usage}
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    return "/generate", {
        "input_ids": prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": is_streamed,
    }


def check_generate(events):
    payload = events[-1]
    meta = payload["meta_info"]
    assert len(payload["output_ids"]) == TOKENS == meta["completion_tokens"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == payload["output_ids"]
    assert meta["finish_reason"]["type"] == "length"


def check_completion(events):
    assert all("error" not in event for event in events), events[-1]
    choices = [event["choices"][0] for event in events]
    assert sum(len(entry["token_ids"]) for entry in choices if "token_ids" in entry) == TOKENS
    logprobs = [entry["logprobs"]["token_logprobs"] for entry in choices if entry["logprobs"]]
    assert sum(map(len, logprobs)) == TOKENS
    assert [entry["finish_reason"] for entry in choices if entry["finish_reason"]] == ["length"]


def check_chat(events):
    usage = [event["usage"] for event in events if event.get("usage")]
    assert [entry["completion_tokens"] for entry in usage] == [TOKENS]
    choices = [choice for event in events for choice in event["choices"]]
    assert [entry["finish_reason"] for entry in choices if entry["finish_reason"]] == ["length"]


def text_of(events):
    choices = [choice for event in events for choice in event.get("choices", [])]
    parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    return "".join(part.get("content") or "" for part in parts)


CHECKS = {
    "/generate": check_generate,
    "/v1/completions": check_completion,
    "/v1/chat/completions": check_chat,
}


async def test_all_of_200_requests_get_responses_though_an_engine_is_killed(tmp_path, capsys):
    model = make_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)
    launcher = LocalLauncher()
    specs = [
        EngineSpec(
            engine_id=f"e-{number}",
            kind="embedded",
            model_path=str(model),
            log_path=str(tmp_path / f"{number}.log"),
        )
        for number in range(2)
    ]
    engines = await asyncio.gather(*map(launcher.launch, specs))
    host = RouterHost(router_config(token_failover="on"))
    endpoint = await host.start()
    try:
        await host.set_members(
            1,
            [
                Backend(f"e-{number}", engine.endpoint, access=engine.access)
                for number, engine in enumerate(engines)
            ],
        )
        await host.set_gate("open", weight_version=1)
        connector = aiohttp.TCPConnector(limit=NUM)
        async with aiohttp.ClientSession(endpoint.url, connector=connector) as client:
            progress = [0] * NUM

            async def ask(number):
                path, body = request(number)
                events = []
                async with client.post(path, json=body) as response:
                    assert response.status == 200, await response.text()
                    if not body["stream"]:
                        return path, [await response.json()]
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            progress[number] += 1
                            events.append(json.loads(line[6:]))
                return path, events

            pending = [asyncio.ensure_future(ask(number)) for number in range(NUM)]
            chats = [number for number in range(NUM) if number // 2 % 4 == 3]

            def num_chats_begun():
                return sum(progress[one] > 0 and not pending[one].done() for one in chats)

            while sum(map(bool, progress)) < NUM // 4 or num_chats_begun() < 8:
                await host.stats()
            assert (await host.stats())["engines"][0]["num_in_flight"] > 50
            await engines[0].kill()
            responses = await asyncio.gather(*pending)
            stats = await host.stats()
            undisturbed = await asyncio.gather(*map(ask, chats))
    finally:
        await host.stop(0)
        await asyncio.gather(*(engine.kill() for engine in engines))
    is_broken = ["error" in events[-1] for _, events in responses]
    for (path, events), broken in zip(responses, is_broken, strict=True):
        if not broken:
            CHECKS[path](events)
    for number, (_, events) in zip(chats, undisturbed, strict=True):
        whole, got = text_of(events), text_of(responses[number][1])
        assert whole.startswith(got) if is_broken[number] else whole == got, f"chat {number}"
    # These engines give no ids of a chat: one whose client has a part of it fails.
    assert all(request(number)[1]["stream"] for number in range(NUM) if is_broken[number])
    assert {number for number in range(NUM) if is_broken[number]} <= set(chats)
    assert stats["num_failovers"] > 50
    assert stats["num_broken_replies"] == sum(is_broken)
    assert stats["num_failovers_refused"]["chat_without_ids"] >= sum(is_broken) > 0
    with capsys.disabled():
        print(
            f"\nkill -9 with {NUM} in flight: {stats['num_failovers']} went on elsewhere, "
            f"{stats['num_tokens_kept']} tokens kept, {stats['num_tokens_recomputed']} recomputed"
        )
