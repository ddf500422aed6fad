"""The tokens of one OpenAI request over several engines: ``/v1/completions``, ``/v1/chat/...``.

Always true:
- There are never more tokens than the request's budget, the finish reason comes from an engine, and
  every token has its log-prob; otherwise the request starts over instead of continuing.
- A completion continues from its token ids, which the engine has to report.  A chat continues from
  its text (``continue_final_message``), because SGLang streams no ids of a chat.  That is exact
  where the tokenizer splits the text into the same tokens again: tokens without text, such as an
  end that ``ignore_eos`` passes over, are lost.  Text with an invalid byte is not continued.
- The ids of a chat (``return_token_ids``, vLLM) are in the reply only if the next engine's prompt
  was those of the first, followed by them; otherwise the request fails.
- Text that was sent to the client is never taken back.

A request that cannot continue on another engine (tools, grammars, several completions) has no
transcript, and is forwarded as it is.
Pure: events in, bodies and payloads out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.protocol import VersionSpan
from rollout.router.http.fast_json import dumps
from rollout.router.transcripts.request_body import (
    has_forms,
    is_count,
    is_flag,
    is_object,
    is_positive,
    is_stop,
    or_none,
    read_object,
    token_ids_of,
)
from rollout.router.transcripts.transcript import (
    Payload,
    Transcript,
    finish_of,
    lower_minimum,
    span_payloads,
    without_stop,
)
from rollout.rules.continuation import Mark, Part, check_budget, spans_of

_DEFAULT_TOKENS = 16  # OpenAI's default for /v1/completions
_NEEDS_WHOLE_TEXT = (
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
    "session_params",
    "input_ids",
)
_FORMS = {
    "stream": is_flag,
    "stream_options": or_none(is_object),
    "stop": or_none(is_stop),
    "min_tokens": is_count,
    "no_stop_trim": is_flag,
    "continue_final_message": is_flag,
    "return_token_ids": is_flag,
}
_CHAT_FORMS = {
    **_FORMS,
    "max_tokens": or_none(is_positive),
    "max_completion_tokens": or_none(is_positive),
    "logprobs": is_flag,
}
_COMPLETION_FORMS = {
    **_FORMS,
    "max_tokens": is_positive,
    # SGLang ignores it here, and the embedded engine does not.
    "max_completion_tokens": lambda value: value is None,
    "logprobs": or_none(is_count),
}


class OpenAITranscript(Transcript):
    """A completion or a chat."""

    def __init__(self, raw: Payload, *, is_chat: bool) -> None:
        super().__init__(raw, _budget_of(raw, is_chat=is_chat), raw.get("stop"))
        self._is_chat = is_chat
        # SGLang streams the beginning of a stop string before it trims it, so we trim.
        self._trims = bool(self._stops) and not raw.get("no_stop_trim")
        logprobs = raw.get("logprobs")
        self._wants_logprobs = bool(logprobs) if is_chat else logprobs is not None
        self._wants_ids = bool(raw.get("return_token_ids"))
        self._version: int | None = None
        self._safe = Mark()
        self._is_safe = True
        self._is_closed = False
        self._sent = Mark()
        self._has_sent_role = False
        self._head: Payload = {}
        self._prompt_ids: list[int] | None = token_ids_of(raw.get("prompt"))
        self._usage: Payload = {}
        self._first_usage: Payload = {}
        self._reasoning = ""
        self._num_reasoning_sent = 0
        self.can_continue = is_chat or self._prompt_ids is not None

    # -- to the engine ----------------------------------------------------------------------

    def body(self, version: int | None, *, is_vllm: bool = False) -> bytes:
        """The body for the next engine, which holds weight ``version``, in its own words."""
        self._version = version
        raw = {**self._raw, "stream": True}
        options = raw.get("stream_options") or {}
        raw["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
        if self._trims:
            raw["include_stop_str_in_output" if is_vllm else "no_stop_trim"] = True
        if not self._is_chat:
            raw["return_token_ids"] = True
        done = self._base.num
        if done:
            self._continue(raw, done)
        if is_vllm and raw.get("continue_final_message"):
            raw["add_generation_prompt"] = False  # vLLM refuses both
        return dumps(raw)

    def _continue(self, raw: Payload, done: int) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            if raw.get(name) is not None:
                raw[name] -= done
        if not self._is_chat:
            assert self._prompt_ids is not None
            raw["prompt"] = [*self._prompt_ids, *self._base.ids]
            raw.setdefault("max_tokens", _DEFAULT_TOKENS - done)
        else:
            *before, last = raw["messages"]
            if last.get("role") == "assistant":
                last = {**last, "content": last["content"] + self._base.text}
                raw["messages"] = [*before, last]
            else:
                begun = {"role": "assistant", "content": self._base.text}
                raw["messages"] = [*raw["messages"], begun]
            raw["continue_final_message"] = True
        lower_minimum(raw, "min_tokens", done)

    # -- from the engine --------------------------------------------------------------------

    def absorb(self, event: Mapping[str, Any]) -> None:
        """Take one chunk."""
        self._head = self._head or {name: event.get(name) for name in ("id", "created", "model")}
        if event.get("usage"):
            self._usage = event["usage"]
            self._first_usage = self._first_usage or self._usage
            if self._is_chat and self.is_finished:  # it counts tokens without text too
                self._count_tokens(self._num_reported(""))
        if event.get("prompt_token_ids") is not None:  # of a chat
            self._take_prompt(list(event["prompt_token_ids"]))
        for choice in event.get("choices") or []:
            self._absorb_choice(choice)

    def _take_prompt(self, ids: list[int]) -> None:
        """The token ids of a chat's prompt, with the answer so far."""
        known = self._prompt_ids
        if known is not None and ids != [*known, *self._base.ids]:
            raise ValueError("its prompt has other token ids than prompt and answer so far")
        self._prompt_ids = ids if known is None else known

    def _absorb_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        text = (delta.get("content") if self._is_chat else choice.get("text")) or ""
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):  # vLLM's word
            if self._base.num:
                raise ValueError("reasoning comes after text that was continued")
            self._reasoning += thought
            self.can_continue = False
        ids = list(choice.get("token_ids") or [])
        if choice.get("prompt_token_ids") is not None and self._prompt_ids is None:
            self._prompt_ids = list(choice["prompt_token_ids"])
            self.can_continue = True
        now = self._now
        now.num = len(now.ids) + len(ids) if not self._is_chat else self._num_reported(text)
        now.text += text
        now.ids += ids
        has_new = bool(text or ids)
        for name, values in (choice.get("logprobs") or {}).items():
            if isinstance(values, list):
                has_new |= bool(values)
                if name == "text_offset":
                    values = self._offsets(values)
                now.logprobs.setdefault(name, []).extend(values)
        self._count_tokens(now.num)
        if choice.get("finish_reason"):
            matched = choice.get("matched_stop", choice.get("stop_reason"))  # vLLM's word
            self._finish = {"type": finish_of(choice["finish_reason"]), "matched": matched}
            if self._base.num and self._lacks_ids(now.mark()):
                raise ValueError(f"{len(now.ids)} token ids for {now.num} tokens")
            if self._trims and isinstance(matched, str):
                self._trim(matched)
        elif has_new:
            self._is_safe = self._is_safe_end(text)
            if self._is_safe:
                self._safe = now.mark()

    def _offsets(self, offsets: list[int]) -> list[int]:
        """Where tokens begin in the whole text.  SGLang does not know it, and sends -1."""
        before = len(self._base.text)
        return [one if one < 0 else one + before for one in offsets]

    def _trim(self, stop: str) -> None:
        """Cut the text before its stop string."""
        text = self._base.text + self._now.text
        text = without_stop(text, stop, self._raw.get("min_tokens"))
        self._now.text = text[len(self._base.text) :]

    def _count_tokens(self, num: int) -> None:
        self._now.num = num
        self._now.spans = self._spans(num)
        check_budget(self._base.num + num, self._budget)

    def _num_reported(self, text: str) -> int:
        """Tokens of this engine, as the usage beside ``text`` counts them."""
        num: int | None = self._usage.get("completion_tokens")
        if num is None:
            if text:
                self.can_continue = False  # the engine does not count tokens while it streams
            return self._now.num
        return num

    def _spans(self, num: int) -> tuple[VersionSpan, ...]:
        return spans_of((), str(self._version), num)

    def _is_safe_end(self, new: str) -> bool:
        """Whether another engine may continue after the text ``new``, the last so far."""
        if self._trims and not self._is_closed:
            end = self._end_of_text(self._longest_stop + len(new))
            self._is_closed = any(stop in end for stop in self._stops)
        # An invalid byte reads as U+FFFD, from which no engine can get the byte's token back.
        self._is_closed |= self._is_chat and "\ufffd" in new
        if self._is_closed or self._ends_within_character():
            return False
        return self._is_complete(has_grown=bool(new or self._reasoning))

    def _ends_within_character(self) -> bool:
        """Whether the last log-prob of a chat, which has no ids, is of a token without text."""
        entries = self._now.logprobs.get("content", [])
        is_known = self._is_chat and len(entries) > 0
        return is_known and (entries[-1].get("token") or "\ufffd").endswith("\ufffd")

    @property
    def is_safe(self) -> bool:
        """Whether all text so far is final, so that it can be sent to the client."""
        return self.is_finished or self._is_safe

    # -- between two engines ----------------------------------------------------------------

    def lose_engine(self) -> None:
        """Go back to the last safe token, or to the prompt if tokens cannot be kept."""
        had = self._base.num + self._now.num
        now, safe = self._now, self._safe
        if self._lacks_ids(safe) or (self._wants_logprobs and self._lacks_logprobs(safe)):
            self.can_continue = False
        if self.can_continue:
            logprobs = {name: now.logprobs[name][:end] for name, end in safe.logprobs.items()}
            ids = now.ids[: safe.ids]
            self._base = self._base.plus(
                Part(now.text[: safe.text], safe.num, ids, logprobs, self._spans(safe.num))
            )
            self.num_kept += safe.num
        else:
            self._base, self._reasoning = Part(), ""
            self._first_usage = {}
        self.num_recomputed += had - self._base.num
        self.num_failovers += 1
        self._now, self._safe = Part(), Mark()
        self._is_safe, self._is_closed = True, False
        self._usage, self._finish = {}, None

    def _lacks_ids(self, safe: Mark) -> bool:
        """Whether a token of a chat has no id that its client wants."""
        return self._is_chat and self._wants_ids and safe.ids != safe.num

    def _lacks_logprobs(self, safe: Mark) -> bool:
        """Whether a token has no log-prob.  A list that stays empty was not requested: SGLang
        sends ``top_logprobs`` like that."""
        required = "content" if self._is_chat else "token_logprobs"
        lengths = safe.logprobs.items()
        return any(num != safe.num for name, num in lengths if num or name == required)

    # -- to the client ----------------------------------------------------------------------

    def new_payloads(self) -> list[Payload]:
        """New chunks for a streaming client."""
        has_sent_tokens = self._sent.num > 0
        new = self._new()
        chunks: list[Payload] = []
        choice: Payload
        if self._is_chat and not self._has_sent_role:
            self._has_sent_role = True
            begun = self._chunk({"delta": {"role": "assistant", "content": ""}})
            chunks.append(begun | self._prompt_of_chat())
        if thought := self._reasoning[self._num_reasoning_sent :]:
            self._num_reasoning_sent = len(self._reasoning)
            chunks.append(self._chunk({"delta": {"reasoning_content": thought}}))
        if new.text or new.ids or any(new.logprobs.values()):
            choice = self._choice_of(new, "delta")
            if "token_ids" in choice and not self._is_chat and not has_sent_tokens:
                choice["prompt_token_ids"] = self._prompt_ids
            chunks.append(self._chunk(choice))
        if self._finish is not None:
            choice = {"delta": {}} if self._is_chat else {"text": ""}
            choice["finish_reason"] = self._finish["type"]
            choice["matched_stop"] = self._finish["matched"]
            chunks.append(self._chunk(choice) | {"metadata": self._metadata()})
            if (self._raw.get("stream_options") or {}).get("include_usage"):
                chunks.append({**self._chunk(None), "usage": self._whole_usage()})
        return chunks

    def _new(self) -> Part:
        """What was received since the last call; it never repeats text that was sent."""
        base, now, sent = self._base, self._now, self._sent
        end, before = now.mark(), base.mark()
        names = before.logprobs.keys() | end.logprobs.keys()
        self._sent = Mark(
            before.text + end.text,
            before.num + end.num,
            before.ids + end.ids,
            {name: before.logprobs.get(name, 0) + end.logprobs.get(name, 0) for name in names},
        )
        return Part(
            _after(base.text, now.text, sent.text),
            self._sent.num - sent.num,
            _after(base.ids, now.ids, sent.ids),
            {
                name: _after(
                    base.logprobs.get(name, []),
                    now.logprobs.get(name, []),
                    sent.logprobs.get(name, 0),
                )
                for name in names
            },
        )

    def _chunk(self, choice: Payload | None) -> Payload:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        rest = {"index": 0, "logprobs": None, "finish_reason": None}
        choices = [] if choice is None else [{**rest, **choice}]
        return {**self._head, "object": kind, "choices": choices}

    def _choice_of(self, part: Part, message: str) -> Payload:
        choice: Payload = {}
        if self._is_chat:
            choice[message] = {"content": part.text}
        else:
            choice["text"] = part.text
        if self._wants_ids:
            choice["token_ids"] = part.ids
        choice["logprobs"] = part.logprobs if self._wants_logprobs else None
        return choice

    def payload(self) -> Payload:
        """The response so far, in the form of a single engine's complete reply."""
        whole = self._base.plus(self._now)
        choice = {"index": 0, **self._choice_of(whole, "message")}
        if self._is_chat:
            choice["message"] |= {"role": "assistant", "reasoning_content": self._reasoning or None}
        elif self._raw.get("return_token_ids"):
            choice["prompt_token_ids"] = self._prompt_ids
        finish = self._finish or {"type": None, "matched": None}
        choice |= {"finish_reason": finish["type"], "matched_stop": finish["matched"]}
        return {
            **self._head,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "choices": [choice],
            "usage": self._whole_usage(),
            **self._prompt_of_chat(),
            "metadata": self._metadata(),
        }

    def _prompt_of_chat(self) -> Payload:
        has_prompt = self._is_chat and self._wants_ids
        return {"prompt_token_ids": self._prompt_ids} if has_prompt else {}

    def _metadata(self) -> Payload:
        return {
            "weight_version": str(self._version),
            "weight_versions": span_payloads(self._base.plus(self._now).spans),
            "num_failovers": self.num_failovers,
            "num_recomputed_tokens": self.num_recomputed,
        }

    def _whole_usage(self) -> Payload:
        done = self._base.num + self._now.num
        prompt = self._first_usage.get("prompt_tokens") or 0
        counts = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        return {**self._usage, **counts}


def read_openai(
    body: bytes, *, is_chat: bool, is_for_vllm: bool = False
) -> OpenAITranscript | None:
    """The transcript of an OpenAI body; None if it cannot continue on another engine.

    Args:
        is_for_vllm: all engines are vLLM's, which streams the token ids of a chat.
    """
    raw = read_object(body)
    if raw is None or not _can_be_continued(raw, is_chat=is_chat):
        return None
    if is_chat and raw.get("return_token_ids") and not is_for_vllm:
        return None
    return OpenAITranscript(raw, is_chat=is_chat)


def _after(before: Any, now: Any, start: int) -> Any:
    """Two texts or lists in a row, from index ``start`` on."""
    if start >= len(before):
        return now[start - len(before) :]
    return before[start:] + now


def _budget_of(raw: Payload, *, is_chat: bool) -> int | None:
    """How many tokens it may get; None for no limit."""
    if not is_chat:
        budget: int = raw.get("max_tokens", _DEFAULT_TOKENS)
        return budget
    return raw.get("max_completion_tokens") or raw.get("max_tokens")


def _can_be_continued(raw: Payload, *, is_chat: bool) -> bool:
    """Whether another engine can continue a part of its completion."""
    if not has_forms(raw, _CHAT_FORMS if is_chat else _COMPLETION_FORMS):
        return False
    if raw.get("n") not in (None, 1) or raw.get("best_of") not in (None, 1):
        return False
    if any(raw.get(name) for name in _NEEDS_WHOLE_TEXT):
        return False
    if raw.get("stop") and (raw.get("stop_token_ids") or raw.get("skip_special_tokens") is False):
        return False  # we could not distinguish what to trim from what to keep
    form = raw.get("response_format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        return False
    if is_chat:
        return _is_plain_chat(raw)
    prompt = raw.get("prompt")
    return isinstance(prompt, str) or token_ids_of(prompt) is not None


def _is_plain_chat(raw: Payload) -> bool:
    """Whether an assistant's message with the text so far continues this chat."""
    limits = {raw.get("max_tokens"), raw.get("max_completion_tokens")} - {None}
    messages = raw.get("messages")
    if len(limits) > 1 or not isinstance(messages, list):
        return False
    if not messages or any(
        not isinstance(message, dict) or message.get("tools") for message in messages
    ):
        return False
    last = messages[-1]
    if last.get("role") != "assistant":
        return True
    # SGLang reads it as the user's, unless it has to continue it.
    return bool(raw.get("continue_final_message")) and isinstance(last.get("content"), str)
