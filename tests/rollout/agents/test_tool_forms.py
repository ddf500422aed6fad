"""Each form of tool calls: what it reads, what it leaves, and which template shows it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from rollout.agents.model.tool_calls import Answer, reader_of
from rollout.agents.model.tool_forms import FORMS, Form, form_of, schemas_of
from rollout.config.http import AgentsConfig
from tests.support.chat_models import THINKING
from tests.support.tool_families import ARGUMENTS, FAMILIES, TOOLS

SCHEMAS = schemas_of(TOOLS)
DEEPSEEK = [
    f"<\uff5ctool\u2581{one}\uff5c>"
    for one in ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end")
]
KIMI_CALL = "<|tool_call_begin|>functions.add:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"


def read(name: str, text: str, schemas: Any = SCHEMAS) -> Answer:
    return reader_of(form_of("", name), []).read(text, schemas, lambda: "0123456789abcdef")


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer.calls]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_call_is_read_and_its_text_stays(name: str) -> None:
    family = FAMILIES[name]
    answer = read(family.form, family.call)
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
            [("f", {"x": "<b>\n"})],
            "So",
        ),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", [("f", {})], ""),
        (
            "glm45",
            "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><tool_call>g"
            "</tool_call>",
            [("f", {"x": "1"}), ("g", {})],
            "",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            [("f", {"x": "</tool_call>"})],
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
        ("qwen3_coder", "<tool_call>\n<function=f>\nx\n</function>\n</tool_call>"),
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
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, "12", 12),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, '"a"', '"a"'),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, '"a"', '"a"'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "object"}, "{no json}", "{no json}"),
        ({"$ref": "#/$defs/Place"}, '{"x": 1}', {"x": 1}),
        ({}, "12", "12"),
        (None, "12", "12"),
        ("broken", "12", "12"),
        ({"type": 3, "anyOf": [3], "oneOf": 3}, "12", "12"),
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
    ((_, arguments),) = calls_of(read(name, written, {"f": {"properties": {"x": schema}}}))
    assert arguments == {"x": value}
    assert type(arguments["x"]) is type(value)


@pytest.mark.parametrize("schemas", [{}, {"f": None}, {"f": {"properties": 3}}, {"f": "x"}])
def test_without_a_schema_an_argument_is_a_text(schemas: Any) -> None:
    text = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    assert calls_of(read("glm45", text, schemas)) == [("f", {"x": "1"})]


def test_schemas_are_read_from_tools_of_any_form() -> None:
    tools = [{}, {"function": 3}, {"function": {}}, {"function": {"name": "f", "parameters": 1}}]
    assert schemas_of(tools) == {"None": None, "f": 1}


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


FILLERS = ("\n", '"', "\\", "{", "[", "<", "a", '{"x": "', '"x": "')
MEASURABLE_S, LENGTH = 0.005, 1 << 14


def cuts_of(call: str) -> list[int]:
    """Where one part of a call ends and the next begins."""
    return sorted({place.end() for place in re.finditer(r"\w+|[^\w\s]+|\s+", call)})


HERMES_CALL = f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'


def degenerate_texts(form: Form) -> Iterator[tuple[str, str, str]]:
    """What a model may write without end: a beginning, what it repeats, an end."""
    calls = [family.call for family in FAMILIES.values() if family.form == form.name]
    for call in {call[max(0, call.find(form.begins[0])) :] for call in calls or [HERMES_CALL]}:
        for at in cuts_of(call):
            begun, rest = call[:at], call[at:]
            yield "", begun, rest
            yield "", begun, ""
            for filler in FILLERS:
                yield begun, filler, rest
                yield "", begun + filler, rest
            for begin in form.begins:
                yield begun, begin, rest
                yield "", begun + '"' + begin, rest


def cpu_s(form: Form, text: str) -> float:
    reader = reader_of(form, [])
    begin_s = time.thread_time()
    reader.certain(text)
    reader.read(text, SCHEMAS, lambda: "0" * 24)
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
