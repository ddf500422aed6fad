"""The forms in which models write thinking and tool calls: one table, a row for each (pure).

The parsers are those of ``renderers``; they take any ids, here texts: a mark is one, and what
stands between two marks another.  Always true: a form reads only complete calls, in time in
proportion to them.  Names are those that vLLM and SGLang have for their parsers; facts of the
forms are from the models' chat templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THINK = ("<think>", "</think>")
TO_THE_END = ""
"""The end of calls that take all of the answer."""

_NAME = re.compile(r"[^\s<>{}\[\]\"]+")
_MOST_ARGUMENT_MARKS = 256


class Mark(str):
    """A text that a form gives a meaning, where the answer has it with this meaning.

    Attributes:
        num_ids: ids of the answer up to its end; 0 if they are not known.
    """

    num_ids: int = 0


Tokens = Sequence[str]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a model wrote.

    Attributes:
        arguments: a JSON object.
        id: that the model gave to it, or empty if it gave none.
    """

    name: str
    arguments: str
    id: str = ""


ReadCalls = Callable[[Tokens, Tools], "tuple[list[Any], str]"]
"""Attempts (``renderers.ParsedToolCall``) in a block of tokens, and the text behind them."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one family of models writes its answers.

    Attributes:
        in_template: texts that a chat template of these models has, all of them.
        blocks: the marks that begin and end a block of calls.
        marks: others that the parser knows.
        call_ends_thinking: calls may begin without an end of the thinking before them.
        may_be_bare: a whole answer that is a JSON object may be a call too.
        stray: a mark that has no meaning right behind calls.
        stops: tokens that end an answer; engines must know them.
        closing: the one that templates write in a history for any of them, or empty for the same.
        id_form: a call's id, made of a random text, as the templates of these models take it.
    """

    name: str
    in_template: tuple[str, ...]
    blocks: Mapping[str, str]
    read: ReadCalls
    marks: tuple[str, ...] = ()
    call_ends_thinking: bool = False
    may_be_bare: bool = False
    stray: str = ""
    stops: tuple[str, ...] = ()
    closing: str = ""
    id_form: str = "call_{}"

    @property
    def all_marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.blocks, *self.blocks.values(), *self.marks)))

    def calls(self, tokens: Tokens, tools: Tools) -> tuple[list[Call], str] | None:
        """The calls in a block, and the text behind them, or None if it is not calls alone."""
        try:
            attempts, rest = self.read(_apart(tokens, self.all_marks), _plain(tools))
            calls = [call_of(attempt) for attempt in attempts]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return None  # a model writes what it likes
        found = [call for call in calls if call is not None]
        return (found, rest) if found and len(found) == len(calls) else None


def _plain(tools: Tools) -> list[dict[str, Any]]:
    """The tools of a request, which may have any form, with what parsers read of them."""
    functions = [tool.get("function") for tool in tools]
    return [
        {
            "name": function["name"],
            "parameters": {"properties": _properties(function.get("parameters"))},
        }
        for function in functions
        if isinstance(function, Mapping) and isinstance(function.get("name"), str)
    ]


def _properties(schema: Any) -> dict[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return {
        name: {} if not isinstance(field, Mapping) else _readable(field)
        for name, field in (found.items() if isinstance(found, Mapping) else ())
    }


def _readable(schema: Mapping[str, Any]) -> dict[str, Any]:
    unions = ("anyOf", "oneOf")
    return {
        name: value
        for name, value in schema.items()
        if name not in unions or isinstance(value, list)
    }


def _apart(tokens: Tokens, marks: Tokens) -> list[str]:
    """Marks, and one text between two of them; a text that only looks like a mark is cut."""
    parts: list[str] = []
    for token in tokens:
        if isinstance(token, Mark) or not parts or isinstance(parts[-1], Mark):
            parts.append(token)
        else:
            parts[-1] += token  # in CPython this adds in place
    cut: list[str] = []
    for part in parts:
        looks = part in marks and not isinstance(part, Mark)
        cut += [part[:1], part[1:]] if looks else [part]
    return cut


def call_of(attempt: Any) -> Call | None:
    """A complete call, also one whose arguments are not of their declared types."""
    arguments, status = attempt.arguments, str(attempt.status)
    if not isinstance(arguments, dict) or not isinstance(attempt.name, str):
        return None
    if status not in ("ok", "invalid_json") or not _NAME.fullmatch(attempt.name):
        return None
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair stays escaped, as the model wrote it
        text = json.dumps(arguments, allow_nan=False)
    return Call(attempt.name, text, attempt.id or "")


class _Texts:
    """A tokenizer whose ids are texts."""

    name_or_path = ""
    unk_token_id = None
    eos_token_id = None

    def encode(self, text: str, *_: Any, **__: Any) -> list[str]:
        return [text]

    def decode(self, ids: Tokens, *_: Any, **__: Any) -> str:
        return "".join(ids)

    def convert_tokens_to_ids(self, token: str) -> str:
        return token


_TEXTS: Any = _Texts()
_NO_STOPS: Any = frozenset()
_TOOL_CALL: Any = "<tool_call>"
_TOOL_CALL_END: Any = "</tool_call>"


def _hermes(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    from renderers.parsing import parse_qwen3

    parsed = parse_qwen3(
        _TEXTS,
        tokens,
        stop_ids=_NO_STOPS,
        tool_call_id=_TOOL_CALL,
        tool_call_end_id=_TOOL_CALL_END,
    )
    return parsed.tool_calls, ""


def _qwen_xml(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    from renderers.parsing import parse_qwen35

    if tokens[0] != _TOOL_CALL:  # its models leave out the first mark at times
        tokens = [_TOOL_CALL, *tokens, _TOOL_CALL_END]
    text = "".join(tokens)
    # The parser searches the end of each from its begin on.
    if text.count("<parameter=") > _MOST_ARGUMENT_MARKS or text.count("<function=") != 1:
        return [], ""
    parsed = parse_qwen35(
        _TEXTS,
        tokens,
        stop_ids=_NO_STOPS,
        think_id=THINK[0],
        think_end_id=THINK[1],
        tool_call_id=_TOOL_CALL,
        tool_call_end_id=_TOOL_CALL_END,
        tools=tools,
    )
    return _of_python(parsed.tool_calls, tools), ""


def _glm(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    from renderers.parsing import parse_glm

    name = {"name": tokens[1].strip()}  # the parser refuses others, which is the tool's to do
    parsed = parse_glm(
        _TEXTS,
        tokens,
        stop_ids=_NO_STOPS,
        think_id=THINK[0],
        think_end_id=THINK[1],
        tool_call_id=_TOOL_CALL,
        tool_call_end_id=_TOOL_CALL_END,
        arg_key_id="<arg_key>",
        arg_key_end_id="</arg_key>",
        arg_value_id="<arg_value>",
        arg_value_end_id="</arg_value>",
        tools=[name, *tools],
        thinking_enabled=False,
    )
    return _of_python(parsed.tool_calls, tools), ""


def _of_python(attempts: Any, tools: Any) -> Any:
    """Calls with truth values as their templates write them, which is as Python does."""
    parameters = {tool["name"]: tool["parameters"]["properties"] for tool in tools}
    for attempt in attempts:
        of_tool = parameters.get(attempt.name, {})
        for key, value in (attempt.arguments or {}).items():
            kind = of_tool.get(key, {}).get("type")
            if isinstance(value, str) and _KINDS_OF_PYTHON.get(value, "") in _listed(kind):
                attempt.arguments[key] = _VALUES_OF_PYTHON[value]
    return attempts


def _listed(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind]


_VALUES_OF_PYTHON = {"True": True, "False": False, "None": None}
_KINDS_OF_PYTHON = {"True": "boolean", "False": "boolean", "None": "null"}

_DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"
_CALLS_BEGIN = _DEEPSEEK.format("calls\u2581begin")
_CALLS_END = _DEEPSEEK.format("calls\u2581end")
_CALL_BEGIN = _DEEPSEEK.format("call\u2581begin")
_CALL_END = _DEEPSEEK.format("call\u2581end")
_SEP = _DEEPSEEK.format("sep")


def _deepseek_v3(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    return _deepseek([_without_fence(token) for token in tokens])


def _without_fence(token: str) -> str:
    """A name and the arguments in a block of code without its fences.

    The parser has an expression for them that takes long for many spaces.
    """
    name, _, arguments = token.partition("\n")
    arguments = arguments.strip()
    if len(arguments) < 6 or not (arguments.startswith("```") and arguments.endswith("```")):
        return token.replace("```", "")
    return f"{name}\n{arguments[3:-3].removeprefix('json')}"


def _deepseek_v31(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    """The name stands where V3 has the kind of the call, and behind the mark the arguments."""
    tokens = list(tokens)
    for at in [at for at, token in enumerate(tokens) if token == _SEP]:
        if 0 < at < len(tokens) - 1 and "```" not in tokens[at + 1]:
            name, tokens[at - 1] = tokens[at - 1], "function"
            tokens[at + 1] = f"{name.strip()}\n{tokens[at + 1]}"
    return _deepseek(tokens)


def _deepseek(tokens: Any) -> tuple[list[Any], str]:
    from renderers.parsing import parse_deepseek_v3

    parsed = parse_deepseek_v3(
        _TEXTS,
        tokens,
        stop_ids=_NO_STOPS,
        tool_calls_begin_id=_CALLS_BEGIN,
        tool_calls_end_id=_CALLS_END,
        tool_call_begin_id=_CALL_BEGIN,
        tool_call_end_id=_CALL_END,
        tool_sep_id=_SEP,
    )
    return parsed.tool_calls, ""


_KIMI = "<|tool_call{}|>"
_KIMI_BEGIN = _KIMI.format("s_section_begin")
_KIMI_END = _KIMI.format("s_section_end")
_KIMI_CALL = (_KIMI.format("_begin"), _KIMI.format("_argument_begin"), _KIMI.format("_end"))


def _kimi(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    from renderers.parsing import parse_kimi_k2

    begin, arguments, end = _KIMI_CALL
    parsed = parse_kimi_k2(
        _TEXTS,
        tokens,
        stop_ids=_NO_STOPS,
        tool_calls_section_begin_id=_KIMI_BEGIN,
        tool_calls_section_end_id=_KIMI_END,
        tool_call_begin_id=begin,
        tool_call_argument_begin_id=arguments,
        tool_call_end_id=end,
    )
    return parsed.tool_calls, ""


_PYTHON_TAG = "<|python_tag|>"


def _llama(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    """One object up to the end of the answer: templates refuse several calls in one."""
    from renderers.parsing import parse_llama_3

    is_bare = tokens[0] != _PYTHON_TAG
    calls = parse_llama_3(_TEXTS, tokens if is_bare else tokens[1:], stop_ids=_NO_STOPS).tool_calls
    names = [tool["name"] for tool in tools]
    return [call for call in calls if not is_bare or call.name in names], ""


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")


def _harmony(tokens: Any, tools: Any) -> tuple[list[Any], str]:
    from renderers.parsing import parse_gpt_oss

    start, channel, message, constrain, end = HARMONY_MARKS
    parsed = parse_gpt_oss(
        _TEXTS,
        tokens,
        return_id="<|return|>",
        call_id="<|call|>",
        start_id=start,
        end_id=end,
        channel_id=channel,
        message_id=message,
        constrain_id=constrain,
    )
    return parsed.tool_calls, ""


# -- Mistral's, which renderers does not read ----------------------------------------------------

_MISTRAL = "[TOOL_CALLS]"
_MISTRAL_HEAD = re.compile(
    r"\s*+(?P<name>[^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+(?P<id>\w++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
)
_MISTRAL_BEGIN = re.compile(r"\s*+" + re.escape(_MISTRAL))
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")
_SPACE = re.compile(r"\s*+")


def _mistral(tokens: Tokens, tools: Tools) -> tuple[list[Any], str]:
    """Calls one behind another, up to the first text that is none.

    A mark within JSON can only stand in a text in quotes, so of two that begin at different marks
    one ends at the next quote: together they are read in linear time.
    """
    text, end, calls = "".join(tokens), 0, []
    while begin := _MISTRAL_BEGIN.match(text, end):
        found = _mistral_at(text, begin.end())
        if not found:
            break
        new, end = found
        calls += new
    return calls, text[end:]


def _mistral_at(text: str, at: int) -> tuple[list[Any], int] | None:
    from renderers.base import ParsedToolCall

    decoder = json.JSONDecoder()
    try:
        if head := _MISTRAL_HEAD.match(text, at):
            arguments, at = decoder.raw_decode(text, head.end())
            values = [{"name": head["name"], "arguments": arguments, "id": head["id"]}]
        else:
            space = _SPACE.match(text, at)
            value, at = decoder.raw_decode(text, space.end() if space else at)
            values = value if isinstance(value, list) else [value]
        calls = [
            ParsedToolCall(
                "", call["name"], call.get("arguments", {}), id=_mistral_id(call.get("id"))
            )
            for call in values
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return (calls, at) if calls and all(map(call_of, calls)) else None


def _mistral_id(value: Any) -> str | None:
    """The id that the model wrote, if its templates would take it."""
    return value if isinstance(value, str) and _MISTRAL_ID.fullmatch(value) else None


# -- the table ----------------------------------------------------------------------------------

HERMES = Form(
    "hermes",
    ("<tool_call>",),
    {_TOOL_CALL: _TOOL_CALL_END},
    _hermes,
    call_ends_thinking=True,
)
"""The form of Qwen too, and of a model whose template shows no form."""
HARMONY = Form(
    "harmony",
    ("<|channel|>", "<|message|>"),
    {},
    _harmony,
    marks=(*HARMONY_MARKS, "<|call|>", "<|return|>"),
    stops=("<|return|>", "<|call|>"),
    closing="<|end|>",
)
"""The form of gpt-oss: an answer is messages, each in a channel."""

FORMS = (
    HARMONY,
    Form(
        "mistral",
        (_MISTRAL,),
        {_MISTRAL: TO_THE_END},
        _mistral,
        marks=("[ARGS]", "[CALL_ID]"),
        id_form="{:.9}",  # templates refuse an id of another length
    ),
    Form(
        "kimi_k2",
        (_KIMI_BEGIN,),
        {_KIMI_BEGIN: _KIMI_END},
        _kimi,
        marks=_KIMI_CALL,
        call_ends_thinking=True,
    ),
    Form(
        "deepseek_v3",
        (_CALLS_BEGIN, "```json"),
        {_CALLS_BEGIN: _CALLS_END},
        _deepseek_v3,
        marks=(_CALL_BEGIN, _SEP, _CALL_END),
    ),
    Form(
        "deepseek_v31",
        (_CALLS_BEGIN,),
        {_CALLS_BEGIN: _CALLS_END},
        _deepseek_v31,
        marks=(_CALL_BEGIN, _SEP, _CALL_END),
    ),
    Form(
        "glm45",
        ("<tool_call>", "<arg_key>"),
        {_TOOL_CALL: _TOOL_CALL_END},
        _glm,
        marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        call_ends_thinking=True,
        stops=("<|observation|>", "<|user|>"),
    ),
    Form(
        "qwen3_coder",
        ("<tool_call>", "<function=", "<parameter="),
        {_TOOL_CALL: _TOOL_CALL_END, "<function=": "</function>"},
        _qwen_xml,
        call_ends_thinking=True,
        stray=_TOOL_CALL_END,
    ),
    HERMES,
    Form(
        "llama3_json",
        ('{"name": function name, "parameters": ',),
        {_PYTHON_TAG: TO_THE_END},
        _llama,
        may_be_bare=True,
    ),
)
"""In this order: a template of a later form may have a part of an earlier one's texts."""
UNREAD = Form("none", (), {}, lambda tokens, tools: ([], ""))
"""The form of models whose renderer parses whole answers itself."""
BY_NAME = {form.name: form for form in FORMS}


def form_of(template: str, name: str = "auto") -> Form:
    """The form of a model's answers.

    Args:
        template: text of the chat template for requests with tools.
        name: of a form; ``auto`` for the one that the template shows.
    """
    shown = (form for form in FORMS if all(marker in template for marker in form.in_template))
    return next(shown, HERMES) if name == "auto" else BY_NAME[name]
