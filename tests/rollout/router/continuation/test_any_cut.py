"""Any cut of any stream, at any byte, with any engines lost, gives the reply of an uncut stream.

The readers of replies are driven without sockets, over engines whose text is made as SGLang's and
vLLM's is, with tokenizers that cut the characters of ten scripts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

from rollout.router.http.head_cache import ReplyHead
from rollout.router.proxy.token_reader import (
    Action,
    Context,
    Finish,
    TokenReader,
    Unusable,
    Write,
)
from tests.rollout.router.continuation.model_engines import (
    Engine,
    SglangText,
    VllmText,
    logprob,
    top,
)
from tests.rollout.router.continuation.replies import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    VLLM_GENERATE,
    read,
)
from tests.rollout.router.continuation.scripts import END, TEXTS, tokenizer_of

OPEN = Context(may_continue=True)
STREAM = ReplyHead(200, [(b"content-type", b"text/event-stream")])
WHOLE = ReplyHead(200, [(b"content-type", b"application/json")])
SGLANG, VLLM, MIXED = ("sglang",), ("vllm",), ("sglang", "vllm")
DIALECTS = [
    (GENERATE, SGLANG),
    (GENERATE, VLLM),
    (GENERATE, MIXED),
    (VLLM_GENERATE, VLLM),
    (COMPLETIONS, SGLANG),
    (COMPLETIONS, VLLM),
    (COMPLETIONS, MIXED),
    (CHAT, SGLANG),
    (CHAT, VLLM),
    (CHAT, MIXED),
]
NAMES = ["-".join([path.strip("/"), *kinds]) for path, kinds in DIALECTS]


@dataclass
class Client:
    """What a client got of the actions of its reader."""

    events: bytes = b""
    whole: bytes = b""
    status: int = 200
    is_over: bool = False
    problem: str = ""

    def get(self, action: Action | None) -> None:
        match action:
            case Write(events):
                self.events += events
            case Finish(body, status, content_type):
                self.is_over, self.status = True, status
                if content_type is not None:
                    self.whole = b"".join(body)
                else:
                    self.events += bytes(body[0])
            case Unusable(why):
                self.is_over, self.problem = True, why
            case _:
                assert action is None, action


def reader_of(case: Case, decode: Any) -> TokenReader:
    data = json.dumps(case.body()).encode()
    reply = read(case.path, data, case.interval, " ".join(case.kinds))
    assert reply is not None
    reply.decode = decode
    return TokenReader(reply)


@dataclass
class Case:
    """A request, its answer, and where its engines are lost.

    Attributes:
        kinds: of the engines, in turn.
        interval: tokens that SGLang decodes at once, behind the first.
        cuts: of each lost engine: its ``sizes`` and ``joined``, the part of its reply that arrives,
            and bytes that arrive at once.
    """

    path: str
    kinds: tuple[str, ...]
    tokenizer: str
    prompt: list[int]
    ids: list[int]
    budget: int
    stops: list[str]
    is_streamed: bool
    has_logprobs: bool
    wants_ids: bool
    interval: int
    cuts: list[tuple[list[int], list[int], float, int]]
    knows_tokenizer: bool = True

    @property
    def gives_ids(self) -> bool:
        """Every engine streams an id for each token."""
        return self.path != CHAT or self.kinds == VLLM

    @property
    def is_lossy(self) -> bool:
        """SGLang streams no log-probs of tokens without text."""
        return self.has_logprobs and self.is_streamed and not self.gives_ids

    def body(self) -> dict[str, Any]:
        names = {"max_tokens": self.budget, "stream": self.is_streamed, "stop": self.stops}
        match self.path:
            case "/generate":
                tops = 2 if self.kinds == SGLANG else 0
                sampling = {"max_new_tokens": self.budget, "stop": self.stops}
                raw = {"input_ids": self.prompt, "sampling_params": sampling}
                more = {"return_logprob": True} | ({"top_logprobs_num": tops} if tops else {})
                return raw | {"stream": self.is_streamed} | (more if self.has_logprobs else {})
            case "/inference/v1/generate":
                vllm = {"max_tokens": self.budget, "stop": self.stops}
                vllm |= {"logprobs": 1} if self.has_logprobs else {}
                raw = {"token_ids": self.prompt, "sampling_params": vllm, "output_mode": "text"}
                return raw | {"stream": self.is_streamed, "stream_options": {"include_usage": True}}
            case "/v1/completions":
                raw = {"prompt": self.prompt, "return_token_ids": self.wants_ids, **names}
                raw |= {"stream_options": {"include_usage": True}} if self.is_streamed else {}
                return raw | ({"logprobs": 1} if self.has_logprobs else {})
        raw = {"messages": [{"role": "user", "content": "q"}], **names}
        raw |= {"stream_options": {"include_usage": True}} if self.is_streamed else {}
        raw |= {"return_token_ids": True} if self.wants_ids and self.gives_ids else {}
        return raw | ({"logprobs": True} if self.has_logprobs else {})


@dataclass
class Reply:
    """What a client got, whatever its form."""

    text: str = ""
    ids: list[int] | None = None
    logprobs: list[float] | None = None
    tops: list[Any] | None = None
    finish: str | None = None
    matched: Any = None
    usage: tuple[int, int] | None = None
    spans: list[dict[str, Any]] = field(default_factory=list)


def answered(case: Case, uncut_on: str = "") -> tuple[Reply | None, list[set[int]], str]:
    """What the client got, None if the request was failed; which tokens each engine made; and the
    kind of the last engine.

    Args:
        uncut_on: the kind of one engine that does all of it.
    """
    tokenizer = tokenizer_of(case.tokenizer)
    decode = tokenizer.decode if case.knows_tokenizer else None
    reader, client = reader_of(case, decode), Client()
    made: list[set[int]] = []
    cuts, kind = [] if uncut_on else case.cuts, uncut_on
    for version, (sizes, joined, part, num) in enumerate([*cuts, ([1], [1], 2.0, 999)]):
        kind = uncut_on or case.kinds[version % len(case.kinds)]
        if kind == "sglang" and not case.knows_tokenizer:
            sizes = [1, case.interval]
        engine = Engine(tokenizer, case.prompt, case.ids, kind == "vllm", version, sizes, joined)
        translated = kind == "vllm" and case.path == GENERATE
        body = reader.body(version, kind)
        data = engine.reply(VLLM_GENERATE if translated else case.path, body)
        assume(not engine.repeats)
        made.append(engine.generated)
        end = min(len(data), int(part * len(data)))
        reader.begin(STREAM if json.loads(body)["stream"] else WHOLE)
        for at in range(0, end, num):
            if not client.is_over:
                client.get(reader.take(data[at : min(end, at + num)], None))
        if client.is_over:
            break
        if part > 1:
            client.get(reader.take(b"", OPEN))
            break
        if (action := reader.take_loss(OPEN)) is not None:
            client.get(action)
            break
        if reader.lose_engine() and reader.reply.has_shown:
            return None, made, kind
    assert client.problem == ""
    assert client.is_over
    assert client.status == 200
    return read_reply(case, client), made, kind


def read_reply(case: Case, client: Client) -> Reply:
    if not case.is_streamed:
        return joined(case, [json.loads(client.whole)])
    lines = client.events.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return joined(case, [json.loads(line.removeprefix("data: ")) for line in lines[:-2]])


def joined(case: Case, payloads: list[dict[str, Any]]) -> Reply:
    """All that the client got, one piece after the other."""
    reply = Reply()
    if case.path == GENERATE:
        texts = [payload["text"] for payload in payloads]
        assert all(texts[-1].startswith(text) for text in texts), "text was taken back"
        last = payloads[-1]
        meta = last["meta_info"]
        reply.text, reply.ids = last["text"], last["output_ids"]
        for payload in payloads:
            assert payload["output_ids"] == reply.ids[: len(payload["output_ids"])]
        if case.has_logprobs:
            entries = meta["output_token_logprobs"]
            assert [entry[1] for entry in entries] == reply.ids
            reply.logprobs = [entry[0] for entry in entries]
            reply.tops = meta.get("output_top_logprobs")
        finish = meta["finish_reason"]
        reply.finish, reply.matched = finish["type"], finish.get("matched")
        reply.usage = meta["prompt_tokens"], meta["completion_tokens"]
        reply.spans = meta["weight_versions"]
        return reply
    for payload in payloads:
        if payload.get("usage"):
            reply.usage = payload["usage"]["prompt_tokens"], payload["usage"]["completion_tokens"]
        reply.spans = (payload.get("metadata") or {}).get("weight_versions", reply.spans)
        for choice in payload["choices"]:
            message = choice.get("delta") or choice.get("message") or choice
            reply.text += message.get("content" if case.path == CHAT else "text") or ""
            if "token_ids" in choice:
                reply.ids = (reply.ids or []) + choice["token_ids"]
            reply.spans = choice.get("weight_versions") or reply.spans
            reply.finish = choice["finish_reason"] or reply.finish
            for name in ("matched_stop", "stop_reason"):
                reply.matched = choice.get(name) or reply.matched
            logprobs = choice.get("logprobs") or {}
            if entries := logprobs.get("content"):
                reply.logprobs = (reply.logprobs or []) + [one["logprob"] for one in entries]
                if "top_logprobs" in entries[0]:
                    tops = [one["top_logprobs"] for one in entries]
                    reply.tops = (reply.tops or []) + tops
            if logprobs.get("token_logprobs"):
                reply.logprobs = (reply.logprobs or []) + logprobs["token_logprobs"]
                reply.tops = (reply.tops or []) + logprobs["top_logprobs"]
    return reply


@st.composite
def cases(draw: st.DrawFn, path: str, engines: tuple[str, ...], *, knows_tokenizer: bool) -> Case:
    """A request whose reply is exact on any engines, as far as the router can know it.

    A tokenizer with bytes for rare letters decodes all bytes in a row again if one more is no
    letter: there an engine's text depends on its events without a failover, and only the tokenizer
    knows where.
    So does SGLang's where it sends a text twice: such a case is left out.
    """
    gives_ids = path != CHAT or engines == VLLM
    has_logprobs = draw(st.booleans())
    wants_ids = draw(st.booleans())
    kinds = ["byte_level", "llama", "unigram"] if knows_tokenizer and gives_ids else ["byte_level"]
    kind = draw(st.sampled_from(kinds))
    tokenizer = tokenizer_of(kind)
    script = draw(st.sampled_from(sorted(TEXTS)))
    text = TEXTS[script]
    at = draw(st.integers(0, 20))
    ids = tokenizer.encode(text[at : at + draw(st.integers(1, 30))], add_special_tokens=False).ids
    if kind == "byte_level":
        for place in draw(st.lists(st.integers(0, len(ids)), max_size=1)):
            ids.insert(place, draw(st.integers(0, tokenizer.get_vocab_size() - 2)))
    ids.append(tokenizer.token_to_id(END))
    plain = tokenizer.decode(ids)
    stops: list[str] = []
    if plain and draw(st.integers(0, 3)) == 0:
        begin = draw(st.integers(0, len(plain) - 1))
        stop = plain[begin : begin + draw(st.integers(1, 3))]
        stops = [stop] if "\ufffd" not in stop else []
    ends = [n for n in range(1, len(ids)) if not tokenizer.decode(ids[:n]).endswith("\ufffd")]
    budgets = range(1, len(ids)) if kind == "byte_level" else ends
    budget = draw(st.sampled_from([*budgets, len(ids), len(ids) + 3]))
    sizes = st.lists(st.integers(1, 8), min_size=1, max_size=3)
    joined = st.lists(st.integers(1, 3), min_size=1, max_size=3)
    cut = st.tuples(sizes, joined, st.floats(0, 1), st.sampled_from([1, 7, 60, 999]))
    return Case(
        path,
        engines,
        kind,
        tokenizer.encode("Say: ", add_special_tokens=False).ids,
        ids,
        budget,
        stops,
        draw(st.booleans()),
        has_logprobs,
        wants_ids,
        draw(st.integers(1, 8)),
        draw(st.lists(cut, max_size=5)),
        knows_tokenizer,
    )


def text_of(case: Case, num: int, stop: Any, kind: str) -> str:
    """The text of so many tokens up to the stop string, by the tokenizer alone."""
    tokenizer = tokenizer_of(case.tokenizer)
    text = {"sglang": SglangText, "vllm": VllmText}[kind](tokenizer, case.prompt)
    whole = text.take(case.ids[:num], is_last=True)
    return whole[: whole.find(stop)] if isinstance(stop, str) else whole


def check(case: Case) -> None:
    got, made, last = answered(case)
    uncut, _, _ = answered(case, uncut_on=last)
    assert uncut is not None
    num = uncut.usage[1] if uncut.usage else 0
    assert uncut.ids in (None, case.ids[:num])
    assert uncut.text == text_of(case, num, uncut.matched, last)
    if case.is_lossy:
        uncut.logprobs = got.logprobs if got is not None else None
    elif case.has_logprobs:
        assert uncut.logprobs == [logprob(n) for n in range(num)]
        if case.path == GENERATE and case.kinds == SGLANG:
            assert uncut.tops == json.loads(json.dumps([top(n) for n in range(num)]))
    if got is None:  # SGLang gives no ids of a chat before its end
        assert case.is_streamed
        assert not case.gives_ids
        return
    spans, got.spans, uncut.spans = got.spans, [], []
    if not case.gives_ids and got.usage == (len(case.prompt), num - 1):
        num -= 1  # SGLang counts the end in its very last chunk, which was lost
        got.usage = uncut.usage
    assert got == uncut
    at = 0
    for span in spans:
        assert span["start"] == at < span["end"]
        at = span["end"]
        assert made[int(span["version"])].issuperset(range(span["start"], at))
    assert at == num


@pytest.mark.parametrize("num", [15, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("knows_tokenizer", [True, False])
@pytest.mark.parametrize(("path", "engines"), DIALECTS, ids=NAMES)
def test_any_cut_gives_the_reply_of_an_uncut_stream(
    path: str, engines: tuple[str, ...], knows_tokenizer: bool, num: int
) -> None:
    @settings(max_examples=num)
    @given(cases(path, engines, knows_tokenizer=knows_tokenizer))
    def holds(case: Case) -> None:
        check(case)

    holds()
