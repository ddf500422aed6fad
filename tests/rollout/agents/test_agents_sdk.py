"""The OpenAI Agents SDK, unchanged, in a session: its turns continue exact ids."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.rollout.agents.conftest import Agent, MakeAgentOf
from tests.support.chat_models import END, write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
sdk = pytest.importorskip("agents")

PAIRS = ((2, 3), (4, 5))


def call_of(name: str, **arguments: Any) -> str:
    made = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{made}\n</tool_call>"


def say(prompt: str) -> str:
    """The policy: it does what the instructions and the last question say, and thinks first."""
    instructions = re.findall(r"<\|im_start\|>system\n(you [^<]*)<", prompt)[-1]
    question = re.findall(r"<\|im_start\|>user\n([^<]+)<", prompt)[-1]
    behind = prompt[prompt.rindex(question) :]
    results = re.findall(r"<tool_response>\n(.*)\n</tool_response>", behind)
    if instructions == "you pass on":
        if "<tool_response>" in behind and "back" in behind:
            return "<think>it came back</think>\n\nThat is all."
        return f"<think>not mine</think>\n\n{call_of('transfer_to_adder')}"
    if "and back" in question and "5" in results:
        return call_of("transfer_to_front")
    wanted = PAIRS if "both" in question else PAIRS[:1]
    numbers = [one for one in results if one.isdigit()]
    if len(numbers) < len(wanted):
        calls = [call_of("add", a=a, b=b) for a, b in wanted]
        return "<think>a sum</think>\n\nI add.\n" + "\n".join(calls)
    return f"<think>added</think>\n\nIt is {' and '.join(numbers)}."


@sdk.function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


MakeAgent = Callable[..., Awaitable[Agent]]


@pytest.fixture
def make_agent(make_agent_of: MakeAgentOf, tmp_path: Path) -> MakeAgent:
    return partial(make_agent_of, write_chat_model(tmp_path / "model"), say)


@pytest.fixture(autouse=True)
def no_traces() -> Iterator[None]:
    """The SDK sends its traces to OpenAI by default."""
    sdk.set_tracing_disabled(True)
    yield
    sdk.set_tracing_disabled(False)


def made(agent: Agent, name: str = "adder", instructions: str = "you add", **more: Any) -> Any:
    model = sdk.OpenAIChatCompletionsModel(model="policy", openai_client=agent.client)
    return sdk.Agent(name=name, instructions=instructions, model=model, **more)


async def run(starting: Any, asked: Any, is_streamed: bool = False) -> Any:
    if not is_streamed:
        return await sdk.Runner.run(starting, asked)
    result = sdk.Runner.run_streamed(starting, asked)
    async for _ in result.stream_events():
        pass
    return result


def whole(turns: list[dict[str, Any]], turn: dict[str, Any]) -> list[int]:
    """The ids of a turn's prompt and answer."""
    before = [] if turn["parent"] is None else whole(turns, turns[turn["parent"]])
    ids: list[int] = before + turn["prompt_ids"] + turn["output_ids"]
    return ids


async def check_every_turn(agent: Agent) -> list[dict[str, Any]]:
    """Engines got each turn's prompt with the ids before it as sampled; each id counts once."""
    turns = await agent.turns()
    sent = [seen.json["input_ids"] for seen in agent.bench.engines[0].seen]
    for turn, prompt in zip(turns, sent, strict=True):
        assert prompt + turn["output_ids"] == whole(turns, turn)
        assert turn["output_ids"][-1] == END
        assert turn["drift"] != "forked"
    samples = await agent.samples()
    generated = sum(len(turn["output_ids"]) for turn in turns)
    assert sum(sum(sample.mask) for sample in samples) == generated
    return turns


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("asked", "answer"), [("one", "5"), ("both at once", "5 and 9")])
async def test_turns_with_tools_are_one_sample_of_exact_ids(
    make_agent: MakeAgent, is_streamed: bool, asked: str, answer: str
) -> None:
    """The SDK makes separate items of a text and its calls, and one message of them again."""
    agent = await make_agent()
    adder = made(agent, tools=[add])
    first = await run(adder, asked, is_streamed)
    assert first.final_output.endswith(f"It is {answer}.")
    more = [*first.to_input_list(), {"role": "user", "content": "one more"}]
    second = await run(adder, more, is_streamed)
    assert second.final_output.endswith("It is 5.")
    turns = await check_every_turn(agent)
    assert [turn["parent"] for turn in turns] == [None, 0, 1, 2]
    (sample,) = await agent.samples()
    generated = [(turn["output_ids"], turn["prompt_ids"]) for turn in turns]
    mask = [1] * len(generated[0][0])
    for output, prompt in generated[1:]:
        mask += [0] * len(prompt) + [1] * len(output)
    assert sample.mask == mask
    results = [str(a + b) for a, b in (PAIRS if "both" in asked else PAIRS[:1])]
    between = "".join(
        f"\n<|im_start|>user\n<tool_response>\n{one}\n</tool_response><|im_end|>" for one in results
    )
    assert turns[1]["prompt_ids"] == agent.ids(f"{between}\n<|im_start|>assistant\n")


async def test_the_sdks_own_memory_continues_the_turns(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    adder, memory = made(agent, tools=[add]), sdk.SQLiteSession("memory")
    for question in ("one", "both", "one"):
        await sdk.Runner.run(adder, question, session=memory)
    turns = await check_every_turn(agent)
    assert [turn["parent"] for turn in turns] == [None, *range(5)]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_handoff_begins_again_and_its_way_back_continues(
    make_agent: MakeAgent, is_streamed: bool
) -> None:
    """The other agent has other instructions and tools, so nothing that was sampled fits it."""
    agent = await make_agent()
    front = made(agent, "front", "you pass on")
    adder = made(agent, tools=[add], handoffs=[front])
    front.handoffs = [adder]
    result = await run(front, "one and back", is_streamed)
    assert result.final_output.endswith("That is all.")
    assert result.last_agent is front
    turns = await check_every_turn(agent)
    # front passes on, adder calls, adder passes back, front answers
    assert [turn["parent"] for turn in turns] == [None, None, 1, 0]
    assert [turn["drift"] for turn in turns[:2]] == ["clean", "clean"]
    passed = '\n<tool_response>\n{"assistant": "adder"}\n</tool_response><|im_end|>\n'
    behind = agent.ids(f"<|im_start|>user{passed}<|im_start|>assistant\n")
    assert turns[1]["prompt_ids"][-len(behind) :] == behind
    of_adder, of_front = await agent.samples()
    assert [one.metadata["turns"] for one in (of_adder, of_front)] == [[1, 2], [0, 3]]
    for sample, turn in ((of_adder, turns[1]), (of_front, turns[0])):
        assert sample.prompt_ids == turn["prompt_ids"]


async def test_an_output_type_is_a_grammar_of_the_engine(
    make_agent_of: Any, tmp_path: Path
) -> None:
    answer = '{"total": 5}'
    agent = await make_agent_of(write_chat_model(tmp_path / "model"), lambda prompt: answer)
    result = await run(made(agent, output_type=sdk.AgentOutputSchema(dict[str, int], False)), "one")
    (seen,) = agent.bench.engines[0].seen
    assert "additionalProperties" in json.loads(seen.json["sampling_params"]["json_schema"])
    assert result.final_output == {"total": 5}


async def test_a_call_that_is_forced_is_refused_in_words(make_agent: MakeAgent) -> None:
    agent = await make_agent()
    settings = sdk.ModelSettings(tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="tool_choice must be auto or none"):
        await run(made(agent, tools=[add], model_settings=settings), "one")
    assert await agent.turns() == []
