"""Engines whose token at a place depends on the place alone, in the words of SGLang and of vLLM.

Text is made as theirs is: SGLang's detokenizer decodes from a few tokens before, sends complete
characters, and of an incomplete end what ``find_printable_text`` says; its server may join what the
detokenizer sent at several times in one event.  vLLM's text is ``DecodeStream``'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tests.rollout.router.continuation.scripts import END

HEAD = {"id": "r", "created": 1, "model": "m"}
Payload = dict[str, Any]


def logprob(place: int) -> float:
    return -1.0 - place / 8


def top(place: int) -> list[Any]:
    return [[logprob(place), 900 + place, None], [-9.0, place, None]]


class SglangText:
    """``DetokenizerManager`` of SGLang 0.5.23, whose pieces ``TokenizerManager`` joins.

    Attributes:
        repeats: it sent a text twice, since it showed it before it was final, and then forgot that.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._decode, self._ids = tokenizer.decode, prompt[-5:]
        self._surrogate, self._read = 0, len(self._ids)
        self._done, self._joined, self._num_sent = "", "", 0
        self.repeats = False

    def take(self, ids: list[int], *, is_last: bool) -> str:
        """The text so far."""
        self._ids = self._ids + ids
        before = self._decode(self._ids[self._surrogate : self._read])
        new = self._decode(self._ids[self._surrogate :])[len(before) :]
        is_final = is_last or (new != "" and not new.endswith("\ufffd"))
        shown = self._done + (new if is_final else _printable(new))
        if is_final:
            self._done = shown
            self._surrogate, self._read = self._read, len(self._ids)
        self._joined += shown[self._num_sent :]
        self.repeats |= len(shown) < self._num_sent
        self._num_sent = len(shown)
        return self._joined


def _printable(text: str) -> str:
    def is_chinese(one: str) -> bool:
        return "\u3400" <= one <= "\u9fff"

    if text.endswith("\n") or (text and is_chinese(text[-1])):
        return text
    if len(text) > 1 and is_chinese(text[-2]):
        return text[:-1]
    return text[: text.rfind(" ") + 1]


class VllmText:
    """``FastIncrementalDetokenizer`` of vLLM 0.32."""

    repeats = False

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer, self._text = tokenizer, ""
        self._stream = DecodeStream(ids=prompt, skip_special_tokens=True)

    def take(self, ids: list[int], *, is_last: bool) -> str:
        for one in ids:
            self._text += self._stream.step(self._tokenizer, one) or ""
        return self._text


@dataclass
class Step:
    """What is known after some tokens of this engine."""

    num: int
    text: str
    finish: str | None = None
    matched: Any = None


@dataclass
class Engine:
    """One engine.

    Attributes:
        ids: of the whole answer.
        sizes: tokens that SGLang's detokenizer gets at once, and those in an event of vLLM; the
            last size over and over.
        joined: of SGLang, how many of those are in one event, over and over.
        generated: places of the tokens that it generated.
        repeats: it has sent a text twice.
    """

    tokenizer: Tokenizer
    prompt: list[int]
    ids: list[int]
    is_vllm: bool
    version: int
    sizes: Sequence[int]
    joined: Sequence[int] = (1,)
    generated: set[int] = field(default_factory=set)
    repeats: bool = False

    def reply(self, path: str, body: bytes) -> bytes:
        """The whole stream; of a chat that is not streamed the one reply."""
        raw = json.loads(body)
        if not raw["stream"]:
            return json.dumps(self._whole_chat(raw)).encode()
        events = {
            "/generate": self._generate,
            "/inference/v1/generate": self._vllm_generate,
            "/v1/completions": self._completion,
            "/v1/chat/completions": self._chat,
        }[path](raw)
        lines = [
            b"data: %s\n\n" % json.dumps(event, ensure_ascii=False).encode() for event in events
        ]
        return b"".join(lines) + b"data: [DONE]\n\n"

    def _start(self, prompt: list[int]) -> int:
        start = len(prompt) - len(self.prompt)
        assert prompt == self.prompt + self.ids[:start], "not what was generated"
        return start

    def _steps(self, start: int, budget: int | None, stops: list[str]) -> Iterator[Step]:
        kind = VllmText if self.is_vllm else SglangText
        text = kind(self.tokenizer, self.prompt + self.ids[:start])
        end, at, turn, event = self.tokenizer.token_to_id(END), 0, 0, 0
        shown = ""
        end_of_event = self.joined[0]
        while True:
            new: list[int] = []
            finish, matched = None, None
            while finish is None and len(new) < self.sizes[min(turn, len(self.sizes) - 1)]:
                one = self.ids[start + at]
                at += 1
                new.append(one)
                self.generated.add(start + at - 1)
                if self.is_vllm:  # it looks for stop strings in the text that it shows
                    so_far = shown = text.take([one], is_last=False)
                else:
                    so_far = self._plain(start, at)
                if stop := next((stop for stop in stops if stop in so_far), None):
                    finish, matched = "stop", stop
                elif one == end:
                    finish, matched = "stop", None if self.is_vllm else end
                elif at == budget:
                    finish = "length"
            turn += 1
            if not self.is_vllm:
                shown = text.take(new, is_last=finish is not None)
            self.repeats |= text.repeats
            if finish is not None or self.is_vllm or turn == end_of_event:
                yield Step(at, shown, finish, matched)
                event += 1
                end_of_event = turn + self.joined[event % len(self.joined)]
            if finish is not None:
                return

    def _plain(self, start: int, num: int) -> str:
        before = self.tokenizer.decode(self.prompt + self.ids[:start])
        return self.tokenizer.decode(self.prompt + self.ids[: start + num])[len(before) :]

    def _token(self, place: int) -> str:
        """Text of one token, as a log-prob has it."""
        text = self.tokenizer.decode([self.ids[place]])
        if not self.is_vllm or "\ufffd" not in text:
            return text
        before = self.tokenizer.decode(self.ids[:place]).rstrip("\ufffd")
        whole = self.tokenizer.decode(self.ids[: place + 1])
        return "" if whole.endswith("\ufffd") else whole[len(before) :]

    # -- the routes -------------------------------------------------------------------------

    def _generate(self, raw: Payload) -> Iterator[Payload]:
        sampling = raw["sampling_params"]
        start = self._start(raw["input_ids"])
        stops = sampling.get("stop") or []
        for step in self._steps(start, sampling["max_new_tokens"], stops):
            finish: Payload | None = None
            text = step.text
            if step.finish == "length":
                finish = {"type": "length", "length": step.num}
            elif step.finish is not None:
                finish = {"type": "stop", "matched": step.matched}
                if isinstance(step.matched, str):
                    text = text[: text.find(step.matched)]
            places = range(start, start + step.num)
            meta: Payload = {
                "id": "r",
                "finish_reason": finish,
                "prompt_tokens": len(raw["input_ids"]),
                "weight_version": str(self.version),
                "completion_tokens": step.num,
                "cached_tokens": 0,
            }
            if raw.get("return_logprob"):
                meta["output_token_logprobs"] = [[logprob(n), self.ids[n], None] for n in places]
                if raw.get("top_logprobs_num"):
                    meta["output_top_logprobs"] = [top(n) for n in places]
            ids = self.ids[start : start + step.num]
            yield {"text": text, "output_ids": ids, "meta_info": meta}

    def _vllm_generate(self, raw: Payload) -> Iterator[Payload]:
        sampling, start = raw["sampling_params"], self._start(raw["token_ids"])
        stops, sent, num = sampling.get("stop") or [], "", 0
        assert not stops or sampling.get("include_stop_str_in_output")
        for step in self._steps(start, sampling["max_tokens"], stops):
            text = _to_stop(step)
            places = range(start + num, start + step.num)
            choice: Payload = {
                "index": 0,
                "token_ids": self.ids[places.start : places.stop],
                "logprobs": None,
                "finish_reason": step.finish,
                "stop_reason": step.matched,
            }
            if raw.get("output_mode") == "text":
                choice["text"] = text[len(sent) :]
            if sampling.get("logprobs") is not None:
                content = [
                    {"token_id": self.ids[n], "logprob": logprob(n), "top_logprobs": top(n)}
                    for n in places
                ]
                choice["logprobs"] = {"content": content}
            if step.finish is not None:
                span = {"version": str(self.version), "start": 0, "end": step.num}
                choice["weight_versions"] = [span]
            yield {"request_id": "r", "choices": [choice]}
            sent, num = text, step.num
        if raw.get("stream_options"):
            yield {"request_id": "r", "choices": [], "usage": self._usage(start, num)}

    def _usage(self, start: int, num: int) -> Payload:
        prompt = len(self.prompt) + start
        return {"prompt_tokens": prompt, "completion_tokens": num, "total_tokens": prompt + num}

    def _end(self, step: Step) -> Payload:
        return {
            "finish_reason": step.finish,
            "stop_reason" if self.is_vllm else "matched_stop": step.matched,
        }

    def _completion(self, raw: Payload) -> Iterator[Payload]:
        start = 0 if isinstance(raw["prompt"], str) else self._start(raw["prompt"])
        stops, sent, num = raw.get("stop") or [], "", 0
        for step in self._steps(start, raw["max_tokens"], stops):
            text = _to_stop(step) if self.is_vllm else step.text
            places = range(start + num, start + step.num)
            choice: Payload = {
                "index": 0,
                "text": text[len(sent) :],
                "token_ids": self.ids[places.start : places.stop],
                "logprobs": None,
                **self._end(step),
            }
            if not num:
                choice["prompt_token_ids"] = self.prompt + self.ids[:start]
            if raw.get("logprobs") is not None:
                choice["logprobs"] = {
                    "tokens": [self._token(n) for n in places],
                    "token_logprobs": [logprob(n) for n in places],
                    "top_logprobs": [{str(n): logprob(n)} for n in places],
                }
            usage = self._usage(start, step.num)
            yield {**HEAD, "object": "text_completion", "choices": [choice], "usage": usage}
            sent, num = text, step.num
        yield {**HEAD, "choices": [], "usage": self._usage(start, num)}

    def _whole_chat(self, raw: Payload) -> Payload:
        """Of SGLang, which then has the log-probs of all tokens."""
        *_, last = self._steps(0, raw.get("max_tokens"), raw.get("stop") or [])
        content = [{"token": self._token(n), "logprob": logprob(n)} for n in range(last.num)]
        choice = {"index": 0, "message": {"role": "assistant", "content": last.text}}
        choice |= {"logprobs": {"content": content}, **self._end(last)}
        return {**HEAD, "choices": [choice], "usage": self._usage(0, last.num)}

    def _chat(self, raw: Payload) -> Iterator[Payload]:
        assert not raw.get("continue_final_message"), "a chat does not continue from its text"
        prompt_ids = (raw.get("kv_transfer_params") or {}).get("prompt_token_ids")
        start = 0 if prompt_ids is None else self._start(prompt_ids)
        stops, sent, num = raw.get("stop") or [], "", 0
        prompt = {"prompt_token_ids": self.prompt + self.ids[:start]}
        begin = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        first = {**HEAD, "choices": [begin], "usage": self._usage(start, 0)}
        yield {**first, **prompt} if raw.get("return_token_ids") else first
        for step in self._steps(start, raw.get("max_tokens"), stops):
            text = _to_stop(step) if self.is_vllm else step.text
            places = range(start + num, start + step.num)
            choice: Payload = {
                "index": 0,
                "delta": {"content": text[len(sent) :]},
                "logprobs": None,
            }
            if raw.get("logprobs"):
                content = [{"token": self._token(n), "logprob": logprob(n)} for n in places]
                choice["logprobs"] = {"content": content}
            if raw.get("return_token_ids"):
                choice["token_ids"] = self.ids[places.start : places.stop]
            usage = {"usage": self._usage(start, step.num)}
            if self.is_vllm:
                yield {**HEAD, "choices": [choice | self._end(step)], **usage}
            else:  # an event without text is not sent, and the finish is one of its own
                if text[len(sent) :]:
                    yield {**HEAD, "choices": [choice | {"finish_reason": None}], **usage}
                if step.finish is not None:
                    end = {"index": 0, "delta": {}, **self._end(step)}
                    yield {**HEAD, "choices": [end]}
            sent, num = text, step.num
        yield {**HEAD, "choices": [], "usage": self._usage(start, num)}


def _to_stop(step: Step) -> str:
    """vLLM's text ends with its stop string."""
    if not isinstance(step.matched, str) or step.matched not in step.text:
        return step.text  # its last character may be held back
    return step.text[: step.text.find(step.matched) + len(step.matched)]
