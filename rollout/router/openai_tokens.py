"""The tokens of one OpenAI request over several engines: ``/v1/completions``, ``/v1/chat/...``.

Always true:
- Never more tokens than the request's budget, a finish reason only from an engine that gave it,
  and log-probs exactly as many as tokens, or the request starts anew instead of going on.
- A completion goes on from its token ids, which the engine is asked for.  A chat goes on from its
  text (``continue_final_message``), for SGLang tells no ids while it streams a chat; so its seam is
  exact in text and budget, and the engine that continues may cut the text into other tokens.
- Nothing that a client was shown is taken back.

A request that cannot go on from its middle is not read here, and passes as it is.  Pure: events in,
bodies and payloads out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout.router.openai_bodies import (
    COMPLETION_TOKENS,
    asks_for_logprobs,
    budget_of,
    can_be_continued,
    ids_of,
)
from rollout.router.openai_parts import Mark, Part, after
from rollout.router.tokens import Payload, is_whole


class OpenAITranscript:
    """What one request has got so far.

    Attributes:
        answers_whole: its engine is asked for one answer instead of events.
        is_streamed: its client wants events.
        can_continue: a lost engine's tokens can be kept; otherwise it starts from nothing.
        num_kept: tokens carried over seams.
        num_recomputed: tokens that had come and are generated again.
    """

    answers_whole = False
    awaits_prompt = False

    def __init__(self, raw: Payload, *, is_chat: bool) -> None:
        self._raw = raw
        self._is_chat = is_chat
        self._budget = budget_of(raw, is_chat=is_chat)
        stop = raw.get("stop")
        self._stops = [stop] if isinstance(stop, str) else list(stop or [])
        # Streamed, SGLang shows the beginning of a stop string before it trims it, so we trim.
        self._trims = bool(self._stops) and not raw.get("no_stop_trim")
        self._wants_logprobs = asks_for_logprobs(raw, is_chat=is_chat)
        self._is_recorded = False
        self._version: int | None = None
        self._base = Part()
        self._now = Part()
        self._safe = Mark()
        self._is_safe = True
        self._told = Mark()
        self._has_told_role = False
        self._head: Payload = {}
        self._prompt_ids: list[int] | None = ids_of(raw.get("prompt"))
        self._finish: Payload | None = None
        self._usage: Payload = {}
        self._first_usage: Payload = {}
        self._reasoning = ""
        self._num_reasoning_told = 0
        self.is_streamed = bool(raw.get("stream"))
        self.can_continue = is_chat or self._prompt_ids is not None
        self.num_kept = 0
        self.num_recomputed = 0
        self.num_seams = 0

    def record(self) -> str:
        """Have the engine tell what a recorded turn needs; or why it cannot be recorded."""
        self._is_recorded = True
        return ""

    # -- to the engine ----------------------------------------------------------------------

    def body(self, version: int | None) -> bytes:
        """The request for the engine that goes on, which holds weight ``version``."""
        self._version = version
        raw = {**self._raw, "stream": True}
        options = raw.get("stream_options") or {}
        raw["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
        if self._trims:
            raw["no_stop_trim"] = True
        if self._is_recorded and not self._wants_logprobs:
            raw["logprobs"] = 0
        if not self._is_chat:
            raw["return_token_ids"] = True
        done = self._base.num
        if done:
            self._go_on(raw, done)
        return json.dumps(raw).encode()

    def _go_on(self, raw: Payload, done: int) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(raw.get(name), int):
                raw[name] -= done
        if not self._is_chat:
            assert self._prompt_ids is not None
            raw["prompt"] = [*self._prompt_ids, *self._base.ids]
            raw["max_tokens"] = raw.get("max_tokens") or COMPLETION_TOKENS - done
        else:
            *before, last = raw["messages"]
            if raw.get("continue_final_message") and last.get("role") == "assistant":
                last = {**last, "content": f"{last.get('content') or ''}{self._base.text}"}
                raw["messages"] = [*before, last]
            else:
                begun = {"role": "assistant", "content": self._base.text}
                raw["messages"] = [*raw["messages"], begun]
            raw["continue_final_message"] = True
        if raw.get("min_tokens"):
            raw["min_tokens"] = max(0, raw["min_tokens"] - done)

    # -- from the engine --------------------------------------------------------------------

    def absorb(self, event: Mapping[str, Any]) -> None:
        """Take one chunk."""
        self._head = self._head or {name: event.get(name) for name in ("id", "created", "model")}
        if event.get("usage"):
            self._usage = event["usage"]
            self._first_usage = self._first_usage or self._usage
        for choice in event.get("choices") or []:
            self._absorb_choice(choice)

    def _absorb_choice(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        text = (delta.get("content") if self._is_chat else choice.get("text")) or ""
        if delta.get("reasoning_content"):
            self._reasoning += delta["reasoning_content"]
            self.can_continue = False
        ids = list(choice.get("token_ids") or [])
        if choice.get("prompt_token_ids") is not None and self._prompt_ids is None:
            self._prompt_ids = list(choice["prompt_token_ids"])
            self.can_continue = True
        now = self._now
        now.num = len(now.ids) + len(ids) if not self._is_chat else self._num_told(text)
        now.text += text
        now.ids += ids
        for name, values in (choice.get("logprobs") or {}).items():
            if isinstance(values, list):
                now.logprobs.setdefault(name, []).extend(values)
        now.spans = self._spans(now.num)
        total = self._base.num + now.num
        if self._budget is not None and total > self._budget:
            raise ValueError(f"{total} tokens, {self._budget} asked for")
        if choice.get("finish_reason"):
            matched = choice.get("matched_stop")
            self._finish = {"type": choice["finish_reason"], "matched": matched}
            if self._trims and isinstance(matched, str):
                self._trim(matched)
        elif text or ids:
            self._is_safe = self._may_end_here(has_grown=bool(text))
            if self._is_safe:
                self._safe = now.mark()

    def _trim(self, stop: str) -> None:
        """End the text before what stopped it; one before the minimum did not count."""
        text = self._base.text + self._now.text
        at = text.rfind(stop) if self._raw.get("min_tokens") else text.find(stop)
        if at >= 0:
            self._now.text = text[len(self._base.text) : at]

    def _num_told(self, text: str) -> int:
        """Tokens of this engine, as the usage beside ``text`` counts them."""
        num: int | None = self._usage.get("completion_tokens")
        if num is None:
            if text:
                self.can_continue = False  # an engine that does not count as it goes
            return self._now.num
        return num

    def _spans(self, num: int) -> list[Payload]:
        return [{"version": str(self._version), "start": 0, "end": num}] if num else []

    def _may_end_here(self, *, has_grown: bool) -> bool:
        if self._budget is not None and self._base.num + self._now.num >= self._budget:
            return False  # the finish reason of the last token has to come from an engine
        text = self._base.text + self._now.text
        if self._trims and any(stop in text for stop in self._stops):
            return False
        return is_whole(text, self._stops, has_grown=has_grown or self._is_chat)

    @property
    def is_safe(self) -> bool:
        """All that has come may be shown: it will not be taken back."""
        return self.is_over or self._is_safe

    @property
    def is_over(self) -> bool:
        return self._finish is not None

    @property
    def is_aborted(self) -> bool:
        return self._finish is not None and self._finish["type"] == "abort"

    # -- the seam ---------------------------------------------------------------------------

    def lose_engine(self) -> None:
        """Go back to the last safe token, or to none if this request starts from nothing."""
        had = self._base.num + self._now.num
        now, safe = self._now, self._safe
        if self._wants_logprobs and self._lacks_logprobs(safe):
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
        self.num_seams += 1
        self._now, self._safe, self._is_safe = Part(), Mark(), True
        self._usage, self._finish = {}, None

    def _lacks_logprobs(self, safe: Mark) -> bool:
        """A token came without them.  A list that stays empty is none that was asked for: SGLang
        sends ``top_logprobs`` so."""
        owed = "content" if self._is_chat else "token_logprobs"
        lengths = safe.logprobs.items()
        return any(num != safe.num for name, num in lengths if num or name == owed)

    # -- to the client ----------------------------------------------------------------------

    def news(self) -> list[Payload]:
        """The chunks that tell a streaming client what is new."""
        is_told = self._told.num > 0
        new = self._new()
        chunks: list[Payload] = []
        choice: Payload
        if self._is_chat and not self._has_told_role:
            self._has_told_role = True
            chunks.append(self._chunk({"delta": {"role": "assistant", "content": ""}}))
        if thought := self._reasoning[self._num_reasoning_told :]:
            self._num_reasoning_told = len(self._reasoning)
            chunks.append(self._chunk({"delta": {"reasoning_content": thought}}))
        if new.text or new.ids:
            choice = self._choice_of(new, "delta")
            if "token_ids" in choice and not is_told:
                choice["prompt_token_ids"] = self._prompt_ids
            chunks.append(self._chunk(choice))
        if self._finish is not None:
            choice = {"delta": {}} if self._is_chat else {"text": ""}
            choice["finish_reason"] = self._finish["type"]
            choice["matched_stop"] = self._finish["matched"]
            chunks.append(self._chunk(choice))
            if (self._raw.get("stream_options") or {}).get("include_usage"):
                chunks.append({**self._chunk(None), "usage": self._whole_usage()})
        return chunks

    def _new(self) -> Part:
        """What came since this was last asked, which is never before a seam that was told."""
        base, now, told = self._base, self._now, self._told
        end, before = now.mark(), base.mark()
        names = before.logprobs.keys() | end.logprobs.keys()
        self._told = Mark(
            before.text + end.text,
            before.num + end.num,
            before.ids + end.ids,
            {name: before.logprobs.get(name, 0) + end.logprobs.get(name, 0) for name in names},
        )
        return Part(
            after(base.text, now.text, told.text),
            self._told.num - told.num,
            after(base.ids, now.ids, told.ids),
            {
                name: after(
                    base.logprobs.get(name, []),
                    now.logprobs.get(name, []),
                    told.logprobs.get(name, 0),
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
            if self._raw.get("return_token_ids"):
                choice["token_ids"] = part.ids
        choice["logprobs"] = part.logprobs if self._wants_logprobs else None
        return choice

    def payload(self) -> Payload:
        """The answer so far, as one engine would have told it whole."""
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
            "metadata": {
                "weight_version": str(self._version),
                "weight_versions": whole.spans,
                "num_failovers": self.num_seams,
                "num_recomputed_tokens": self.num_recomputed,
            },
        }

    def _whole_usage(self) -> Payload:
        now = self._now.num
        if self._is_chat:
            # The last chunk counts tokens that no text came for, such as the end of the sequence.
            now = max(now, self._usage.get("completion_tokens") or 0)
        done = self._base.num + now
        prompt = self._first_usage.get("prompt_tokens") or 0
        counts = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        return {**self._usage, **counts}

    def turn(self) -> Payload:
        """The finished completion as a recorded turn.

        Raises:
            ValueError: the engine did not tell all that is recorded.
        """
        whole = self._base.plus(self._now)
        logprobs = whole.logprobs.get("token_logprobs", [])
        if self._prompt_ids is None or len(logprobs) != len(whole.ids):
            raise ValueError(
                f"{len(logprobs)} log-probs for {len(whole.ids)} tokens; the turn was not recorded"
            )
        return {
            "input_ids": self._prompt_ids,
            "output_ids": whole.ids,
            "output_logprobs": logprobs,
            "weight_versions": whole.spans,
            "finish_reason": self._finish,
        }


def read_openai(body: bytes, *, is_chat: bool) -> OpenAITranscript | None:
    """The transcript of an OpenAI body; None if it cannot go on from its middle."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or not can_be_continued(raw, is_chat=is_chat):
        return None
    return OpenAITranscript(raw, is_chat=is_chat)
