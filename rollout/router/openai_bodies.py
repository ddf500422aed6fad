"""What the body of an OpenAI request asks for, and whether it can go on from its middle.

What is parsed out of a whole text (tools, grammars) cannot; nor can several answers at once.
"""

from __future__ import annotations

from typing import Any

from rollout.router.tokens import Payload

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_NEEDS_WHOLE = (
    "tools",
    "functions",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop_regex",
    "custom_params",
    "custom_logit_processor",
    "echo",
    "suffix",
    "return_hidden_states",
    "return_routed_experts",
    "return_cached_tokens_details",
    "return_spec_tokens_details",
    "return_meta_info",
    "return_prompt_token_ids",
    "return_input_ids_in_sglext",
    "return_output_ids_in_sglext",
    "return_sampling_mask",
)


def budget_of(raw: Payload, *, is_chat: bool) -> int | None:
    """How many tokens it may get; None for as many as the engine likes."""
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    given = next((raw[name] for name in names if isinstance(raw.get(name), int)), None)
    return given if is_chat or given is not None else COMPLETION_TOKENS


def asks_for_logprobs(raw: Payload, *, is_chat: bool) -> bool:
    return bool(raw.get("logprobs")) if is_chat else raw.get("logprobs") is not None


def ids_of(prompt: Any) -> list[int] | None:
    """The prompt, if it is one prompt of token ids."""
    if isinstance(prompt, list) and prompt and all(type(one) is int for one in prompt):
        return prompt
    return None


def _is_continued_in_parts(raw: Payload, last: Payload) -> bool:
    return bool(raw.get("continue_final_message")) and not isinstance(last.get("content"), str)


def can_be_continued(raw: Payload, *, is_chat: bool) -> bool:
    """Another engine can go on with a part of its answer."""
    if raw.get("n") not in (None, 1):
        return False
    if raw.get("best_of") not in (None, 1) or any(raw.get(name) for name in _NEEDS_WHOLE):
        return False
    if not isinstance(raw.get("stream_options") or {}, dict):
        return False
    if raw.get("stop") and (raw.get("stop_token_ids") or raw.get("skip_special_tokens") is False):
        return False  # what we trim ourselves could then not be told from what is to be kept
    form = raw.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        return False
    if is_chat:
        messages = raw.get("messages")
        return (
            isinstance(messages, list)
            and bool(messages)
            and all(isinstance(one, dict) for one in messages)
            and not raw.get("return_token_ids")
            and not _is_continued_in_parts(raw, messages[-1])
        )
    prompt = raw.get("prompt")
    return isinstance(prompt, str) or ids_of(prompt) is not None
