"""The forms in which models write tool calls: one table, a row for each (pure).

Always true: a form reads only complete calls; any other text is no call.  Reading takes time in
proportion to the text, whatever a model wrote: no pattern can match a text in two ways, and what
was read for one beginning is not read again for the next.  Names are those that vLLM and SGLang
have for their parsers.  Facts of the forms are from the models' chat templates.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rollout.router.http.fast_json import strict_loads

Schemas = Mapping[str, Any]
"""The JSON schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a model wrote.

    Attributes:
        id: that the model gave to it; empty if it gave none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


ReadCalls = tuple[list[Call], int]
"""Calls, and the index in the text behind them."""

ReadAt = Callable[[int], ReadCalls | None]
"""The calls that begin at an index of one text, where one of a form's ``begins`` is; None if there
are none.  The indices must grow."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one family of models writes its calls.

    Attributes:
        in_template: texts that a chat template of these models has, all of them.
        begins: each call begins with one of them.
        reader: of one text.
        others: further markers within calls.
        id_form: a call's id, made of a random text, as the templates of these models take it.
        may_be_bare: a whole answer that is a JSON object may be a call too.
    """

    name: str
    in_template: tuple[str, ...]
    begins: tuple[str, ...]
    reader: Callable[[str, Schemas], ReadAt]
    others: tuple[str, ...] = ()
    id_form: str = "call_{}"
    may_be_bare: bool = False


def schemas_of(tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The schemas of the tools in a request, which may have any form."""
    functions = [tool.get("function") for tool in tools]
    return {
        str(function.get("name")): function.get("parameters")
        for function in functions
        if isinstance(function, Mapping)
    }


# -- calls as JSON ------------------------------------------------------------------------------

_SPACE = re.compile(r"\s*+")
_MAX_DEPTH = 512
# Between two brackets.  Of the letters only those of JSON's literals.  No group has "*+": Python
# before 3.11.5 matches that wrongly (gh-106052).
_PLAIN = r"[\s\d,:.+eEaflnrstuINity-]*+"
_TEXT = r'"[^"\\]*+(?:\\.[^"\\]*+)*"'
_WITHIN_JSON = re.compile(f"{_PLAIN}(?:{_TEXT}{_PLAIN})*", re.DOTALL)


def _behind(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The index behind a pattern that may be empty."""
    match = pattern.match(text, at)
    return match.end() if match else at


def _end_of_json(text: str, at: int) -> int:
    """The index behind the object or list at an index; -1 if there is none.

    No mark of a call may stand in it outside of a text in quotes.  Of two that begin at different
    marks, one is within such a text where the other is not, so the next mark ends one of them:
    together, all that are read for a text take time in proportion to it.
    """
    depth = 0
    while True:
        bracket = text[at : at + 1]
        if not bracket or bracket not in "{}[]":
            return -1
        depth += 1 if bracket in "{[" else -1
        at += 1
        if depth == 0:
            return at
        if not 0 < depth < _MAX_DEPTH:
            return -1
        at = _behind(_WITHIN_JSON, text, at)


def _json(text: str, at: int) -> tuple[Any, int]:
    """The object or list at an index, and the index behind it; None and ``at`` if there is none."""
    at = _behind(_SPACE, text, at)
    end = _end_of_json(text, at)
    try:
        return (strict_loads(text[at:end]), end) if end >= 0 else (None, at)
    except (ValueError, RecursionError):
        return None, at


def _call(value: Any, call_id: str = "") -> Call | None:
    """An object with name and arguments as a call."""
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, arguments, call_id)


_HERMES_END = re.compile(r"\s*+</tool_call>")


def _hermes(text: str, schemas: Schemas) -> ReadAt:
    def read(at: int) -> ReadCalls | None:
        value, at = _json(text, at + len("<tool_call>"))
        call, end = _call(value), _HERMES_END.match(text, at)
        return ([call], end.end()) if call and end else None

    return read


_MISTRAL_HEAD = re.compile(
    r"\s*+(?P<name>[^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+(?P<id>\w++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
)
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def _mistral(text: str, schemas: Schemas) -> ReadAt:
    def read(at: int) -> ReadCalls | None:
        at += len("[TOOL_CALLS]")
        if head := _MISTRAL_HEAD.match(text, at):
            arguments, at = _json(text, head.end())
            values = [{"name": head["name"], "arguments": arguments, "id": head["id"]}]
        else:
            value, at = _json(text, at)
            values = value if isinstance(value, list) else [value]
        calls = [_call(value, _mistral_id(value)) for value in values]
        found = [call for call in calls if call is not None]
        return (found, at) if found and len(found) == len(calls) else None

    return read


def _mistral_id(value: Any) -> str:
    """The id that the model wrote, if its templates would take it."""
    call_id = value.get("id") if isinstance(value, dict) else None
    return call_id if isinstance(call_id, str) and _MISTRAL_ID.fullmatch(call_id) else ""


_PYTHON_TAG = "<|python_tag|>"


def _llama(text: str, schemas: Schemas) -> ReadAt:
    """One object up to the end of the text: templates refuse several calls in one answer."""

    def read(at: int) -> ReadCalls | None:
        is_bare = not text.startswith(_PYTHON_TAG, at)
        value, at = _json(text, at if is_bare else at + len(_PYTHON_TAG))
        call, at = _call(value), _behind(_SPACE, text, at)
        if call is None or at < len(text):
            return None
        # Other answers may be JSON objects with a name.
        return None if is_bare and call.name not in schemas else ([call], at)

    return read


def _section(begin: str, head: str, tail: str, end: str) -> Callable[[str, Schemas], ReadAt]:
    """Reads calls between two marks, each with a name, arguments as JSON, and marks around them.

    Args:
        head: pattern from a call's begin to its arguments, with the groups ``name`` and ``id``.
    """
    heads, tails, ends = re.compile(head), re.compile(tail), re.compile(end)

    def reader(text: str, schemas: Schemas) -> ReadAt:
        def read(at: int) -> ReadCalls | None:
            calls, at = [], at + len(begin)
            while start := heads.match(text, at):
                arguments, at = _json(text, start.end())
                stop = tails.match(text, at)
                if not isinstance(arguments, dict) or stop is None:
                    return None
                calls.append(Call(start["name"], arguments, start.groupdict().get("id") or ""))
                at = stop.end()
            closing = ends.match(text, at)
            return (calls, closing.end()) if calls and closing else None

        return read

    return reader


# -- calls whose arguments are texts ------------------------------------------------------------


def _tagged(
    head: str, key: str, value_end: str, end: str, around: str = ""
) -> Callable[[str, Schemas], ReadAt]:
    """Reads a call with one text for each argument; the tool's schema says what it is.

    Args:
        head: pattern of the call's begin, with the name as its group.
        key: pattern from an argument's begin to its text, with the key as its group.
        around: what stands once before and once behind a text, and is no part of it.
    """
    heads, keys, ends = re.compile(head), re.compile(key), re.compile(end)
    value_ends = re.compile(re.escape(value_end))

    def reader(text: str, schemas: Schemas) -> ReadAt:
        stops = [match.start() for match in value_ends.finditer(text)]
        fails: set[int] = set()  # behind the head or an argument of what is no call
        kinds_of = cache(lambda name, key: _kinds_of(schemas.get(name), key))

        def read(at: int) -> ReadCalls | None:
            start = heads.match(text, at)
            if start is None:
                return None
            arguments: list[tuple[str, int, int]] = []
            passed, at = [], start.end()
            while at not in fails:
                passed.append(at)
                argument = keys.match(text, at)
                if argument is None:
                    if closing := ends.match(text, at):
                        values = {
                            key: _typed(
                                text[begin:stop].removeprefix(around).removesuffix(around),
                                kinds_of(start[1], key),
                            )
                            for key, begin, stop in arguments
                        }
                        return [Call(start[1], values)], closing.end()
                    break
                index = bisect_left(stops, argument.end())
                if index == len(stops):
                    break
                arguments.append((argument[1], argument.end(), stops[index]))
                at = stops[index] + len(value_end)
            fails.update(passed)
            return None

        return read

    return reader


_NAMES_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates write values as Python does, and models after them."""
_KINDS = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    dict: {"object"},
    list: {"array"},
    type(None): {"null"},
}


def _typed(text: str, kinds: set[str]) -> Any:
    """The JSON value that ``text`` is, if it may have this kind; otherwise the text itself."""
    try:
        value = strict_loads(_NAMES_OF_PYTHON.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text
    return value if _KINDS[type(value)] & (kinds - {"string"}) else text


def _kinds_of(schema: Any, name: str) -> set[str]:
    """The kinds of values that the argument ``name`` may have; none if the schema is silent."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return _kinds(properties.get(name)) if isinstance(properties, Mapping) else set()


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    kinds = {kind for kind in _listed(schema.get("type")) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf", "allOf"):
        for one in _listed(schema.get(name)):
            kinds |= _kinds(one)
    if "$ref" in schema:  # of a model of the user's, whose values are objects
        kinds |= {"object", "array"}
    return kinds


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# -- the table ----------------------------------------------------------------------------------

_DEEPSEEK = "<\uff5ctool\u2581{}\uff5c>"
_CALLS_BEGIN = _DEEPSEEK.format("calls\u2581begin")
_CALLS_END = _DEEPSEEK.format("calls\u2581end")
_CALL_BEGIN = _DEEPSEEK.format("call\u2581begin")
_CALL_END = _DEEPSEEK.format("call\u2581end")
_SEP = _DEEPSEEK.format("sep")
_IN_DEEPSEEK = (_CALLS_END, _CALL_BEGIN, _CALL_END, _SEP)
_KIMI_BEGIN = "<|tool_calls_section_begin|>"

HERMES = Form(
    "hermes",
    in_template=("<tool_call>",),
    begins=("<tool_call>",),
    others=("</tool_call>",),
    reader=_hermes,
)
"""Of Qwen too, and of a model whose template shows no form."""

FORMS = (
    Form(
        "mistral",
        in_template=("[TOOL_CALLS]",),
        begins=("[TOOL_CALLS]",),
        reader=_mistral,
        others=("[ARGS]", "[CALL_ID]"),
        id_form="{:.9}",  # templates refuse an id of another length
    ),
    Form(
        "kimi_k2",
        in_template=(_KIMI_BEGIN,),
        begins=(_KIMI_BEGIN,),
        reader=_section(
            _KIMI_BEGIN,
            r"\s*+<\|tool_call_begin\|>\s*+(?P<id>(?:functions\.)?(?P<name>[\w.-]++):\d++)\s*+"
            r"<\|tool_call_argument_begin\|>",
            r"\s*+<\|tool_call_end\|>",
            r"\s*+<\|tool_calls_section_end\|>",
        ),
        others=(
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    Form(
        "deepseek_v3",
        in_template=(_CALLS_BEGIN, "```json"),
        begins=(_CALLS_BEGIN,),
        reader=_section(
            _CALLS_BEGIN,
            rf"\s*+{_CALL_BEGIN}\w*+{_SEP}(?P<name>[^\s<]+)\s*+```json",
            rf"\s*+```\s*+{_CALL_END}",
            rf"\s*+{_CALLS_END}",
        ),
        others=_IN_DEEPSEEK,
    ),
    Form(
        "deepseek_v31",
        in_template=(_CALLS_BEGIN,),
        begins=(_CALLS_BEGIN,),
        reader=_section(
            _CALLS_BEGIN,
            rf"\s*+{_CALL_BEGIN}\s*+(?P<name>[^\s<]++)\s*+{_SEP}",
            rf"\s*+{_CALL_END}",
            rf"\s*+{_CALLS_END}",
        ),
        others=_IN_DEEPSEEK,
    ),
    Form(
        "glm45",
        in_template=("<tool_call>", "<arg_key>"),
        begins=("<tool_call>",),
        reader=_tagged(
            r"<tool_call>\s*+([^\s<>{}]++)",
            r"\s*+<arg_key>\s*+([^<>\s]*+(?:\s++[^<>\s]++)*)\s*+</arg_key>\s*+<arg_value>",
            "</arg_value>",
            r"\s*+</tool_call>",
        ),
        others=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    Form(
        "qwen3_coder",
        in_template=("<tool_call>", "<function=", "<parameter="),
        begins=("<tool_call>", "<function="),  # its models leave out the first one at times
        reader=_tagged(
            r"(?:<tool_call>\s*+)?<function=([^<>\s]++)>",
            r"\s*+<parameter=([^<>\n]++)>",
            "</parameter>",
            r"\s*+</function>(?:\s*+</tool_call>)?",
            around="\n",
        ),
        others=("</tool_call>",),
    ),
    HERMES,
    Form(
        "llama3_json",
        in_template=('{"name": function name, "parameters": ',),
        begins=(_PYTHON_TAG,),
        reader=_llama,
        may_be_bare=True,
    ),
)
"""In this order: a template of a later form may have a part of an earlier one's texts."""


def form_of(template: str, name: str = "auto") -> Form:
    """The form of a model's calls.

    Args:
        template: text of the chat template for requests with tools.
        name: of a form; ``auto`` for the one that the template shows.
    """
    shown = (form for form in FORMS if all(one in template for one in form.in_template))
    if name == "auto":
        return next(shown, HERMES)
    return next(form for form in FORMS if form.name == name)
