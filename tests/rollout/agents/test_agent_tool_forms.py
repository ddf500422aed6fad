"""One loop of an agent for each form of tool calls: call, result, answer, with exact ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.agents.conftest import USER, Agent, MakeAgentOf, answer_of
from tests.support.chat_models import write_chat_model
from tests.support.tool_families import ARGUMENTS, FAMILIES, RESULT, TOOLS, Family

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

NAMES = list(FAMILIES)
HIDDEN = "<|endoftext|>"
"""A special token that engines leave out of their text."""


async def make_agent(
    make: MakeAgentOf, folder: Path, family: Family, call: str = "", **config: Any
) -> Agent:
    """A policy that calls the tool, and with its result answers."""
    special = [*family.special, family.end, *([family.others] if family.others else [])]
    model = write_chat_model(folder, family.template, special=special, eos=family.end)

    def say(prompt: str) -> str:
        return "It is 4." if RESULT in prompt else call or family.call

    def end_of(answer: str) -> str:
        return (answer == "It is 4." and family.others) or family.end

    return await make(model, say, speech={"begin": "", "end_of": end_of}, **config)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", NAMES)
async def test_the_second_turn_begins_with_the_exact_ids_of_the_first(
    make_agent_of: MakeAgentOf, tmp_path: Path, name: str, is_streamed: bool
) -> None:
    family = FAMILIES[name]
    agent = await make_agent(make_agent_of, tmp_path, family)
    called: dict[str, Any]
    if is_streamed:
        text, calls, last = await agent.stream([USER], tools=TOOLS)
        reason, called = last.choices[0].finish_reason, {"role": "assistant"}
        given = [call.model_dump(exclude={"index"}) for call in calls]
        called |= {"content": text or None, "tool_calls": given}
    else:
        (choice,) = (await agent.ask([USER], tools=TOOLS)).choices
        reason, called = choice.finish_reason, answer_of_choice(choice)
    assert reason == "tool_calls"
    assert called["content"] == family.content
    (call,) = called["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
    answered = await agent.ask([USER, called, result], tools=TOOLS)
    assert answered.choices[0].message.content == "It is 4."
    assert (answered.session["parent"], answered.session["drift"]) == (0, family.drift)
    one, two = await agent.turns()
    assert one["output_ids"] == agent.ids(family.call + family.end)
    assert two["prompt_ids"] == agent.ids(family.behind.replace("{id}", call["id"]))
    sent = agent.bench.engines[0].seen[-1].json["input_ids"]
    assert sent == one["prompt_ids"] + one["output_ids"] + two["prompt_ids"]
    (sample,) = await agent.samples()
    assert sample.prompt_ids + sample.output_ids == sent + two["output_ids"]
    assert sum(sample.mask) == len(one["output_ids"]) + len(two["output_ids"])
    # A third turn: the call is in the history, where the template writes it as it likes.
    history = [USER, called, result, answer_of(answered), USER]
    third = await agent.ask(history, tools=TOOLS)
    assert third.session["parent"] == 1


def answer_of_choice(choice: Any) -> dict[str, Any]:
    message: dict[str, Any] = choice.message.model_dump(include={"role", "content", "tool_calls"})
    return message


@pytest.mark.parametrize("name", NAMES)
async def test_special_tokens_that_are_no_marks_are_not_in_the_content(
    make_agent_of: MakeAgentOf, tmp_path: Path, name: str
) -> None:
    """The content is read from the ids, so engines are not asked to write special tokens."""
    family = FAMILIES[name]
    call = f"Well,{HIDDEN} yes. {family.call}"
    agent = await make_agent(make_agent_of, tmp_path, family, call)
    for streamed in (False, True):
        if streamed:
            text, _, _ = await agent.stream([USER], tools=TOOLS)
        else:
            text = (await agent.ask([USER], tools=TOOLS)).choices[0].message.content
        assert text.startswith("Well, yes.")
        assert HIDDEN not in text
    await agent.ask([USER])
    given = [seen.json["sampling_params"] for seen in agent.bench.engines[0].seen]
    assert not any("special" in key for each in given for key in each)
    turns = await agent.turns()
    assert not any(HIDDEN in turn["text"] for turn in turns)
    assert agent.ids(HIDDEN)[0] in turns[0]["output_ids"]


async def test_a_setting_goes_before_the_template(
    make_agent_of: MakeAgentOf, tmp_path: Path
) -> None:
    """A bare object is no call in Mistral's form."""
    family = FAMILIES["llama_bare"]
    agent = await make_agent(make_agent_of, tmp_path, family, tool_call_parser="mistral")
    message = (await agent.ask([USER], tools=TOOLS)).choices[0].message
    assert (message.content, message.tool_calls) == (family.call, None)
