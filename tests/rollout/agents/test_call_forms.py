"""Each form of tool calls: what it reads, what it leaves, and which template shows it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from rollout.agents.model.answer_reader import Answer
from rollout.agents.model.call_forms import BY_NAME, FORMS, Form, form_of
from rollout.config import AgentsConfig
from tests.support.chat_models import THINKING
from tests.support.letters import Letters
from tests.support.tool_families import ARGUMENTS, FAMILIES, TOOLS

pytest.importorskip("renderers")

DEEPSEEK = [
    f"<\uff5ctool\u2581{one}\uff5c>"
    for one in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
]
KIMI_CALL = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


def read(name: str, text: str, tools: Any = TOOLS, *, thinks: bool = False) -> Answer:
    letters = Letters()
    reading = letters.reader(name, thinks=thinks).reading(tools=tools, new_id=new_id)
    reading.feed(letters.encode(text))
    return reading.end()


def new_id() -> str:
    return "0123456789abcdef"


def tool(**properties: Any) -> list[Any]:
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer.calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_call_is_read_and_its_text_stays(name: str) -> None:
    family = FAMILIES[name]
    answer = read(family.form, family.call, thinks=True)
    assert calls_of(answer) == [("add", ARGUMENTS)]
    assert answer.content == (family.content or "")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_not_complete_stays_in_the_text(name: str) -> None:
    family = FAMILIES[name]
    for end in range(len(family.call)):
        text = family.call[:end]
        if name == "qwen3_coder" and "</function>" in text:
            continue  # its models leave out the last mark at times
        assert read(family.form, text) == Answer(text)


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}] So',
            [("f", {}), ("g", {"x": 1})],
            " So",
        ),
        (
            "mistral",
            '[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{"x": 1}',
            [("f", {}), ("g", {"x": 1})],
            "",
        ),
        ("mistral", '[TOOL_CALLS]f{"x": 1}', [("f", {"x": 1})], ""),
        (
            "llama3_json",
            'So: <|python_tag|> {"name": "f", "parameters": {}}',
            [("f", {})],
            "So:",
        ),
        ("llama3_json", '\n{"name": "add", "arguments": {"a": 1}}\n', [("add", {"a": 1})], ""),
        (
            "qwen3_coder",
            "So <function=f>\n<parameter=x>\n<b>\n\n</parameter>\n</function>",
            [("f", {"x": "<b>"})],
            "So",
        ),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", [("f", {})], ""),
        (
            "glm45",
            "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><tool_call>g"
            "</tool_call>",
            [("f", {"x": 1}), ("g", {})],
            "",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": "<tool_call>"}}</tool_call>',
            [("f", {"x": "<tool_call>"})],
            "",
        ),
    ],
)
def test_variants_are_read(name: str, text: str, calls: list[Any], content: str) -> None:
    answer = read(name, text)
    assert calls_of(answer) == calls
    assert answer.content == content


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]'),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", '[TOOL_CALLS]f[ARGS]["x"]'),
        ("llama3_json", '{"name": "Ada", "parameters": {}}'),  # no tool has this name
        ("llama3_json", 'So: {"name": "add", "parameters": {}}'),
        ("llama3_json", '{"name": "add", "parameters": {}} So'),
        ("llama3_json", '<|python_tag|>print("2")'),
        ("llama3_json", '<|python_tag|>{"name": "f"}; {"name": "g"}'),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\nf\n</tool_call>"),
        ("qwen3_coder", "<function=f><parameter=x>1</parameter>"),
        ("glm45", "<tool_call>f<arg_value>x</arg_value></tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("glm45", "<tool_call>f<arg_key>x</arg_key></tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("kimi_k2", f"<|tool_calls_section_begin|>{KIMI_CALL.format(0)}"),
        ("deepseek_v31", "{}{}f{}[1]{}{}".format(*DEEPSEEK)),
        ("deepseek_v31", "{}{}f{}{{}}{}".format(*DEEPSEEK)),
        ("deepseek_v3", "{}{}f{}{{}}{}{}".format(*DEEPSEEK)),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} So</tool_call>'),
    ],
)
def test_what_is_not_in_the_form_stays_in_the_text(name: str, text: str) -> None:
    assert read(name, text) == Answer(text)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "1.5", 1.5),
        ({"type": "integer"}, "true", True),
        ({"type": "number"}, "12", 12),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, '"a"', "a"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, "{no json}", "{no json}"),
        ({"$ref": "#/$defs/Place"}, '{"x": 1}', {"x": 1}),
        ({}, "12", 12),
        (None, "12", 12),
        ("broken", "True", "True"),
        ({"type": 3, "anyOf": [3], "oneOf": 3}, "12", 12),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_the_schema_says_what_the_text_of_an_argument_is(
    name: str, schema: Any, text: str, value: Any
) -> None:
    written = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[name]
    ((_, arguments),) = calls_of(read(name, written, tool(x=schema)))
    assert arguments == {"x": value}
    assert type(arguments["x"]) is type(value)


@pytest.mark.parametrize("parameters", [None, 3, "x", {"properties": 3}, {}])
@pytest.mark.parametrize("text", ["1 + 1", "True"])
def test_without_a_schema_an_argument_that_is_no_json_is_a_text(parameters: Any, text: str) -> None:
    tools = [{}, {"function": 3}, {"function": {}}, tool()[0]]
    tools[-1]["function"] = {"name": "f", "parameters": parameters}
    call = f"<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert calls_of(read("glm45", call, tools)) == [("f", {"x": text})]


def test_a_call_of_an_unknown_tool_is_a_call() -> None:
    """As in every form: the agent says so to the model."""
    call = "<tool_call>g\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    assert calls_of(read("glm45", call)) == [("g", {"x": 1})]


def test_without_tools_no_calls_are_read() -> None:
    for family in FAMILIES.values():
        assert read(family.form, family.call, []) == Answer(family.call)


def test_a_text_that_looks_like_a_mark_is_none_where_marks_are_tokens() -> None:
    """A model may write about its own marks, in letters."""
    words = BY_NAME["hermes"].all_marks
    letters = Letters(words)
    call = '{"name": "f", "arguments": {"x": "</tool_call>"}}'
    begin, end = map(letters.encode, words)
    reading = letters.reader("hermes").reading(tools=TOOLS, new_id=new_id)
    reading.feed([*begin, *map(ord, call), *end])
    assert calls_of(reading.end()) == [("f", {"x": "</tool_call>"})]


def test_ids_are_those_that_templates_take() -> None:
    """Mistral's have nine characters; Kimi's model writes its own, which results name."""
    call = '[TOOL_CALLS] [{{"name": "f", "arguments": {{}}, "id": {}}}]'
    ids = [read("mistral", call.format(one)).calls[0]["id"] for one in ('"abcdefghi"', '"x"', "3")]
    assert ids == ["abcdefghi", "012345678", "012345678"]
    section = "<|tool_calls_section_begin|>{}{}<|tool_calls_section_end|>"
    two = read("kimi_k2", section.format(KIMI_CALL.format(4), KIMI_CALL.format(5)))
    assert [call["id"] for call in two.calls] == ["functions.add:4", "functions.add:5"]
    assert read("hermes", '<tool_call>{"name": "f"}</tool_call>').calls[0]["id"].startswith("call_")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_shows_its_form(name: str) -> None:
    assert form_of(FAMILIES[name].template).name == FAMILIES[name].form


def test_a_template_that_shows_no_form_gets_that_of_hermes() -> None:
    assert form_of("{{ messages }}").name == form_of(THINKING).name == "hermes"


def test_the_setting_has_all_forms() -> None:
    values = get_args(AgentsConfig.model_fields["tool_call_parser"].annotation)
    assert set(values) == {"auto", *(form.name for form in FORMS)}


FILLERS = ("\n", '"', "{", "[", '{"x": "', '"x": "')
MEASURABLE_S, LENGTH = 0.01, 1 << 12


def cuts_of(call: str) -> list[int]:
    """Where one part of a call ends and the next begins."""
    return sorted({place.end() for place in re.finditer(r"\w+|[^\w\s]+|\s+", call)})


HERMES_CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
HARMONY_CALL = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>'
)


def begins_of(form: Form) -> tuple[str, ...]:
    return tuple(form.blocks) or ("<|start|>",)


def degenerate_texts(form: Form) -> Iterator[tuple[str, str, str]]:
    """What a model may write without end: a beginning, what it repeats, an end."""
    calls = [family.call for family in FAMILIES.values() if family.form == form.name]
    calls = calls or [HARMONY_CALL if form.name == "harmony" else HERMES_CALL]
    for call in {call[max(0, call.find(begins_of(form)[0])) :] for call in calls}:
        for at in cuts_of(call):
            begun, rest = call[:at], call[at:]
            yield "", begun, rest
            yield "", begun, ""
            for filler in FILLERS:
                yield begun, filler, rest
            for begin in (*begins_of(form), "<think>"):
                yield begun, begin, rest
                yield "<think>", begun + '"' + begin, rest


def cpu_s(form: Form, text: str) -> float:
    letters = Letters(form.all_marks)
    ids = letters.encode(text)
    begin_s = time.thread_time()
    reading = letters.reader(form.name).reading(tools=TOOLS, stops=["</s>"], new_id=new_id)
    for at in range(0, len(ids), LENGTH // 4):
        reading.feed(ids[at : at + LENGTH // 4])
    reading.end()
    return time.thread_time() - begin_s


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_reading_takes_time_in_proportion_to_the_text(form: Form) -> None:
    """Twice the text takes twice the work, whatever a collapsed policy writes."""
    for begun, unit, rest in degenerate_texts(form):

        def text(num: int, parts: tuple[str, str, str] = (begun, unit, rest)) -> str:
            return parts[0] + parts[1] * (num // len(parts[1])) + parts[2]

        if cpu_s(form, text(LENGTH)) > MEASURABLE_S:
            ratios = (cpu_s(form, text(2 * LENGTH)) / cpu_s(form, text(LENGTH)) for _ in range(5))
            assert any(ratio < 3 for ratio in ratios), (begun, unit, rest)
