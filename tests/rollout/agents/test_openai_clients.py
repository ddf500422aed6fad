"""What users of the openai package expect of a base URL, sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.rollout.agents.conftest import USER, Agent, MakeAgentOf, answer_of
from tests.support.chat_models import TOOLS, write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

CALLS = "\n".join(
    f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}\n</tool_call>'
    for a in (1, 2)
)
TOTAL = '{"total": 4}'


class Total(pydantic.BaseModel):
    total: int


def say(prompt: str) -> str:
    """The policy: it thinks, calls a tool twice if it has one, and answers."""
    if "<tools>" in prompt and "<tool_response>" not in prompt:
        return f"<think>two sums</think>\n\nI add.\n{CALLS}"
    return TOTAL if "total" in prompt else "It is 4."


MakeAgent = Callable[..., Awaitable[Agent]]


@pytest.fixture
def make_agent(make_agent_of: MakeAgentOf, tmp_path: Path) -> MakeAgent:
    return partial(make_agent_of, write_chat_model(tmp_path / "model"), say)


async def ask_with(client: openai.AsyncOpenAI) -> Any:
    ask: Any = client.chat.completions.create
    return await ask(model="policy", messages=[USER])


def sync_of(agent: Agent) -> openai.OpenAI:
    client = agent.client
    return openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)


def loop_of_an_agent(client: openai.OpenAI) -> str:
    """As anyone writes it: a stream with tools, gathered by the package, and the results."""
    messages: list[Any] = [USER]
    for _ in range(3):
        with client.chat.completions.stream(
            model="policy", messages=messages, tools=TOOLS
        ) as stream:
            for _event in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            given = json.loads(call.function.arguments)
            result = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not message.tool_calls:
            break
    return message.content or ""


async def test_the_sync_clients_stream_with_tools_is_one_sample(make_agent: MakeAgent) -> None:
    """``parsed`` of the package's messages comes back to the session, and is not part of them."""
    agent = await make_agent()
    with sync_of(agent) as client:
        assert await asyncio.to_thread(loop_of_an_agent, client) == "It is 4."
    one, two = await agent.turns()
    assert (one["parent"], two["parent"]) == (None, 0)
    results = "".join(
        f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>"
        for result in (3, 4)
    )
    assert two["prompt_ids"] == agent.ids(f"{results}\n<|im_start|>assistant\n")
    (sample,) = await agent.samples()
    assert sum(sample.mask) == len(one["output_ids"]) + len(two["output_ids"])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_parallel_calls_have_ids_of_their_own(
    make_agent: MakeAgent, is_streamed: bool
) -> None:
    agent = await make_agent()
    if is_streamed:
        _, calls, last = await agent.stream([USER], tools=TOOLS, parallel_tool_calls=True)
        assert [call.index for call in calls] == [0, 1]
    else:
        last = await agent.ask([USER], tools=TOOLS, parallel_tool_calls=True)
        calls = last.choices[0].message.tool_calls
    assert last.choices[0].finish_reason == "tool_calls"
    assert len({call.id for call in calls}) == 2
    assert [json.loads(call.function.arguments)["a"] for call in calls] == [1, 2]


async def test_raw_responses_have_the_engine_the_version_and_the_place(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent()
    raw = await agent.client.chat.completions.with_raw_response.create(
        model="policy", messages=[USER]
    )
    assert raw.status_code == 200
    assert raw.headers["x-weight-version"] == "7"
    assert json.loads(raw.content)["session"]["turn"] == 0
    assert raw.parse().choices[0].message.content == "It is 4."
    with pytest.raises(openai.BadRequestError) as refused:
        await agent.client.chat.completions.with_raw_response.create(
            model="policy", messages=[USER], n=2
        )
    assert refused.value.response.status_code == 400


# The package writes an answer that it has parsed into the next request with a warning.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
async def test_a_structured_output_is_a_grammar_of_the_engine_and_parsed(
    make_agent: MakeAgent,
) -> None:
    agent = await make_agent()
    question = {"role": "user", "content": "the total of 2+2?"}
    reply = await agent.client.chat.completions.parse(
        model="policy", messages=[question], response_format=Total
    )
    message = reply.choices[0].message
    assert message.parsed == Total(total=4)
    history: list[Any] = [question, message, question]
    async with agent.client.chat.completions.stream(
        model="policy", messages=history, response_format=Total
    ) as stream:
        assert (await stream.get_final_completion()).choices[0].message.parsed == Total(total=4)
    await agent.ask(history, response_format={"type": "json_object"})
    given = [seen.json["sampling_params"]["json_schema"] for seen in agent.bench.engines[0].seen]
    assert [json.loads(one).get("required") for one in given] == [["total"], ["total"], None]
    assert [turn["parent"] for turn in await agent.turns()] == [None, 0, 0]


async def test_fields_that_a_client_adds_to_an_answer_do_not_fork(make_agent: MakeAgent) -> None:
    """Clients of models that reason send the reasoning back, some with what else they know."""
    agent = await make_agent()
    first = answer_of(await agent.ask([USER]))
    more: list[dict[str, Any]] = [
        {"reasoning_content": "2+2"},
        {"reasoning": "2+2", "reasoning_details": [{"type": "text"}]},
        {"annotations": [], "audio": None, "refusal": None, "function_call": None},
        {"provider_specific_fields": {"a": 1}},
        {"content": [{"type": "text", "text": first["content"]}]},
    ]
    for fields in more:
        reply = await agent.ask([USER, first | fields, USER])
        assert (reply.session["parent"], reply.session["drift"]) == (0, "clean")


async def test_sampling_options_reach_the_engine_under_its_names(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    reply = await agent.ask([USER], max_completion_tokens=3, stop=["4"], seed=11, n=1, top_p=0.5)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3
    (seen,) = agent.bench.engines[0].seen
    given = seen.json["sampling_params"]
    assert (
        given.items()
        >= {"max_new_tokens": 3, "stop": ["4"], "sampling_seed": 11, "top_p": 0.5}.items()
    )


async def test_options_without_a_meaning_here_are_taken(make_agent: MakeAgent) -> None:
    """Frameworks send them with each request."""
    agent = await make_agent()
    options: dict[str, Any] = {"user": "me", "store": False, "metadata": {"a": "b"}}
    reply = await agent.ask([USER], service_tier="auto", reasoning_effort="low", **options)
    assert reply.choices[0].message.content == "It is 4."


async def test_a_request_that_the_client_repeats_is_a_branch_of_its_own(
    make_agent: MakeAgent,
) -> None:
    """The package tries again after a timeout and after 5xx, here of something on the way.  If
    the turn of the first try has ended, it is a sample, too."""
    agent = await make_agent()
    lost: list[bytes] = []

    async def lose_one(response: Any) -> None:
        if not lost:
            lost.append(await response.aread())
            response.status_code, response.headers["retry-after-ms"] = 504, "1"

    connections = openai.DefaultAsyncHttpxClient(event_hooks={"response": [lose_one]})
    async with agent.client.with_options(max_retries=1, http_client=connections) as client:
        reply: Any = await ask_with(client)
    assert json.loads(lost[0])["session"]["turn"] == 0
    assert reply.session["turn"] == 1
    history = [USER, answer_of(reply), USER]
    assert (await agent.ask(history)).session["parent"] == 1
    assert [turn["parent"] for turn in await agent.turns()] == [None, None, 1]
    lost_one, kept = await agent.samples()
    assert [one.metadata["turns"] for one in (lost_one, kept)] == [[0], [1, 2]]


async def test_a_turn_that_the_clients_timeout_ends_is_no_turn(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    await agent.bench.host.set_gate("holding")
    waiting = asyncio.ensure_future(agent.ask([USER], timeout=0.5))
    await agent.bench.wait_until_held(1)
    with pytest.raises(openai.APITimeoutError):
        await waiting
    await agent.bench.wait_until_held(0)
    await agent.bench.host.set_gate("open")
    assert (await agent.ask([USER], timeout=60.0)).session["turn"] == 0
    assert len(agent.bench.engines[0].seen) == 1


async def test_a_client_waits_out_a_closed_gate_with_its_own_retries(
    make_agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package repeats a 503; no try was a turn, so the chat is one sample."""
    agent = await make_agent()
    await agent.bench.host.set_gate("closed", reason="training")
    tries = []

    async def opens(seconds: float) -> None:
        tries.append(seconds)
        await agent.bench.host.set_gate("open")

    monkeypatch.setattr("openai._base_client.anyio.sleep", opens)
    reply = await ask_with(agent.client.with_options(max_retries=2))
    assert len(tries) == 1
    assert reply.session == {"turn": 0, "parent": None, "drift": "clean", "first_difference": None}


async def test_each_error_is_the_packages_own_with_words(make_agent: MakeAgent) -> None:
    agent = await make_agent(max_sessions=1)

    def elsewhere(session: str) -> Any:
        base_url = f"{agent.url}/sessions/{session}/v1"
        return ask_with(agent.client.with_options(base_url=base_url))

    await agent.ask([USER])
    with pytest.raises(openai.BadRequestError, match="another branch"):
        await agent.ask([USER], n=2)
    with pytest.raises(openai.ConflictError, match="weight version"):
        await agent.ask([USER], extra_headers={"x-weight-version": "6"})
    with pytest.raises(openai.InternalServerError, match="max_sessions") as full:
        await elsewhere("t")
    assert full.value.status_code == 507
    await agent.bench.host.set_gate("closed", reason="training")
    with pytest.raises(openai.InternalServerError, match="closed") as shut:
        await agent.ask([USER])
    assert shut.value.status_code == 503
    async with agent.http.delete("/sessions/s"):
        pass
    with pytest.raises(openai.APIStatusError, match="was closed") as gone:
        await agent.ask([USER])
    assert gone.value.status_code == 410
    for caught in (full, shut, gone):
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["type"]


async def test_the_models_of_a_session_are_listed(make_agent: MakeAgent) -> None:
    """Clients and user interfaces read the list before they chat."""
    agent = await make_agent()
    assert [model.id async for model in agent.client.models.list()] == ["policy"]
    assert (await agent.ask([USER])).model == "policy"
    assert [turn["turn"] for turn in await agent.turns()] == [0]
