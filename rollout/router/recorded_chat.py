"""One chat whose turn is recorded: asked for whole, because SGLang's stream is not enough.

A streamed chat of SGLang tells no token ids, and loses the log-probs of tokens that made no text.
So the engine is asked for the whole answer, and a client that wants a stream is told it at its
end.  Always true: what is recorded has as many log-probs as ids.  A lost engine's work is not
kept: the request starts from nothing, and its client has been told nothing yet.
"""

from __future__ import annotations

import json
from typing import Any

from rollout.router.tokens import Payload, version_spans

_ASKED_BY_US = ("prompt_token_ids", "response_token_ids", "token_ids", "meta_info")


class RecordedChat:
    """A chat, and what its engine answered.  Attributes as of ``tokens.Transcript``."""

    answers_whole = True
    can_continue = False
    awaits_prompt = False

    def __init__(self, raw: Payload) -> None:
        self._raw = raw
        self._answer: Payload = {}
        self._choice: Payload = {}
        self._version: int | None = None
        self.is_streamed = bool(raw.get("stream"))
        self.num_kept = 0
        self.num_recomputed = 0
        self.num_seams = 0

    def record(self) -> str:
        return ""

    def body(self, version: int | None) -> bytes:
        """The request for an engine, which holds weight ``version``."""
        self._version = version
        raw = {**self._raw, "stream": False, "logprobs": True}
        raw.pop("stream_options", None)
        raw |= {"return_token_ids": True, "return_meta_info": True}
        return json.dumps(raw).encode()

    def absorb(self, event: Payload) -> None:
        """Take the whole answer."""
        (choice,) = event["choices"]
        self._answer, self._choice = event, choice

    @property
    def is_safe(self) -> bool:
        return self.is_over

    @property
    def is_over(self) -> bool:
        return bool(self._choice)

    @property
    def is_aborted(self) -> bool:
        return self._choice.get("finish_reason") == "abort"

    def lose_engine(self) -> None:
        self.num_recomputed += len(self._choice.get("response_token_ids") or [])
        self.num_seams += 1
        self._answer, self._choice = {}, {}

    def payload(self) -> Payload:
        """The engine's answer without what only the recording asked for."""
        choice = {name: one for name, one in self._choice.items() if name not in _ASKED_BY_US}
        if not self._raw.get("logprobs"):
            choice["logprobs"] = None
        version = {"weight_version": str(self._version)}
        metadata = {**(self._answer.get("metadata") or {}), **version}
        return {**self._answer, "choices": [choice], "metadata": metadata}

    def news(self) -> list[Payload]:
        """The answer as the chunks of a stream."""
        whole = self.payload()
        (choice,) = whole["choices"]
        head = {name: whole.get(name) for name in ("id", "created", "model")}
        head["object"] = "chat.completion.chunk"
        delta = {name: one for name, one in choice["message"].items() if one is not None}
        for place, call in enumerate(delta.get("tool_calls") or []):
            call.setdefault("index", place)
        begun = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
        ended = {
            "index": 0,
            "delta": {},
            "finish_reason": choice["finish_reason"],
            "matched_stop": choice.get("matched_stop"),
        }
        chunks: list[Payload] = [{**head, "choices": [one]} for one in (begun, ended)]
        if (self._raw.get("stream_options") or {}).get("include_usage"):
            chunks.append({**head, "choices": [], "usage": whole.get("usage")})
        return chunks

    def turn(self) -> Payload:
        """The finished request as a recorded turn.

        Raises:
            ValueError: the engine did not tell all that is recorded.
        """
        ids: list[int] = self._choice.get("response_token_ids") or []
        meta = {"weight_version": str(self._version), **(self._choice.get("meta_info") or {})}
        told: list[Any] = meta.get("output_token_logprobs") or []
        prompt = self._choice.get("prompt_token_ids")
        if not prompt or len(told) != len(ids):
            raise ValueError(
                f"{len(told)} log-probs for {len(ids)} tokens of a prompt of {len(prompt or [])}; "
                "the turn was not recorded"
            )
        return {
            "input_ids": prompt,
            "output_ids": ids,
            "output_logprobs": [one[0] for one in told],
            "weight_versions": version_spans(meta, len(ids)),
            "finish_reason": {
                "type": self._choice["finish_reason"],
                "matched": self._choice.get("matched_stop"),
            },
        }


def read_recorded_chat(body: bytes) -> RecordedChat | None:
    """The chat of this body; None if it asks for more than one answer."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or raw.get("n") not in (None, 1):
        return None
    if not isinstance(raw.get("stream_options") or {}, dict):
        return None
    return RecordedChat(raw)
