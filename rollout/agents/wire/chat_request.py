"""A chat of OpenAI's form as a request of ``/generate`` (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from rollout.agents.wire.messages import MAX_MESSAGES, TOO_MANY_MESSAGES, BadChat, read_messages
from rollout.router.continuation.forms import (
    has_forms,
    is_flag,
    is_object,
    or_none,
    read_object,
)
from rollout.router.http.fast_json import dumps
from rollout.rules.contract import FIELDS

T = TypeVar("T")

_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "regex",
            "ebnf",
        )
    },
}
"""OpenAI's and SGLang's names on the left, those of ``/generate`` on the right."""
_MOST_TOOL_BYTES = 1 << 20
_PASSED = {
    "cache_salt": "extra_key",  # vLLM's name
    **{name: name for name in ("rid", "extra_key", "priority", "return_routed_experts")},
}
_REFUSED = {
    "top_logprobs": "it has the log-prob of each token of the answer, and no others",
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "a session is text",
}
_FORMS = {
    "stream": or_none(is_flag),
    "logprobs": or_none(is_flag),
    "stays_with_version": or_none(is_flag),
    "continue_final_message": or_none(is_flag),
    "stream_options": or_none(is_object),
    "chat_template_kwargs": or_none(is_object),
    "response_format": or_none(is_object),
    "tools": or_none(lambda value: isinstance(value, list) and all(map(is_object, value))),
    "model": or_none(lambda value: isinstance(value, str)),
    "lora_path": or_none(lambda value: isinstance(value, str)),
    "reasoning_effort": or_none(lambda value: isinstance(value, str)),
}


class Begun(NamedTuple):
    """The beginning of an answer, which the client gives, or empty for none."""

    content: str = ""
    reasoning: str = ""


_NOT_BEGUN = Begun()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of a session.

    Attributes:
        options: variables of the chat template.
        sampling: as ``/generate`` takes it.
        fields: of ``/generate``, beside ids and sampling.
        calls_tools: tool calls in the answer are separated from its text.
        lora_path: the adapter, or empty for the one that was pushed last, None for the base.
        stops, stop_ids: texts and tokens that end the answer, and are no part of its text.
        effort: of the thinking, as OpenAI's clients name it, or empty for the model's own.
        stays: its session stays with the version of the adapter that answers it.
        contract: the members of its body that are one, which are not read so far.
    """

    messages: Sequence[dict[str, Any]]
    begun: Begun = _NOT_BEGUN
    tools: list[dict[str, Any]] = field(default_factory=list)
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    is_streamed: bool = False
    wants_usage: bool = False
    wants_logprobs: bool = False
    lora_path: str | None = ""
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    effort: str = ""
    stays: bool = False
    contract: Mapping[str, Any] = field(default_factory=dict)

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools)

    def without_prompt(self) -> ChatRequest:
        """What an answer needs of it."""
        return replace(self, messages=(), options={}, sampling={}, fields={})

    def body(self, ids: list[int], *, stop_ids: list[int] | None = None) -> dict[str, Any]:
        """The body for ``/generate``.

        Args:
            stop_ids: tokens that end an answer of this model, if the client names none.
        """
        sampling = dict(self.sampling)
        if stop_ids and not sampling.get("ignore_eos"):
            sampling.setdefault("stop_token_ids", stop_ids)
        return {
            **self.fields,
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": self.is_streamed,
        }


def read_chat(body: bytes) -> ChatRequest:
    """The request in ``body``.

    Raises:
        BadChat: it has another form, or requests what a session cannot do.
    """
    # A parser makes all of them before they can be counted, and holds the interpreter's lock.
    if len(body) > _MOST_TOOL_BYTES and body.count(b'"role"') > 2 * MAX_MESSAGES:
        raise BadChat(TOO_MANY_MESSAGES)
    raw = read_object(body)
    if raw is None:
        raise BadChat("the body must be a JSON object")
    for name, form in _FORMS.items():
        if not has_forms(raw, {name: form}):
            raise BadChat(f"{name} has a wrong type: {raw[name]!r:.60}")
    for name, instead in _REFUSED.items():
        if raw.get(name):
            raise BadChat(f"a session does not take {name}: {instead}")
    if raw.get("n") not in (None, 1):
        raise BadChat("a session answers with n=1; send the request again for another branch")
    tools, choice = raw.get("tools") or [], raw.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise BadChat(
            f"tool_choice must be auto or none: {choice!r:.60}; engines force a call by a grammar, "
            "which the model's own form of calls does not fit"
        )
    if len(body) > _MOST_TOOL_BYTES < len(dumps(tools)):
        raise BadChat(f"a session takes at most {_MOST_TOOL_BYTES} bytes of tools")
    messages, begun = read_messages(raw.get("messages")), _NOT_BEGUN
    if messages[-1]["role"] == "assistant":
        if not raw.get("continue_final_message"):
            raise BadChat(
                "the last message is an assistant's; a session answers a user or a tool, and "
                "continues an answer with continue_final_message"
            )
        last = messages.pop()
        if "tool_calls" in last or not messages:
            raise BadChat("continue_final_message continues an answer of text to other messages")
        begun = Begun(last["content"], last.get("reasoning_content", ""))
    elif raw.get("continue_final_message"):
        raise BadChat("continue_final_message needs an assistant's message at the end")
    is_streamed = bool(raw.get("stream"))
    return ChatRequest(
        messages,
        begun,
        tools if choice == "auto" else [],
        raw.get("chat_template_kwargs") or {},
        _sampling(raw),
        {ours: raw[name] for name, ours in _PASSED.items() if raw.get(name) is not None},
        raw.get("model") or "",
        is_streamed,
        is_streamed and bool((raw.get("stream_options") or {}).get("include_usage")),
        bool(raw.get("logprobs")),
        raw.get("lora_path", ""),
        _stops(raw.get("stop"), str),
        _stops(raw.get("stop_token_ids"), int),
        raw.get("reasoning_effort") or "",
        bool(raw.get("stays_with_version")),
        {name: raw[name] for name in FIELDS if name in raw},
    )


def _stops(stop: Any, kind: type[T]) -> tuple[T, ...]:
    """Stop strings or stop ids of a request.  Values of another form are left to the engine, which
    refuses them."""
    given = stop if isinstance(stop, list) else [stop]
    return tuple(stop for stop in given if type(stop) is kind and stop != "")


def _sampling(raw: Mapping[str, Any]) -> dict[str, Any]:
    # Without a limit SGLang fills the context, as OpenAI does.
    sampling: dict[str, Any] = {"max_new_tokens": None}
    for name, ours in _SAMPLING.items():
        if raw.get(name) is not None:
            sampling[ours] = raw[name]
    form = raw.get("response_format") or {"type": "text"}
    match form.get("type"):
        case "text":
            pass
        case "json_object":
            sampling["json_schema"] = '{"type": "object"}'
        case "json_schema" if is_object(form.get("json_schema")):
            sampling["json_schema"] = json.dumps(form["json_schema"].get("schema"))
        case _:
            raise BadChat("response_format must be text, json_object or json_schema")
    return sampling
