"""What the stub's routes of generation make of a request and of its tokens: recorded replies, with
these tokens in the place of the recorded ones.

A text is one token per byte, but ``" 12"`` is token 12: the text of a reply has the ids it was made
from.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from engines.protocol import GenerateReply, SamplingParams
from engines.protocol.logprob_kind import LogprobKind
from engines.protocol.types import NO_NUMBER
from engines.vllm import routes
from engines.vllm.features import LOGPROB_RULES, PROCESSED
from tests.support.vllm_stub.conversation import TALK

Json = dict[str, Any]
_RECORDED: Mapping[str, Json] = {step["name"]: step for step in TALK if "name" in step}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NO_TOKEN = "generate_of_no_token"
"""The name of a recorded refusal, which has the form of all of them."""
_ROUTES = {routes.GENERATE: "generate", COMPLETIONS: "completion", CHAT: "chat"}
_TOKEN = re.compile(r" (\d{1,3})(?!\d)|(.)", re.DOTALL)
# A cut makes what it keeps more probable; the others differ, too.
_SHARES = {
    LogprobKind.FULL: 1.0,
    LogprobKind.CUT: 0.5,
    LogprobKind.RAW: 1.5,
    LogprobKind.PENALISED: 0.7,
}


_NAMES = {name: name for name in SamplingParams.__slots__} | {
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}
"""vLLM's parameters -> SGLang's, which a fake draws by.  vLLM passes over all others in silence."""
_WARMEST = 2.0


class Refused(Exception):
    """The recorded reply of this name is the answer, an error; with another reason, if given."""

    def __init__(self, name: str, why: str = "") -> None:
        super().__init__(name)
        self.why = why


def recorded(name: str) -> Any:
    """A reply that may be changed."""
    return copy.deepcopy(_RECORDED[name]["reply"])


def status_of(name: str) -> int:
    return int(_RECORDED[name]["status"])


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
    """A request for tokens, and its replies.

    Args:
        path: of the route.
        raw: the body.
        mode: as vLLM's ``--logprobs-mode``.
        returns_masks: as vLLM's ``--return-sampling-mask``.

    Raises:
        Refused: it contradicts itself, or is for no token.
    """

    def __init__(
        self,
        path: str,
        raw: Mapping[str, Any],
        mode: str = PROCESSED,
        *,
        returns_masks: bool = False,
    ) -> None:
        self._raw = raw
        self._returns_masks = returns_masks
        self._route = _ROUTES[path]
        self._is_own = path == routes.GENERATE
        sampling: Mapping[str, Any] = raw["sampling_params"] if self._is_own else raw
        self._share = _SHARES[LOGPROB_RULES[mode].kind_of(sampling)]
        self._options: Mapping[str, Any] = raw.get("stream_options") or {}
        self._has_ids = self._is_own or bool(raw.get("return_token_ids"))
        logprobs = sampling.get("logprobs")  # 0 is a number of them
        self._has_logprobs = logprobs is not None and logprobs is not False
        self.wants_prompt = "prompt_logprobs" in sampling
        limits = [sampling.get("max_completion_tokens"), sampling.get("max_tokens"), 16]
        self._limit: int = next(one for one in limits if one is not None)
        if self._limit < 1:
            raise Refused(f"{self._route}_of_no_token")
        self._prompt = self._prompt_of(raw)
        self._sampling = self._sampling_of(sampling)
        self._num_shown = 0  # characters

    def _sampling_of(self, raw: Mapping[str, Any]) -> SamplingParams:
        if raw.get("structured_outputs"):
            raise Refused(NO_TOKEN, "a stub knows no forms of an output")
        known = {_NAMES[name]: raw[name] for name in _NAMES if raw.get(name) is not None}
        sampling = replace(SamplingParams(), **known | {"max_new_tokens": self._limit})
        if isinstance(sampling.stop, str):
            sampling = replace(sampling, stop=(sampling.stop,))
        if sampling.temperature > _WARMEST:
            why = f"temperature must be in [0, {_WARMEST:g}], got {sampling.temperature}."
            raise Refused(NO_TOKEN, why)
        # As 0.32 does (``v1/engine/input_processor.py``), for every request.
        if self._returns_masks and sampling.temperature <= 0:
            raise Refused(NO_TOKEN, "sampling distribution replay requires temperature > 0")
        if self._returns_masks and sampling.top_k <= 0:
            raise Refused(NO_TOKEN, "sampling distribution replay requires top_k > 0")
        return sampling

    def _prompt_of(self, raw: Mapping[str, Any]) -> tuple[int, ...]:
        if self._route != "chat":
            prompt = raw["token_ids" if self._is_own else "prompt"]
            return ids_of(prompt) if isinstance(prompt, str) else tuple(prompt)
        continues = bool(raw.get("continue_final_message"))
        if continues and raw.get("add_generation_prompt", True):
            raise Refused("chat_of_both")
        ids = (raw.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if ids is not None:  # instead of the messages
            return tuple(ids)
        text = "".join(f"<{one['role']}>{one['content']}</>" for one in raw["messages"])
        return ids_of(text.removesuffix("</>") if continues else text + "<assistant>")

    def arguments(self) -> Json:
        """Those of ``protocol.Engine.generate``."""
        return {
            "input_ids": self._prompt,
            "sampling_params": self._sampling,
            "rid": self._raw.get("request_id"),
            "return_logprob": self._has_logprobs or self.wants_prompt,
        }

    def whole(self, reply: GenerateReply) -> Json:
        """The complete reply."""
        frame = self._filled(recorded(self._route), reply, 0)
        if self.wants_prompt:
            first, second = recorded("prompt_logprobs")["prompt_logprobs"]
            (entry,) = second.values()
            pairs = zip(self._prompt[1:], reply.input_logprobs or (), strict=True)
            told = [{str(token): entry | {"logprob": value}} for token, value in pairs]
            frame["prompt_logprobs"] = [first, *told]
        return frame

    def begin(self, reply: GenerateReply) -> list[Json]:
        """What a stream begins with, before any token."""
        none = replace(reply, completion_tokens=0)
        return [self._in_stream(one, none) for one in self._events()[:-4]]

    def event(self, reply: GenerateReply, sent: int) -> Json:
        """What is new after so many tokens."""
        first, last = self._events()[-4:-2]
        frame = first if reply.finish_reason is None else last
        return self._in_stream(self._filled(frame, reply, sent), reply)

    def end(self, reply: GenerateReply) -> list[Json]:
        """What a stream ends with, after the last token."""
        is_wanted = self._options.get("include_usage")
        return [self._named(self._events()[-2], reply)] if is_wanted else []

    def _events(self) -> Any:
        return recorded(f"{self._route}_stream")

    def _in_stream(self, frame: Json, reply: GenerateReply) -> Json:
        if not (self._is_own or self._options.get("continuous_usage_stats")):
            del frame["usage"]
        return self._named(frame, reply)

    def _named(self, frame: Json, reply: GenerateReply) -> Json:
        """With the name of the request, its prompt and its numbers, where they are."""
        if self._is_own:
            frame["request_id"] = routes.REQUEST_PREFIX + reply.rid
        else:
            frame["id"] = f"{self._route}-{reply.rid}"
            frame["model"] = self._raw.get("model") or frame["model"]
        if self._route == "chat" and "prompt_token_ids" in frame:
            frame["prompt_token_ids"] = list(self._prompt) if self._has_ids else None
        if frame.get("usage"):
            num, done = len(self._prompt), reply.completion_tokens
            counts = {"prompt_tokens": num, "completion_tokens": done, "total_tokens": num + done}
            frame["usage"] |= counts
        return frame

    def _filled(self, frame: Json, reply: GenerateReply, sent: int) -> Json:
        ids = list(reply.output_ids[sent:])
        (choice,) = self._named(frame, reply)["choices"]
        choice["token_ids"] = ids if self._has_ids else None
        holder = choice if self._route != "chat" else choice.get("delta") or choice["message"]
        holder["content" if self._route == "chat" else "text"] = self._new_text(reply)
        if self._route == "completion":
            is_wanted = self._has_ids and not sent
            choice["prompt_token_ids"] = list(self._prompt) if is_wanted else None
        if reply.finish_reason is not None:  # and only then the versions, in a stream too
            choice["finish_reason"] = reply.finish_reason.kind
            choice["stop_reason"] = reply.finish_reason.matched
            if self._is_own:
                choice["weight_versions"] = [asdict(one) for one in reply.weight_versions]
        if self._is_own and self._returns_masks:
            choice["sampling_mask"] = [[token, token + 1] for token in ids]
        known, choice["logprobs"] = choice["logprobs"], None
        if self._has_logprobs:
            choice["logprobs"] = self._logprobs(known, reply, sent)
        return frame

    def _new_text(self, reply: GenerateReply) -> str:
        """Kept back is what may be the begin of a stop text, until the end."""
        sampling, is_over = self._sampling, reply.finish_reason is not None
        num_kept = (
            0 if is_over or sampling.no_stop_trim else max(map(len, sampling.stop), default=1) - 1
        )
        end = max(self._num_shown, len(reply.text) - num_kept)
        text, self._num_shown = reply.text[self._num_shown : end], end
        return text

    def _logprobs(self, known: Json, reply: GenerateReply, sent: int) -> Json:
        ids, values = reply.output_ids, reply.output_logprobs or ()
        if not self._is_own:
            values = tuple(logprob_of(one) for one in ids)
        told = [NO_NUMBER if math.isnan(one) else self._share * one for one in values[sent:]]
        new = [(text_of([one]), value) for one, value in zip(ids[sent:], told, strict=True)]
        if self._route == "completion":
            return {
                "text_offset": [len(text_of(ids[:place])) for place in range(sent, len(ids))],
                "token_logprobs": told,
                "tokens": [text for text, _ in new],
                "top_logprobs": [{text: value} for text, value in new],
            }
        words = [
            {"token": text, "logprob": value, "bytes": [*text.encode()]} for text, value in new
        ]
        has_top = bool(known["content"][0]["top_logprobs"])
        return {"content": [one | {"top_logprobs": [one] if has_top else []} for one in words]}
