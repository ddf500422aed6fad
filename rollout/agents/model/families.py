"""Which renderer is that of a model, and what a chat needs of the model.

Always true: a renderer is chosen only if it gives the ids of the folder's own chat template, or
if the settings name it.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from engines.plain_json import read_json
from rollout.agents.model.alignment import Ends, tokenised
from rollout.agents.model.answer_reader import AnswerReader
from rollout.agents.model.call_forms import BY_NAME, HARMONY, THINK, UNREAD, Form, form_of
from rollout.agents.model.chat_tokenizer import (
    BoundTemplate,
    ChatTokenizer,
    check_client,
    load_chat_tokenizer,
)
from rollout.agents.model.renderer_tokens import RendererTokens
from rollout.agents.model.reply_text import marks_of
from rollout.agents.wire.messages import BadChat, Message
from rollout.core.errors import ConfigError
from rollout.core.optional_deps import optional_import
from rollout.router.tokenizer_file import no_tokenizer

if TYPE_CHECKING:
    from renderers.base import Renderer

logger = logging.getLogger(__name__)

_SETTING = "agents.renderer"
_NUM_RENDERERS = 16
_NUM_BEFORE = 64
"""Ids of a prompt before an answer in which its beginning is searched."""
_FORM_OF = {
    "deepseek-r1": "deepseek_v3",
    "deepseek-v3": "deepseek_v3",
    "glm-4.5": "glm45",
    "glm-5": "glm45",
    "glm-5.1": "glm45",
    "glm-5.3": "glm45",
    "gpt-oss": "harmony",
    "kimi-k2": "kimi_k2",
    "kimi-k2.5": "kimi_k2",
    "llama-3": "llama3_json",
    "nemotron-3": "qwen3_coder",
    "nemotron-3-ultra": "qwen3_coder",
    "nemotron-3.5": "qwen3_coder",
    "prime-qwen3": "qwen3_coder",
    "qwen3": "hermes",
    "qwen3-vl": "hermes",
    "qwen3.5": "qwen3_coder",
    "qwen3.6": "qwen3_coder",
    "qwen3.8": "qwen3_coder",
}
"""The form of a renderer's answers; those of others are read by the renderer."""


@dataclass(frozen=True, slots=True)
class Family:
    """A renderer of ``renderers`` with its settings.

    Attributes:
        config: as the model's template is by default.
    """

    name: str
    tokens: RendererTokens
    config: Any
    _made: dict[str, Renderer | None] = field(default_factory=dict, compare=False)

    def renderer(self, options: Mapping[str, Any] = {}) -> Renderer | None:
        """The renderer with these options of a chat template, or None if it has them not."""
        key = json.dumps(options, sort_keys=True, default=repr)
        if key not in self._made:
            if len(self._made) >= _NUM_RENDERERS:
                self._made.clear()
            self._made[key] = self._make(options)
        return self._made[key]

    def _make(self, options: Mapping[str, Any]) -> Renderer | None:
        from renderers import create_renderer, merge_chat_template_kwargs

        try:
            merged = merge_chat_template_kwargs(self.config, options)
        except (ValueError, TypeError):
            return None
        with suppress(ValueError):  # all thinking of the history stays in the ids
            merged = merge_fields(merged, thinking_retention="all")
        made: Renderer = create_renderer(self.tokens, merged)
        return made


def merge_fields(config: Any, **fields: Any) -> Any:
    """The same settings with some others; raises ValueError if they do not fit."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    return type(config)(**{**given, **fields})


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What a chat needs of its model; safe in several threads.

    Attributes:
        reader: of its answers.
        family: None if it has its template alone.
        ends: tokens that end its answers.
    """

    chat: ChatTokenizer
    reader: AnswerReader
    family: Family | None
    ends: Ends

    @property
    def form(self) -> Form:
        return self.reader.form

    @property
    def has_template(self) -> bool:
        return "default" in self.chat.templates

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer, which an engine may not know."""
        return [self.chat.added[stop] for stop in self.form.stops if stop in self.chat.added]

    @property
    def eos_ids(self) -> list[int]:
        """The token that ends texts of this model; none if it is not named."""
        eos = self.chat.special_tokens.get("eos_token", "")
        return [self.chat.added[eos]] if eos in self.chat.added else []

    def bound(self, tools: Any, options: Mapping[str, Any]) -> BoundTemplate:
        return self.chat.bound(tools, options)

    def takes(self, option: str) -> bool:
        """Whether the template or the renderer has this option."""
        fields = type(self.family.config).template_field_names() if self.family else ()
        return option in self.chat.tool_template or option in fields

    def as_rendered(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with their thinking where this model's template has it."""
        template, thinking = self.chat.tool_template, self.reader.thinking
        if self.form is HARMONY:
            return [_with_analysis(message) for message in _named(messages)]
        if "reasoning_content" in template or not template:
            return messages
        return [_with_thinking(message, thinking) for message in messages]

    def rendered(
        self, messages: Sequence[Message], tools: Any, options: Mapping[str, Any]
    ) -> list[int]:
        """The ids of a whole prompt, for a model without a template.

        Raises:
            BadChat: the renderer refuses them.
        """
        renderer = self.family.renderer(options) if self.family else None
        if renderer is None:
            raise BadChat(f"chat_template_kwargs are not those of this model: {list(options)}")
        try:
            given: Any = list(messages)
            ids: list[int] = renderer.render_ids(
                given, tools=tools or None, add_generation_prompt=True
            )
            return ids
        except Exception as error:  # a renderer raises what it likes
            check_client()
            raise BadChat(f"the chat template refused the messages: {error}") from error

    def bridged(
        self,
        known: array[int],
        num_answer: int,
        new: Sequence[Message],
        tools: Any,
        options: Mapping[str, Any],
    ) -> list[int] | None:
        """The ids behind those that are known, up to the next answer.

        Args:
            known: the last ``num_answer`` of them are the answer before.
            new: the messages behind it.

        Returns:
            None if the model's renderer does not show them.
        """
        renderer = self.family.renderer(options) if self.family else None
        has_images = any(isinstance(message.get("content"), list) for message in new)
        if renderer is None or not num_answer or has_images:  # it would process the images
            return None
        begin = len(known) - num_answer
        before, answer = known[max(0, begin - _NUM_BEFORE) : begin].tolist(), known[begin:].tolist()
        try:
            given: Any = list(new)
            made = renderer.bridge_to_next_turn(before, answer, given, tools=tools or None)
        except Exception:  # a renderer raises what it likes
            check_client()
            return None
        num = len(before) + len(answer)
        ids: list[int] = [] if made is None else made.token_ids
        # It may cut off what it takes for no part of the answer.
        return ids[num:] if ids[:num] == before + answer else None


def _named(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages; those of tools with the names of their functions, which Harmony writes."""
    names: dict[Any, str] = {}
    for message in messages:
        names |= {
            call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()
        }
        name = names.get(message.get("tool_call_id"))
        yield {"name": name, **message} if name and message["role"] == "tool" else message


def _with_analysis(message: Message) -> Message:
    """Harmony's templates take the thinking beside calls, and refuse it beside a text."""
    thinking = message.get("reasoning_content")
    if not thinking or message.get("content"):
        return message
    return {**message, "thinking": thinking}


def _with_thinking(message: Message, marks: tuple[str, str] | None) -> Message:
    thinking = message.get("reasoning_content")
    if not thinking or marks is None:
        return message
    begin, end = marks
    content = message.get("content") or ""
    return {**message, "content": f"{begin}\n{thinking}\n{end}\n\n{content}"}


# -- the choice ---------------------------------------------------------------------------------


def load_chat_model(
    folder: str, renderer: str = "auto", tool_call_parser: str = "auto"
) -> ChatModel:
    """Read the files of a model's folder, and find its renderer.

    Args:
        renderer: name of one of ``renderers``; ``default`` for the chat template alone; ``auto``
            for one that gives the template's ids, or else the template alone.
        tool_call_parser: name of the form of tool calls; ``auto`` for the renderer's, or else the
            template's.

    Raises:
        ConfigError: a package or a file is missing, or there is no such renderer; the message says
            what to set or install.
    """
    chat = load_chat_tokenizer(folder)
    template = chat.tool_template
    if not template and renderer in ("auto", "default"):
        raise no_tokenizer(folder, f"{folder} has no chat template")
    family, why = _family_of(chat, folder, renderer)
    name = family.name if family is not None else renderer
    form = form_of(template, tool_call_parser)
    if tool_call_parser == "auto" and name not in ("auto", "default"):
        form = BY_NAME[_FORM_OF[name]] if name in _FORM_OF else UNREAD
    has_thinking = "</think>" in template or (family is not None and name != "llama-3")
    thinking = THINK if has_thinking and form not in (HARMONY, UNREAD) else None
    made = family.renderer() if form is UNREAD and family is not None else None
    reader = reader_of(chat, form, thinking)
    if made is not None:
        reader = replace(reader, parse=made.parse_response)
    logger.info(
        "chats of %s: %s; tool calls in the form %s, %s",
        folder,
        why,
        form.name,
        "thinking is separated" if thinking or form in (HARMONY, UNREAD) else "no thinking",
    )
    stops = form.stops if form.closing else ()
    ids = frozenset(chat.added[word] for word in (*stops, form.closing) if word in chat.added)
    return ChatModel(chat, reader, family, Ends(stops, ids, form.closing))


def reader_of(chat: ChatTokenizer, form: Form, thinking: tuple[str, str] | None) -> AnswerReader:
    """Reads answers in a form, with these marks around the thinking."""
    words = (*form.all_marks, *(thinking or ()))
    return AnswerReader(form, thinking, marks_of(words, chat.added.get, chat.special), chat.decode)


def _family_of(chat: ChatTokenizer, folder: str, renderer: str) -> tuple[Family | None, str]:
    """The renderer, and why it is this one."""
    if renderer == "default":
        return None, "the chat template alone, as the settings say"
    with optional_import("agents", "sessions need renderers"):
        from renderers import config_from_name
        from renderers.base import MODEL_RENDERER_MAP
    names = set(MODEL_RENDERER_MAP.values())
    if renderer == "auto":
        return _found_by_trial(chat, folder)
    if renderer not in names:
        raise ConfigError(
            f"there is no renderer {renderer!r}; set {_SETTING} to auto, default, or one of "
            f"{', '.join(sorted(names))}",
            setting=_SETTING,
            value=renderer,
        )
    why = f"the renderer {renderer}, as the settings say"
    if renderer == "gpt-oss" and chat.templates:
        return None, f"{why}: its chat template, and its answers"
    family = Family(renderer, RendererTokens(chat, folder), config_from_name(renderer))
    try:
        family.renderer()
    except Exception as error:  # a renderer raises what it likes
        raise no_tokenizer(folder, f"{folder} is not of the renderer {renderer}: {error}") from None
    return family, why


def _found_by_trial(chat: ChatTokenizer, folder: str) -> tuple[Family | None, str]:
    from renderers import config_from_name

    tokens = RendererTokens(chat, folder)
    probes = list(_probes(chat))
    for name in _in_order(folder):
        config = config_from_name(name)
        for fields in _variants(config):
            family = Family(name, tokens, merge_fields(config, **fields))
            if _fits(family, [probe for probe in probes if not _deviates(fields, probe.messages)]):
                noted = f" with {fields}" if fields else ""
                return family, f"the renderer {name}{noted}, which gives the chat template's ids"
    return None, "the chat template alone, whose ids no renderer gives"


def _variants(config: Any) -> Iterator[dict[str, bool]]:
    """Settings to try: small models of a family may not think by default."""
    yield {}
    for name in ("enable_thinking", "thinking"):
        if name in type(config).template_field_names():
            yield from ({name: value} for value in (True, False))


def _in_order(folder: str) -> list[str]:
    """Names of renderers, first those of the model that the folder's settings name.

    Without gpt-oss's, which loads a vocabulary from the network; its template does as well.
    """
    from renderers.base import MODEL_RENDERER_MAP

    file = Path(folder) / "config.json"
    try:
        settings = read_json(file.read_text(encoding="utf-8"))
        names = [Path(folder).name, Path(str(settings.get("_name_or_path"))).name]
        kind = str(settings.get("model_type", "")).replace("_", "")
    except (OSError, ValueError, AttributeError):
        names, kind = [Path(folder).name], ""
    known = {model.partition("/")[2]: name for model, name in MODEL_RENDERER_MAP.items()}
    named = [known[name] for name in names if name in known]

    def place(name: str) -> tuple[bool, int, str]:
        plain = name.replace("-", "").replace(".", "")
        return name not in named, -len(plain) if kind.startswith(plain) else 0, name

    return sorted(set(MODEL_RENDERER_MAP.values()) - {"gpt-oss"}, key=place)


_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks up.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "deep": {"type": "boolean"}},
                "required": ["what"],
            },
        },
    }
]
_PROBE_CALL = {
    "id": "functions.look_up:0",
    "type": "function",
    "function": {
        "name": "look_up",
        "arguments": {"what": "a b", "deep": True, "more": {"x": [1, "y"]}},
    },
}
_USER = {"role": "user", "content": "One?"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
_RESULT = {"role": "tool", "tool_call_id": _PROBE_CALL["id"], "name": "look_up", "content": "2"}
_PROBES: tuple[tuple[list[dict[str, Any]], Any], ...] = (
    ([_USER], None),
    ([{"role": "system", "content": "Be short."}, _USER], None),
    ([_USER, {"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}], None),
    ([_USER], _PROBE_TOOLS),
    ([_USER, _CALLED, _RESULT], _PROBE_TOOLS),
    ([_USER, {**_CALLED, "content": "A.", "reasoning_content": "B."}, _RESULT], _PROBE_TOOLS),
)


class _Probe(NamedTuple):
    """Messages, tools, and the ids that the chat template gives for them."""

    messages: list[dict[str, Any]]
    tools: Any
    ids: list[int]


def _probes(chat: ChatTokenizer) -> Iterator[_Probe]:
    for messages, tools in _PROBES:
        template = chat.bound(tools, {"date_string": "26 Jul 2024"})  # renderers have this date
        try:
            text = template.render(messages, for_answer=True)
        except BadChat:
            continue
        yield _Probe(messages, tools, tokenised(template, text)[0])


def _deviates(fields: Mapping[str, bool], messages: Sequence[Message]) -> bool:
    """Without thinking renderers write its marks in a history too, where templates do not."""
    is_off = False in fields.values()
    return is_off and any(
        message["role"] == "assistant" and "tool_calls" not in message for message in messages
    )


def _fits(family: Family, probes: Sequence[_Probe]) -> bool:
    try:
        renderer = family.renderer()
        assert renderer is not None
        render: Callable[..., list[int]] = renderer.render_ids
        return bool(probes) and all(
            render(messages, tools=tools, add_generation_prompt=True) == ids
            for messages, tools, ids in probes
        )
    except Exception:  # its marks are not the tokenizer's
        return False
