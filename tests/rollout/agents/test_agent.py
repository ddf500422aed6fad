"""The openai package, unchanged, in a session: exact ids whatever template and client do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout.agents.turns.store import Session, SessionStore
from rollout.config import AgentsConfig
from rollout.core.samples import SampleStatus
from tests.rollout.agents.conftest import USER, Agent, MakeAgentOf, answer_of
from tests.rollout.router.conftest import MakeBench
from tests.rollout.router.stub_engine import Hold, hold_then_reply
from tests.support.agent_workers import worker_of_router
from tests.support.chat_models import END, TOOLS, logprob_of, write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'


def say(prompt: str) -> str:
    """The policy: it thinks, calls a tool if it has one, and answers."""
    if "<tools>" in prompt and "<tool_response>" not in prompt:
        return f"<think>a sum</think>\n\nI add.\n{CALL}"
    num = prompt.count("<|im_start|>user")
    return f"<think>turn {num}</think>\n\nanswer {num}"


MakeAgent = Callable[..., Awaitable[Agent]]


@pytest.fixture
def make_agent(make_agent_of: MakeAgentOf, tmp_path: Path) -> MakeAgent:
    return partial(make_agent_of, write_chat_model(tmp_path / "model"), say)


async def test_a_turn_continues_the_exact_ids_though_the_template_drops_the_thinking(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent()
    first = await agent.ask([USER])
    message = first.choices[0].message
    assert (message.content, message.reasoning_content) == ("answer 1", "turn 1")
    messages = [USER, answer_of(first), {"role": "user", "content": "and 3?"}]
    second = await agent.ask(messages)
    assert second.choices[0].message.content.endswith("answer 2")
    one, two = await agent.turns()
    begun = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert one["prompt_ids"] == agent.ids(begun)
    assert one["output_ids"] == [*agent.ids("<think>turn 1</think>\n\nanswer 1"), END]
    between = "\n<|im_start|>user\nand 3?<|im_end|>\n<|im_start|>assistant\n"
    assert (two["parent"], two["prompt_ids"]) == (0, agent.ids(between))
    sent = agent.bench.engines[0].seen[-1].json["input_ids"]
    assert sent == one["prompt_ids"] + one["output_ids"] + two["prompt_ids"]
    assert (one["drift"], two["drift"]) == ("clean", "realigned")
    assert two["first_difference"] == len(one["prompt_ids"])
    assert second.session["drift"] == "realigned"
    assert second.usage.prompt_tokens == len(sent)
    (sample,) = await agent.samples()
    assert sample.prompt_ids + sample.output_ids == sent + two["output_ids"]
    assert sample.mask == [
        *[1] * len(one["output_ids"]),
        *[0] * len(two["prompt_ids"]),
        *[1] * len(two["output_ids"]),
    ]
    masked = zip(sample.output_ids, sample.mask, strict=True)
    assert sample.output_logprobs == [logprob_of(one) * mask for one, mask in masked]
    assert sample.versions == [7, 7]
    assert sample.status is SampleStatus.COMPLETED


@pytest.mark.parametrize("num_cached", [None, 0, 17])
async def test_a_reply_has_the_cached_tokens_and_the_engine_of_its_turn(
    make_agent: MakeAgent, num_cached: int | None
) -> None:
    """Without a report the count is left out: 0 would be a prompt that was computed as a whole."""
    agent = await make_agent(speech={"num_cached": num_cached})
    raw = await agent.client.chat.completions.with_raw_response.create(
        model="policy", messages=[USER]
    )
    assert (raw.headers["x-engine-id"], raw.headers["x-weight-version"]) == ("e-0", "7")
    stream = await agent.client.chat.completions.with_raw_response.create(
        model="policy", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    assert stream.headers["x-engine-id"] == "e-0"
    *_, last = [chunk async for chunk in stream.parse()]
    for usage in (raw.parse().usage, last.usage):
        details = usage.prompt_tokens_details
        assert (None if details is None else details.cached_tokens) == num_cached
    for turn in await agent.turns():
        assert (turn["cached_tokens"], turn["engine_id"]) == (num_cached, "e-0")


async def test_a_client_that_removes_the_thinking_continues_the_same_turn(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent()
    await agent.ask([USER])
    stripped = {"role": "assistant", "content": "answer 1"}
    reply = await agent.ask([USER, stripped, USER])
    assert reply.session == {"turn": 1, "parent": 0, "drift": "realigned"} | {
        "first_difference": reply.session["first_difference"]
    }


async def test_branches_share_their_beginning_and_its_loss_counts_once(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent()
    history = [USER, answer_of(await agent.ask([USER]))]
    for word in ("left", "right"):
        await agent.ask([*history, {"role": "user", "content": word}])
    again = await agent.ask([USER])  # the same request: another beginning
    assert again.session["parent"] is None
    left, right, other = await agent.samples()
    turns = await agent.turns()
    assert [turn["parent"] for turn in turns] == [None, 0, 0, None]
    first = len(turns[0]["output_ids"])
    assert left.mask[:first] == [1] * first
    assert right.mask[:first] == [0] * first
    assert left.output_ids[:first] == right.output_ids[:first] == other.output_ids
    num = sum(len(turn["output_ids"]) for turn in turns)
    assert sum(map(sum, (left.mask, right.mask, other.mask))) == num


async def test_a_changed_answer_is_a_fork_from_the_turn_before_it(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    history = [USER, answer_of(await agent.ask([USER])), USER]
    await agent.ask(history)
    mine = {"role": "assistant", "content": "my own words"}
    reply = await agent.ask([*history, mine, USER])
    assert (reply.session["parent"], reply.session["drift"]) == (0, "forked")
    two_samples = await agent.samples()
    assert [sample.metadata["turns"] for sample in two_samples] == [[0, 1], [0, 2]]
    new = (await agent.turns())[2]["prompt_ids"]
    assert new == agent.ids(
        "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nmy own words<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_turns_are_counted_by_drift_in_the_metrics(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    assert await turns_by_drift(agent) == {"clean": 0, "realigned": 0, "forked": 0}
    history = [USER, answer_of(await agent.ask([USER])), USER]
    await agent.stream(history)
    mine = {"role": "assistant", "content": "my own words"}
    await agent.ask([*history, mine, USER])
    with pytest.raises(openai.BadRequestError):
        await agent.ask([USER], n=2)
    assert await turns_by_drift(agent) == {"clean": 1, "realigned": 1, "forked": 1}
    assert (await agent.send("DELETE")).status == 200
    assert await turns_by_drift(agent) == {"clean": 1, "realigned": 1, "forked": 1}


async def test_a_turn_after_the_session_was_closed_is_refused_and_kept_nowhere(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent()
    await agent.ask([USER])
    assert (await agent.send("DELETE")).status == 200
    with pytest.raises(openai.APIStatusError, match="session s was closed") as refused:
        await agent.ask([USER])
    assert refused.value.status_code == 410
    assert (await agent.send("GET")).status == 404


async def turns_by_drift(agent: Agent) -> dict[str, float]:
    families = text_string_to_metric_families((await agent.send("GET", "/metrics")).body.decode())
    return {
        sample.labels["drift"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "agents_session_turns_total"
    }


async def test_a_call_in_another_form_stays_in_the_text_and_is_logged_once(
    make_agent_of: MakeAgentOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]'
    agent = await make_agent_of(write_chat_model(tmp_path / "model"), lambda prompt: text)
    for _ in range(2):
        reply = await agent.ask([USER], tools=TOOLS)
        assert reply.choices[0].message.content == text
        assert not reply.choices[0].message.tool_calls
        assert reply.choices[0].finish_reason == "stop"
    (record,) = [record for record in caplog.records if "tool call" in record.message]
    assert "'[TOOL_CALLS]'" in record.message
    assert "not in the form hermes (agents.tool_call_parser)" in record.message


async def test_tools_are_called_and_their_results_are_not_trained_on(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent()
    called = await agent.ask([USER], tools=TOOLS)
    (choice,) = called.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I add."
    assert choice.message.reasoning_content == "a sum"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 2})
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    answered = await agent.ask([USER, answer_of(called), result], tools=TOOLS)
    assert answered.choices[0].finish_reason == "stop"
    one, two = await agent.turns()
    assert agent.ids(CALL) == one["output_ids"][-len(agent.ids(CALL)) - 1 : -1]
    assert two["prompt_ids"] == agent.ids(
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    (sample,) = await agent.samples()
    assert sum(sample.mask) == len(one["output_ids"]) + len(two["output_ids"])


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_a_stream_has_the_message_that_a_whole_reply_has(
    make_agent: MakeAgent, tools: Any
) -> None:
    agent = await make_agent()
    options = {"tools": tools} if tools else {}
    whole = await agent.ask([USER], **options)
    text, calls, last = await agent.stream([USER], **options)
    message = whole.choices[0].message
    assert text == message.content
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert [call.function.name for call in calls] == [
        call.function.name for call in message.tool_calls or []
    ]
    assert last.session["turn"] == 1
    one, two = await agent.turns()
    assert one["output_ids"] == two["output_ids"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_chat_with_tools_keeps_its_tokens_when_its_engine_dies(
    make_agent: MakeAgent, is_streamed: bool
) -> None:
    limits: list[int | None] = [None, 20, None]

    def next_limit() -> int | None:
        return limits.pop(0)

    agent = await make_agent(next_limit, next_limit)
    called = await agent.ask([USER], tools=TOOLS)
    call = called.choices[0].message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    messages = [USER, answer_of(called), result]
    if is_streamed:
        text, _, _ = await agent.stream(messages, tools=TOOLS)
    else:
        reply = await agent.ask(messages, tools=TOOLS)
        text = reply.choices[0].message.content
    assert limits == []
    assert text == "answer 2"
    two = (await agent.turns())[1]
    assert two["output_ids"] == [*agent.ids("<think>turn 2</think>\n\nanswer 2"), END]
    assert two["output_logprobs"] == [logprob_of(one) for one in two["output_ids"]]
    stats = await agent.bench.host.stats()
    assert (stats["num_failovers"], stats["num_tokens_kept"]) == (1, 20)


async def test_an_answer_that_was_cut_off_gets_the_templates_end(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    cut = await agent.ask([USER], max_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    await agent.ask([USER, answer_of(cut), USER])
    two = (await agent.turns())[1]
    begin = "<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert two["prompt_ids"] == agent.ids(begin)
    assert two["drift"] == "clean"


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_log_probs_are_those_of_the_turn_whole_or_streamed(
    make_agent: MakeAgent, tools: Any
) -> None:
    agent = await make_agent()
    options = {"tools": tools, "logprobs": True} if tools else {"logprobs": True}
    (choice,) = (await agent.ask([USER], **options)).choices
    entries = choice.logprobs.content
    parts = await agent.ask([USER], stream=True, **options)
    streamed = [one.choices[0].logprobs async for one in parts]
    assert [one for part in streamed if part for one in part.content] == entries
    for turn in await agent.turns():
        assert turn["output_logprobs"] == [entry.logprob for entry in entries]
    text = "".join(entry.token for entry in entries)
    assert text.removesuffix("<|im_end|>") == turn["text"]
    assert bytes(entries[0].bytes).decode() == entries[0].token


async def test_an_answer_that_was_cut_off_is_continued_from_its_ids(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    cut = answer_of(await agent.ask([USER], max_tokens=5))
    more = {"continue_final_message": True, "add_generation_prompt": False}
    reply = await agent.ask([USER, cut], extra_body=more)
    sent = agent.bench.engines[0].seen[-1].json["input_ids"]
    one, two = await agent.turns()
    assert sent == one["prompt_ids"] + one["output_ids"]
    assert (two["parent"], two["prompt_ids"]) == (0, [])
    (sample,) = await agent.samples()
    assert sample.prompt_ids + sample.output_ids == sent + two["output_ids"]
    whole = {"role": "assistant", "content": cut["content"] + reply.choices[0].message.content}
    after = await agent.ask([USER, whole, USER])
    assert after.session["parent"] == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_that_was_cut_off_in_its_thinking_is_continued(
    make_agent: MakeAgent, is_streamed: bool
) -> None:
    agent = await make_agent()
    cut = answer_of(await agent.ask([USER], max_tokens=11))
    assert (cut["content"], cut["reasoning_content"]) == ("", "turn")
    more = {"continue_final_message": True}
    if is_streamed:
        text, thought = "", ""
        async for part in await agent.ask([USER, cut], stream=True, extra_body=more):
            text += part.choices[0].delta.content or ""
            thought += getattr(part.choices[0].delta, "reasoning_content", "")
    else:
        rest = answer_of(await agent.ask([USER, cut], extra_body=more))
        text, thought = rest["content"], rest["reasoning_content"]
    assert (text, thought) == ("answer 1", " 1")
    two = (await agent.turns())[1]
    assert (two["parent"], two["prompt_ids"]) == (0, [])
    joined = {"role": "assistant", "content": text, "reasoning_content": "turn" + thought}
    after = await agent.ask([USER, joined, USER])
    assert after.session["parent"] == 1
    given = {"role": "assistant", "content": "", "reasoning_content": "So"}
    begun = await agent.ask([USER, given], extra_body=more)
    assert begun.session["parent"] is None
    ids = (await agent.turns())[-1]["prompt_ids"]
    assert ids[-len(agent.ids("<think>\nSo")) :] == agent.ids("<think>\nSo")


async def test_an_answer_that_the_client_begins_is_continued(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    more = {"continue_final_message": True}
    history = [USER, answer_of(await agent.ask([USER])), USER]
    reply = await agent.ask(
        [*history, {"role": "assistant", "content": "Well,"}], extra_body=more, max_tokens=3
    )
    (_, two) = await agent.turns()
    assert two["parent"] == 0
    assert two["prompt_ids"] == agent.ids(
        "\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\nWell,"
    )
    whole = {"role": "assistant", "content": "Well," + reply.choices[0].message.content}
    assert (await agent.ask([*history, whole, USER])).session["parent"] == 1
    first = await agent.ask([USER, {"role": "assistant", "content": "So"}], extra_body=more)
    assert first.session["parent"] is None


async def test_a_completion_is_refused_with_what_to_send(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    with pytest.raises(openai.BadRequestError, match="a session takes chats; send a prompt to"):
        await agent.client.completions.create(model="m", prompt="2+2?")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"n": 2}, "another branch"),
        ({"logprobs": True, "top_logprobs": 2}, "no others"),
        ({"messages": []}, "a list of 1 to 16384 messages"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "continue_final_message"),
        ({"extra_body": {"continue_final_message": True}}, "an assistant's message at the end"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "must be a data URL",
        ),
        ({"tool_choice": "required", "tools": TOOLS}, "force a call by a grammar"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
    ],
)
async def test_what_a_session_cannot_do_is_refused(
    make_agent: MakeAgent, options: dict[str, Any], why: str
) -> None:
    agent = await make_agent()
    with pytest.raises(openai.BadRequestError, match=why):
        await agent.ask(**({"messages": [USER]} | options))
    assert agent.bench.engines[0].seen == []


@pytest.mark.parametrize("character", ["%0A", "%0D", "%00", "%1F", "%7F"])
async def test_a_session_id_that_no_header_takes_is_refused(
    make_agent: MakeAgent, character: str
) -> None:
    agent = await make_agent()
    path = f"{agent.url}/sessions/a{character}b/v1"
    with pytest.raises(openai.BadRequestError, match="printable characters"):
        await agent.client.with_options(base_url=path).chat.completions.create(
            model="m", messages=[USER]
        )


async def test_a_call_with_half_of_a_surrogate_pair_is_returned_and_taken_back(
    make_agent_of: MakeAgentOf, tmp_path: Path
) -> None:
    half = '{"a": "\\ud83d"}'

    def say_half(prompt: str) -> str:
        if "<tool_response>" in prompt:
            return "done"
        return f'<tool_call>\n{{"name": "add", "arguments": {half}}}\n</tool_call>'

    agent = await make_agent_of(write_chat_model(tmp_path / "model"), say_half)
    called = await agent.ask([USER], tools=TOOLS)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.arguments == half
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    answered = await agent.ask([USER, answer_of(called), result], tools=TOOLS)
    assert answered.choices[0].message.content == "done"
    assert [turn["parent"] for turn in await agent.turns()] == [None, 0]


async def test_the_key_of_an_agent_is_inside_run_and_version(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    await agent.ask([USER])
    await agent.ask([USER], extra_body={"extra_key": "mine"})
    await agent.ask([USER], extra_body={"cache_salt": "mine"})
    assert [seen.json["extra_key"] for seen in agent.bench.engines[0].seen] == [
        "run:v7",
        "run:v7:mine",
        "run:v7:mine",
    ]


async def test_a_missing_tokenizer_names_the_setting(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    (agent.folder / "tokenizer.json").unlink()
    with pytest.raises(openai.APIStatusError, match=r"router\.tokenizer_path") as refused:
        await agent.ask([USER])
    assert refused.value.status_code == 501


async def test_sessions_are_bounded_and_can_be_closed(make_agent: MakeAgent) -> None:
    agent = await make_agent(max_sessions=1)
    await agent.ask([USER])
    other = agent.client.with_options(base_url=f"{agent.url}/sessions/t/v1")
    with pytest.raises(openai.APIStatusError, match=r"agents\.max_sessions") as refused:
        await other.chat.completions.create(model="m", messages=[USER])
    assert refused.value.status_code == 507
    assert (await agent.send("DELETE")).status == 200
    await other.chat.completions.create(model="m", messages=[USER])
    assert (await agent.send("GET")).status == 404


async def test_a_chat_may_be_as_long_as_a_body_that_the_router_reads(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await make_agent(max_session_bytes=1 << 28)
    long = {"role": "user", "content": "x" * (1 << 20)}
    await agent.ask([long], max_tokens=8)
    (turn,) = await agent.turns()
    assert len(turn["prompt_ids"]) > 1 << 20
    with pytest.raises(openai.APIStatusError, match=f"over {8 << 20} bytes") as refused:
        await agent.ask([long] * 8)
    assert refused.value.status_code == 413
    monkeypatch.setattr("rollout.agents.chats._MOST_BYTES_AT_ONCE", 1 << 20)
    with pytest.raises(openai.APIStatusError, match="under way take 0 bytes") as refused:
        await agent.ask([long])
    assert refused.value.status_code == 503


async def test_a_burst_is_bounded_while_nothing_is_read_yet(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = await make_agent()
    monkeypatch.setattr("rollout.agents.chats.MOST_AT_ONCE", 1)
    begin_turn = SessionStore.begin_turn
    has_entered, goes_on = threading.Event(), threading.Event()  # the worker has a loop of its own

    async def slow(store: SessionStore, session_id: str, now_s: float) -> Session:
        has_entered.set()
        await asyncio.to_thread(goes_on.wait, 60)
        return await begin_turn(store, session_id, now_s)

    monkeypatch.setattr(SessionStore, "begin_turn", slow)
    first = asyncio.ensure_future(agent.ask([USER]))
    assert await asyncio.to_thread(has_entered.wait, 60)
    with pytest.raises(openai.APIStatusError, match="1 chats of sessions") as refused:
        await agent.ask([USER])
    assert refused.value.status_code == 503
    goes_on.set()
    await first


async def test_a_closed_gate_is_the_clients_503_and_no_turn(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    await agent.bench.host.set_gate("closed", reason="training", phase="offloaded")
    with pytest.raises(openai.InternalServerError, match="closed") as refused:
        await agent.ask([USER])
    assert refused.value.status_code == 503
    assert await agent.turns() == []


async def test_a_chat_needs_the_clients_key_and_turns_the_control_key(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent(router={"client_key": "c", "control_key": "k"})
    with pytest.raises(openai.AuthenticationError):
        await agent.ask([USER])
    agent.client.api_key = "c"
    await agent.ask([USER])
    headers = {"authorization": "Bearer c"}
    assert (await agent.send("GET", headers=headers)).status == 401
    headers = {"authorization": "Bearer k"}
    assert len((await agent.send("GET", headers=headers)).json["turns"]) == 1


async def test_chats_of_one_session_run_at_the_same_time(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    words = [str(number) for number in range(8)]
    await asyncio.gather(*(agent.ask([{"role": "user", "content": one}]) for one in words))
    turns = await agent.turns()
    assert [turn["turn"] for turn in turns] == list(range(8))
    assert {turn["parent"] for turn in turns} == {None}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_ends_its_request_and_leaves_no_turn(
    make_bench: MakeBench, tmp_path: Path, is_streamed: bool
) -> None:
    hold = Hold()
    folder = str(write_chat_model(tmp_path / "model"))
    bench = await make_bench(hold_then_reply(hold))
    config = AgentsConfig(tokenizer_path=folder)
    body = {"messages": [USER], "stream": is_streamed}
    async with (
        worker_of_router(bench.url, tmp_path / "agents", config) as url,
        aiohttp.ClientSession(url) as client,
    ):
        sending = client.post("/sessions/s/v1/chat/completions", json=body)
        asked = asyncio.ensure_future(sending)
        await hold.entered.wait()
        asked.cancel()
        await bench.engines[0].peer_closed.wait()
        while True:
            async with client.get("/sessions/s") as reply:
                if reply.status == 404:
                    break


async def test_an_engine_that_dies_within_a_stream_is_an_error_without_failover(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent(lambda: 8, router={"token_failover": "off"})
    with pytest.raises(openai.APIError, match="engine e-0 failed"):
        await agent.stream([USER])
    assert await agent.turns() == []


async def test_a_finished_stream_leaves_its_connection_to_the_next(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    for _ in range(3):
        await agent.stream([USER])
    stats = await agent.bench.host.stats()
    assert stats["num_clients_left"] == 0
    assert agent.bench.engines[0].num_connections == 1


async def test_refused_chats_leave_no_session(make_agent: MakeAgent) -> None:
    agent = await make_agent(max_sessions=2)
    for number in range(5):
        path = f"/sessions/{number}/v1/chat/completions"
        reply = await agent.send("POST", path, json={"messages": [], "n": 2})
        assert reply.status == 400
    await agent.ask([USER])
    assert len(await agent.turns()) == 1
