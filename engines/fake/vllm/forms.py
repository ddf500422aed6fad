"""What each generation route of vLLM 0.32.0 makes of a request and of its tokens (pure).

On the OpenAI routes a text is one token per byte, but ``" 12"`` is token 12: the text of a reply
has the ids it was made from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from engines.fake.engine.request import FakeRequest
from engines.protocol import SamplingParams
from engines.protocol.logprob_kind import LogprobKind
from engines.protocol.types import NO_NUMBER
from engines.vllm import routes
from engines.vllm.features import LOGPROB_RULES, PROCESSED

Json = dict[str, Any]
_TOKEN = re.compile(r" (\d{1,3})(?!\d)|(.)", re.DOTALL)
_DEFAULT_TOKENS = 16
# A cut makes what it keeps more probable; the logits as they are differ, too.
_SHARES = {LogprobKind.FULL: 1.0, LogprobKind.CUT: 0.5, LogprobKind.RAW: 1.5}


class BadRequest(ValueError):
    """vLLM answers with 400."""


def text_of(ids: Sequence[int]) -> str:
    return "".join(f" {token}" for token in ids)


def ids_of(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for number, other in _TOKEN.findall(text):
        found += [int(number)] if number else other.encode()
    return tuple(found)


def logprob_of(token: int) -> float:
    """What the OpenAI routes report for a token, of the full distribution."""
    return -(token + 1) / 1000


class Form:
    """``/inference/v1/generate``, and what the other routes have in common with it.

    Args:
        raw: the body.
        mode: as vLLM's ``--logprobs-mode``.
    """

    def __init__(self, raw: Mapping[str, Any], mode: str = PROCESSED) -> None:
        self.raw = raw
        kind = LOGPROB_RULES[mode].kind_of(self._sampling())
        self._share_of_logprob = _SHARES[kind]

    def request(self, rid: str) -> FakeRequest:
        """What is to be generated.

        Raises:
            BadRequest: it contradicts itself, or is for no token.
        """
        limit = self._limit()
        if limit is not None and limit < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {limit}.")
        sampling = SamplingParams(max_new_tokens=_DEFAULT_TOKENS if limit is None else limit)
        return FakeRequest(rid, self._prompt(), sampling, self._wants_logprobs())

    def begin(self, request: FakeRequest) -> list[Json]:
        """What a stream begins with, before any token."""
        return []

    def event(self, request: FakeRequest, sent: int) -> Json:
        """What is new after so many tokens."""
        whole, ids = request.reply(), request.output_ids[sent:]
        reason = whole.finish_reason
        spans = [
            {"version": span.version, "start": span.start, "end": span.end}
            for span in whole.weight_versions
        ]
        choice: Json = {
            "index": 0,
            "token_ids": ids,
            "text": text_of(ids),
            "logprobs": None,
            "finish_reason": None if reason is None else reason.kind,
            # At the end only, in a stream too.
            "weight_versions": None if reason is None else spans,
        }
        if request.return_logprob:
            value = self._share_of_logprob * request.logprob
            value = NO_NUMBER if math.isnan(value) else value
            choice["logprobs"] = {"content": [{"token": str(one), "logprob": value} for one in ids]}
        return {"request_id": routes.REQUEST_PREFIX + request.rid, "choices": [choice]}

    def end(self, request: FakeRequest) -> list[Json]:
        """What a stream ends with, after the last token."""
        return []

    def whole(self, request: FakeRequest) -> Json:
        """The complete reply."""
        return self.event(request, 0)

    def _sampling(self) -> Mapping[str, Any]:
        sampling: Mapping[str, Any] = self.raw["sampling_params"]
        return sampling

    def _prompt(self) -> tuple[int, ...]:
        return tuple(self.raw["token_ids"])

    def _limit(self) -> int | None:
        """The most tokens; None if the request does not say."""
        return self._first_set(self._sampling(), "max_tokens")

    @staticmethod
    def _first_set(raw: Mapping[str, Any], *names: str) -> int | None:
        return next((raw[name] for name in names if raw.get(name) is not None), None)

    def _wants_logprobs(self) -> bool:
        return "logprobs" in self._sampling()


class CompletionForm(Form):
    """``/v1/completions``."""

    kind = kind_of_chunk = "text_completion"
    id_form = "cmpl-{}-0"

    def event(self, request: FakeRequest, sent: int) -> Json:
        ids, reason = request.output_ids[sent:], request.reply().finish_reason
        choice: Json = {
            "index": 0,
            **self._text(ids),
            "logprobs": self._logprobs(request, sent) if request.return_logprob else None,
            "finish_reason": None if reason is None else reason.kind,
            "stop_reason": None,
        }
        if self.raw.get("return_token_ids"):
            choice["token_ids"] = ids
        chunk = self._chunk(request, choice)
        return chunk if sent else self._with_prompt(chunk, request)

    def end(self, request: FakeRequest) -> list[Json]:
        if not self._stream_option("include_usage"):
            return []
        return [self._head(request, self.kind_of_chunk) | {"choices": []} | _usage(request)]

    def whole(self, request: FakeRequest) -> Json:
        head, choices = self._head(request, self.kind), self.event(request, 0)["choices"]
        return self._with_prompt(head | {"choices": choices} | _usage(request), request)

    def _sampling(self) -> Mapping[str, Any]:
        return self.raw

    def _prompt(self) -> tuple[int, ...]:
        prompt = self.raw["prompt"]
        return ids_of(prompt) if isinstance(prompt, str) else tuple(prompt)

    def _limit(self) -> int | None:
        return self._first_set(self.raw, "max_completion_tokens", "max_tokens")

    def _wants_logprobs(self) -> bool:
        return self.raw.get("logprobs") is not None

    def _text(self, ids: Sequence[int]) -> Json:
        return {"text": text_of(ids)}

    def _logprobs(self, request: FakeRequest, sent: int) -> Json:
        ids = request.output_ids
        new = ids[sent:]
        return {
            "text_offset": [len(text_of(ids[:place])) for place in range(sent, len(ids))],
            "token_logprobs": [self._logprob_of(one) for one in new],
            "tokens": [text_of([one]) for one in new],
            "top_logprobs": [{text_of([one]): self._logprob_of(one)} for one in new],
        }

    def _logprob_of(self, token: int) -> float:
        return self._share_of_logprob * logprob_of(token)

    def _with_prompt(self, reply: Json, request: FakeRequest) -> Json:
        """The reply with the ids of the prompt where they are wanted."""
        if self.raw.get("return_token_ids"):
            reply["choices"][0]["prompt_token_ids"] = list(request.input_ids)
        return reply

    def _chunk(self, request: FakeRequest, choice: Json) -> Json:
        usage = _usage(request) if self._stream_option("continuous_usage_stats") else {}
        return self._head(request, self.kind_of_chunk) | {"choices": [choice]} | usage

    def _head(self, request: FakeRequest, kind: str) -> Json:
        name, model = self.id_form.format(request.rid), self.raw.get("model") or "fake"
        return {"id": name, "object": kind, "created": 0, "model": model}

    def _stream_option(self, name: str) -> bool:
        return bool((self.raw.get("stream_options") or {}).get(name))


class ChatForm(CompletionForm):
    """``/v1/chat/completions``."""

    kind, kind_of_chunk = "chat.completion", "chat.completion.chunk"
    id_form = "chatcmpl-{}"

    def begin(self, request: FakeRequest) -> list[Json]:
        begun = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [self._with_prompt(self._chunk(request, begun), request)]

    def event(self, request: FakeRequest, sent: int) -> Json:
        chunk = super().event(request, sent)
        chunk.pop("prompt_token_ids", None)  # with the role
        return chunk

    def whole(self, request: FakeRequest) -> Json:
        reply = super().whole(request)
        (choice,) = reply["choices"]
        choice["message"] = {"role": "assistant", **choice.pop("delta")}
        return reply

    def _prompt(self) -> tuple[int, ...]:
        continues = bool(self.raw.get("continue_final_message"))
        if continues and self.raw.get("add_generation_prompt", True):
            raise BadRequest("Cannot set both continue_final_message and add_generation_prompt")
        ids = (self.raw.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if ids is not None:  # instead of the messages
            return tuple(ids)
        text = "".join(f"<{one['role']}>{one['content']}</>" for one in self.raw["messages"])
        return ids_of(text.removesuffix("</>") if continues else text + "<assistant>")

    def _wants_logprobs(self) -> bool:
        return bool(self.raw.get("logprobs"))

    def _text(self, ids: Sequence[int]) -> Json:
        return {"delta": {"content": text_of(ids)}}

    def _logprobs(self, request: FakeRequest, sent: int) -> Json:
        rest: Json = {"bytes": [], "top_logprobs": []}
        entries = [
            {"token": text_of([one]), "logprob": self._logprob_of(one), **rest}
            for one in request.output_ids[sent:]
        ]
        return {"content": entries}

    def _with_prompt(self, reply: Json, request: FakeRequest) -> Json:
        if self.raw.get("return_token_ids"):
            reply["prompt_token_ids"] = list(request.input_ids)
        return reply


def _usage(request: FakeRequest) -> Json:
    prompt, done = len(request.input_ids), len(request.output_ids)
    counts = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
    return {"usage": counts}


FORMS: Mapping[str, type[Form]] = {
    routes.GENERATE: Form,
    routes.COMPLETIONS: CompletionForm,
    routes.CHAT: ChatForm,
}
