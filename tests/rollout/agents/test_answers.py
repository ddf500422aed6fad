"""Parts of an answer, and streams that say the same as whole replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FinishReason
from rollout.agents.answers import ChatAnswer
from rollout.agents.model.answer_reader import Answer, Opening, State, unread_call
from rollout.agents.model.call_forms import BY_NAME, FORMS
from rollout.agents.turns.tree import Generated, Prompt, Turn
from tests.support.letters import Letters
from tests.support.tool_families import FAMILIES, TOOLS

pytest.importorskip("renderers")

STOP = FinishReason("stop", 0)
CALL = '<tool_call>{"name": "f", "arguments": {"x": [1, "}"]}}</tool_call>'
PIECES = [
    CALL,
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "a",
    " ",
    "\n",
    "{",
    "<",
    "[",
    '{"name": 1}',
    '{"name": "add"};',
    "\ufffd",
    "é",
    "<think>",
    "</think>",
    "\n<th",
    "[EN",
    "D]",
    "<s>",
    "</s>",
    "[INST]",
]
HARMONY = (
    "<|channel|>analysis<|message|> so <|end|><|start|>assistant<|channel|>commentary<|message|>Now"
    "<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|>",
    "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
)
FORM_NAMES = [form.name for form in FORMS]


def letters_of(name: str, marks_are_tokens: bool) -> Letters:
    form = BY_NAME[name]
    marks = [*form.all_marks, "<think>", "</think>"] if marks_are_tokens else []
    return Letters(marks, ["<s>", "</s>", "[INST]", "<|python"])


def pieces_of(name: str) -> st.SearchStrategy[list[str]]:
    """Whole calls of a form, parts of them, and what other texts are made of."""
    form = BY_NAME[name]
    calls = [family.call for family in FAMILIES.values() if family.form == name]
    calls = calls or [*HARMONY] if name == "harmony" else calls or [CALL]
    marks = form.all_marks
    parts = st.sampled_from([*PIECES, *calls, *marks, *(mark[:-1] for mark in marks)])
    cut = st.builds(lambda call, at: call[:at], st.sampled_from(calls), st.integers(0, 60))
    return st.lists(parts | cut, max_size=10)


def new_id() -> str:
    return "c" * 24


def read(text: str, name: str = "hermes", *, matched: str | None = None, **options: Any) -> Answer:
    letters = Letters()
    reading = letters.reader(name).reading(tools=TOOLS, new_id=new_id, **options)
    reading.feed(letters.encode(text))
    return reading.end(matched)


def test_a_call_is_separated_from_the_text_around_it() -> None:
    answer = read(f"I add.\n{CALL}")
    assert answer.content == "I add."
    function = {"name": "f", "arguments": '{"x": [1, "}"]}'}
    call_id = f"call_{new_id()}"
    assert answer.calls == ({"id": call_id, "type": "function", "function": function},)
    assert answer.message()["content"] == "I add."
    assert read(CALL).message()["content"] is None


def test_what_is_no_call_stays_in_the_text() -> None:
    numbers = ("NaN", "[-Infinity]", "1e400")
    calls = (
        f'<tool_call>{{"name": "f", "arguments": {{"x": {one}}}}}</tool_call>' for one in numbers
    )
    for text in (
        "<tool_call>{}</tool_call>",
        "<tool_call>{no json}</tool_call>",
        "<tool_call>{",
        *calls,
    ):
        assert read(text) == Answer(text)


@pytest.mark.parametrize(
    ("text", "begin"),
    [
        ('[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[TOOL_CALLS]"),
        ("I add. <function=f><parameter=x>1</parameter></function>", "<function="),
        ("<tool_call>{no json}</tool_call>", "<tool_call>"),
        ("commentary to=functions.f json{}", " to=functions."),
        (CALL, ""),
        ("2 + 2 is 4", ""),
    ],
)
def test_a_call_in_another_form_is_noticed_and_stays_in_the_text(text: str, begin: str) -> None:
    answer = read(text)
    assert unread_call(answer) == begin
    assert not begin or answer == Answer(text)


def test_two_calls_with_one_id_get_two() -> None:
    """As a model may repeat what it has read."""
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    answer = read(text, "kimi_k2")
    assert [one["id"] for one in answer.calls] == ["functions.f:0", f"call_{new_id()}"]


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "num_calls"),
    [
        ("<think>\nso\n</think>\n\nIt is 4. ", "so", "It is 4. ", 0),
        ("\n<think> a <think> b</think>c</think>", "a  b", "c</think>", 0),
        ("<think>so", "so", "", 0),
        ("<think></think>4", "", "4", 0),
        ("4 <think>so</think>", "", "4 <think>so</think>", 0),
        (f"<think>so\n{CALL}", "so", "", 1),  # the end of the thinking is left out
        (f"<think>so\n{CALL} or</think>4", f"so\n{CALL} or", "4", 0),  # it is a draft
        (f"<think>so\n{CALL[:-1]}", "so", CALL[:-1], 0),
        (f"<think>so</think>I add.\n{CALL}\n", "so", "I add.", 1),
        ("  4", "", "  4", 0),
        ("  ", "", "  ", 0),
    ],
)
def test_thinking_is_separated_from_content_and_calls(
    text: str, reasoning: str, content: str, num_calls: int
) -> None:
    answer = read(text)
    parts = (answer.reasoning, answer.content, len(answer.calls))
    assert parts == (reasoning, content, num_calls)
    assert answer.message().get("reasoning_content", "") == reasoning


def test_a_prompt_may_end_within_the_thinking() -> None:
    opening = Opening(State.THINKING)
    assert read("so</think>4", opening=opening) == Answer("4", (), "so")
    assert read("so", opening=opening) == Answer("", (), "so", 2)


def test_the_tokens_of_the_thinking_are_counted_where_its_end_is_a_token() -> None:
    letters = Letters(["<think>", "</think>"])
    reading = letters.reader("hermes").reading(new_id=new_id)
    reading.feed(letters.encode("<think>so</think>It is 4."))
    assert reading.end().num_thinking == len(letters.encode("<think>so</think>"))


def test_what_the_client_has_of_an_answer_is_not_given_again() -> None:
    letters = Letters()
    for begun, rest, answer in [
        ("It is ", "4", Answer("4")),
        ("<think>so", " it</think>4", Answer("4", (), " it")),
        ("<think>so</think>It", " is 4", Answer(" is 4")),
        ("<tool_call>{", "}</tool_call>", Answer("}</tool_call>")),
    ]:
        opening = Opening(begun=letters.encode(begun))
        assert read(rest, opening=opening) == answer


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        (HARMONY[0], "so", "Now", ["f"]),
        (HARMONY[0] + HARMONY[1], "so", "NowIt is 4.", ["f"]),
        (HARMONY[0][:-10], "so", None, []),
        ("<|channel|>analysis<|message|>so", "so", "", []),
        ("<|channel|>final<|message|>a<|end|>", "", "a", []),
        ("It is 4.", "", "It is 4.", []),
    ],
)
def test_the_channels_of_gpt_oss_are_the_parts_of_its_answer(
    text: str, reasoning: str, content: str | None, names: list[str]
) -> None:
    answer = read(text, "harmony")
    assert (answer.reasoning, [call["function"]["name"] for call in answer.calls]) == (
        reasoning,
        names,
    )
    if content is None:  # what is no complete call stays
        assert "to=functions.f json" in answer.content
    else:
        assert answer.content == content


def test_a_prompt_of_gpt_oss_may_have_the_head_of_the_answer() -> None:
    letters = Letters()
    prompt = letters.encode("x<|start|>assistant<|channel|>analysis<|message|>")
    answer = read("so<|end|>" + HARMONY[1], "harmony", opening=Opening(ids=prompt))
    assert (answer.reasoning, answer.content) == ("so", "It is 4.")


def test_a_stop_string_ends_the_content_though_its_ids_are_there() -> None:
    assert read("It is 4[END]", matched="[END]", stops=["[END]"]) == Answer("It is 4")
    assert read("It is 4[END]", stops=["[END]"]) == Answer("It is 4[END]")
    assert read("a[END]b[END].", matched="[END]", stops=["[END]"]) == Answer("a[END]b")
    assert read("<think>a[END]", matched="[END]", stops=["[END]"]).reasoning == "a"


@pytest.mark.parametrize("name", FORM_NAMES)
@given(st.data(), st.booleans(), st.booleans(), st.booleans())
def test_a_stream_joined_is_the_whole_message(
    name: str, data: st.DataObject, marks_are_tokens: bool, has_tools: bool, is_stopped: bool
) -> None:
    letters = letters_of(name, marks_are_tokens)
    ids = letters.encode("".join(data.draw(pieces_of(name))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=12)))
    state = data.draw(st.sampled_from([State.BEGIN, State.THINKING]))
    options: dict[str, Any] = {
        "tools": TOOLS if has_tools else (),
        "stops": ["[END]", "]]"],
        "opening": Opening(state, letters.encode("<s>")),
        "new_id": new_id,
    }
    matched = "[END]" if is_stopped else None
    reader = letters.reader(name)
    reading = reader.reading(**options)
    reading.feed(ids)
    answer = reading.end(matched)
    logprobs = [-float(place) for place in range(len(ids))]
    turn = Turn(0, Prompt(None, [1]), Generated(ids, logprobs, (), STOP, ""))

    def texts_of(ids: Sequence[int]) -> list[str]:
        return [letters.decode([one]) for one in ids]

    whole = ChatAnswer({}, reader.reading(**options), texts_of).whole(answer, turn, 1)
    writer = ChatAnswer({}, reader.reading(**options), texts_of)
    payloads: list[Any] = []
    for end in cuts:
        payloads += writer.piece(ids[:end], lambda begin, end=end: logprobs[begin:end])
    payloads += writer.last(answer, turn, 1, usage=True)
    choices = [choice for payload in payloads for choice in payload["choices"]]
    parts = [choice["delta"] for choice in choices]
    assert "".join(part.get("content") or "" for part in parts) == answer.content
    assert "".join(part.get("reasoning_content", "") for part in parts) == answer.reasoning
    assert [call["id"] for part in parts for call in part.get("tool_calls", [])] == [
        call["id"] for call in answer.calls
    ]
    assert [part["role"] for part in parts if "role" in part] == ["assistant"]
    entries = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", [])]
    assert entries == whole["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == logprobs
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert payloads[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("name", FORM_NAMES)
@given(st.data(), st.booleans())
def test_text_that_was_sent_is_the_beginning_of_the_message(
    name: str, data: st.DataObject, marks_are_tokens: bool
) -> None:
    """Also if each token comes alone: nothing that was sent turns out to be part of a call."""
    letters = letters_of(name, marks_are_tokens)
    ids = letters.encode("".join(data.draw(pieces_of(name))))
    whole = letters.reader(name).reading(tools=TOOLS, new_id=new_id)
    whole.feed(ids)
    answer = whole.end()
    reading = letters.reader(name).reading(tools=TOOLS, new_id=new_id)
    pieces = [reading.feed([one]) for one in ids]
    content, reasoning = (
        ("".join(part) for part in zip(*pieces, strict=True)) if pieces else ("", "")
    )
    assert answer.content.startswith(content)
    assert answer.reasoning.startswith(reasoning)
    assert reading.end() == answer


@pytest.mark.parametrize("name", FORM_NAMES)
@given(st.data())
def test_text_that_is_no_call_is_unchanged(name: str, data: st.DataObject) -> None:
    letters = Letters()
    text = "".join(data.draw(pieces_of(name)))
    reading = letters.reader(name, thinks=False).reading(tools=TOOLS, new_id=new_id)
    reading.feed(letters.encode(text))
    answer = reading.end()
    assert answer.calls or answer.content == text or name == "harmony"
