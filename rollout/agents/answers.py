"""Answers of a session in OpenAI's form, whole and streamed (pure).

Always true: the pieces of a stream, joined, are the message that a client gets without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.agents.model.answer_reader import Answer, Reading, WholeReading
from rollout.agents.turns.tree import Turn
from rollout.router.http.fast_json import dumps

Payload = dict[str, Any]


@dataclass(slots=True)
class ChatAnswer:
    """The answer to one request.

    Args:
        head: what all payloads have: ``id``, ``created`` and ``model``.
        reading: of its ids; what is certain of it is sent.
        token_texts: texts of tokens, where the client wants their log-probs.

    Attributes:
        num_tokens_sent: those whose log-probs were sent.
    """

    head: Mapping[str, Any]
    reading: Reading | WholeReading
    token_texts: Callable[[Sequence[int]], list[str]] | None = None
    num_tokens_sent: int = 0
    _num_read: int = 0
    _num_content: int = 0
    _num_reasoning: int = 0
    _has_begun: bool = False

    def whole(self, answer: Answer, turn: Turn, num_prompt: int) -> Payload:
        """The complete reply."""
        choice = {
            "index": 0,
            "message": answer.message(),
            "logprobs": self._rest_of_logprobs(turn),
            **_finish(answer, turn),
        }
        return {
            **self.head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": _usage(answer, turn, num_prompt),
            "session": _place(turn),
        }

    def piece(
        self, ids: Sequence[int], logprobs_from: Callable[[int], Sequence[float]]
    ) -> list[Payload]:
        """The chunks for an answer whose ids are so far these.

        Args:
            logprobs_from: the log-probs of the ids from a number on.
        """
        content, reasoning = self.reading.feed(ids[self._num_read :])
        self._num_read = len(ids)
        if not content and not reasoning:
            return []
        begin = self.num_tokens_sent
        logprobs = self._logprobs(ids[begin:], logprobs_from(begin)) if self.token_texts else None
        return [self._chunk(self._delta(self._texts(content, reasoning)), logprobs)]

    def _texts(self, content: str, reasoning: str) -> Payload:
        self._num_content += len(content)
        self._num_reasoning += len(reasoning)
        delta = {"content": content, "reasoning_content": reasoning}
        return {name: text for name, text in delta.items() if text}

    def last(self, answer: Answer, turn: Turn, num_prompt: int, *, usage: bool) -> list[Payload]:
        """The chunks that end the stream."""
        rest, thought = answer.content[self._num_content :], answer.reasoning[self._num_reasoning :]
        delta = self._texts(rest, thought)
        if not delta and not self._has_begun:
            delta = {"content": ""}
        if answer.calls:
            delta["tool_calls"] = [
                {"index": index, **call} for index, call in enumerate(answer.calls)
            ]
        logprobs = self._rest_of_logprobs(turn)
        chunks = [self._chunk(self._delta(delta), logprobs)] if delta else []
        last = None if delta else logprobs
        chunks.append(self._chunk({}, last, session=_place(turn), **_finish(answer, turn)))
        if usage:
            of_turn = _usage(answer, turn, num_prompt)
            chunks.append({**self._of_chunks(), "choices": [], "usage": of_turn})
        return chunks

    def _delta(self, delta: Payload) -> Payload:
        role = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        return {**role, **delta}

    def _rest_of_logprobs(self, turn: Turn) -> Payload | None:
        """The log-probs that were not sent so far."""
        made, begin = turn.generated, self.num_tokens_sent
        return self._logprobs(made.ids[begin:], made.logprobs[begin:])

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> Payload | None:
        if self.token_texts is None:
            return None
        self.num_tokens_sent += len(ids)
        return {"content": list(map(_logprob, self.token_texts(ids), logprobs))}

    def _chunk(
        self,
        delta: Payload,
        logprobs: Payload | None,
        *,
        session: Payload | None = None,
        **more: Any,
    ) -> Payload:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None, **more}
        place = {} if session is None else {"session": session}
        return {**self._of_chunks(), "choices": [choice], **place}

    def _of_chunks(self) -> Payload:
        return {**self.head, "object": "chat.completion.chunk"}


def _logprob(token: str, logprob: float) -> Payload:
    is_part = "\N{REPLACEMENT CHARACTER}" in token
    own = None if is_part else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": own, "top_logprobs": []}


def _finish(answer: Answer, turn: Turn) -> Payload:
    finish = turn.generated.finish
    kind = "tool_calls" if answer.calls and finish.kind == "stop" else finish.kind
    return {"finish_reason": kind, "matched_stop": finish.matched}


def _place(turn: Turn) -> Payload:
    prompt = turn.prompt
    return {
        "turn": turn.number,
        "parent": prompt.parent,
        "drift": prompt.drift.value,
        "first_difference": prompt.first_difference,
    }


def _usage(answer: Answer, turn: Turn, num_prompt: int) -> Payload:
    num, num_cached = len(turn.generated.ids), turn.generated.num_cached
    usage: Payload = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num,
        "total_tokens": num_prompt + num,
    }
    if num_cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
    if answer.num_thinking:
        usage["completion_tokens_details"] = {"reasoning_tokens": answer.num_thinking}
    return usage


def as_events(payloads: Sequence[Payload]) -> bytes:
    """The payloads as server-sent events."""
    return b"".join(b"data: " + dumps(payload) + b"\n\n" for payload in payloads)
