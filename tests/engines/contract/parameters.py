"""Each sampling parameter: how its effect shows, and which kinds refuse it or pass over it.

What a kind is not named for has the effect.  Nothing is passed over without a reason here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engines.protocol import GenerateReply, SamplingParams
from tests.support.contract import EOS, VLLM_STUB

# Of the tiny models' tokenizer, so that a text of the reply is one of whole characters.
TEXT = tuple(byte - 33 for byte in b"Onceuponatime")
A, B, SPECIAL = ord("a") - 33, ord("b") - 33, 258
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
HOT = replace(GREEDY, temperature=2.0)
FORCED = 100.0

AT_ITS_PEAK = "draws the most probable token whatever the temperature"
NO_TEXT = "its text is the numbers of its tokens"


@dataclass(frozen=True)
class Asker:
    """Gets completions from an engine of a kind, or from a router before it."""

    kind: str
    reply: Callable[[SamplingParams], Awaitable[GenerateReply]]

    async def ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        return (await self.reply(sampling)).output_ids


Effect = Callable[[Asker], Awaitable[bool]]


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        shows: whether it has its effect.
        refused: kinds that answer 400, or whose client sends nothing.
        passed_over: why a kind takes it and does nothing.
        sources: where a real kind does nothing with it, as in ``differences.py``.
    """

    shows: Effect
    refused: frozenset[str] = frozenset()
    passed_over: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def expected(self, kind: str) -> str:
        if kind in self.refused:
            return "refused"
        return "passed over" if kind in self.passed_over else "effect"


def cools(**change: Any) -> Effect:
    """A cut that leaves one token makes a hot reply the greedy one."""

    async def shows(ask: Asker) -> bool:
        cut = await ask.ids(replace(HOT, **change))
        return cut == await ask.ids(GREEDY) and cut != await ask.ids(HOT)

    return shows


async def temperature(ask: Asker) -> bool:
    return await ask.ids(HOT) != await ask.ids(GREEDY)


async def seed(ask: Asker) -> bool:
    first, again, other = [
        await ask.ids(replace(HOT, sampling_seed=number)) for number in (7, 7, 8)
    ]
    return first == again != other


async def max_new_tokens(ask: Asker) -> bool:
    return [len(await ask.ids(replace(GREEDY, max_new_tokens=num))) for num in (1, 5)] == [1, 5]


async def min_new_tokens(ask: Asker) -> bool:
    third = (await ask.ids(GREEDY))[2]
    early = replace(GREEDY, stop_token_ids=(third,))
    late = await ask.ids(replace(early, min_new_tokens=6))
    return len(await ask.ids(early)) <= 3 and len(late) >= 6 and third not in late[:5]


async def stop(ask: Asker) -> bool:
    text = (await ask.reply(GREEDY)).text
    end = next(one for one in text if one.isascii())
    reply = await ask.reply(replace(GREEDY, stop=(end,)))
    kept = await ask.reply(replace(GREEDY, stop=(end,), no_stop_trim=True))
    assert reply.finish_reason is not None
    has_ended = reply.finish_reason.kind == "stop" and len(reply.output_ids) < 12
    return has_ended and reply.text == text[: text.index(end)] and kept.text == reply.text + end


async def stop_token_ids(ask: Asker) -> bool:
    whole = await ask.ids(GREEDY)
    reply = await ask.reply(replace(GREEDY, stop_token_ids=(whole[2],)))
    assert reply.finish_reason is not None
    place = whole.index(whole[2]) + 1
    return reply.finish_reason.kind == "stop" and reply.output_ids == whole[:place]


async def ignore_eos(ask: Asker) -> bool:
    if ask.kind == "embedded":  # which has no bias: sooner or later it draws the end token
        drawn = replace(HOT, max_new_tokens=3000, sampling_seed=1)
        ends = await ask.ids(drawn)
        goes_on = await ask.ids(replace(drawn, ignore_eos=True, max_new_tokens=len(ends) + 2))
        return ends[-1] == EOS and len(ends) < 3000 and len(goes_on) == len(ends) + 2
    forced = replace(GREEDY, logit_bias={EOS: FORCED})
    ends = await ask.ids(forced)
    return ends == (EOS,) and await ask.ids(replace(forced, ignore_eos=True)) == (EOS,) * 12


def changes(**change: Any) -> Effect:
    """The tokens are others, of which more are different."""

    async def shows(ask: Asker) -> bool:
        long = replace(GREEDY, max_new_tokens=100, ignore_eos=True)
        plain, changed = await ask.ids(long), await ask.ids(replace(long, **change))
        return len(set(changed)) > len(set(plain))

    return shows


async def logit_bias(ask: Asker) -> bool:
    return await ask.ids(replace(GREEDY, logit_bias={A: FORCED})) == (A,) * 12


def writes(form: str, **grammar: str) -> Effect:
    """The text has the form."""

    async def shows(ask: Asker) -> bool:
        text = (await ask.reply(replace(GREEDY, **grammar))).text
        return re.fullmatch(form, text) is not None

    return shows


async def stop_regex(ask: Asker) -> bool:
    forced = replace(GREEDY, logit_bias={A: FORCED})
    return len(await ask.ids(replace(forced, stop_regex=("aa+",)))) < 12


async def custom_params(ask: Asker) -> bool:
    return await ask.ids(replace(GREEDY, custom_params={"x": 1})) != await ask.ids(GREEDY)


async def special_text(ask: Asker, **change: Any) -> bool:
    """Whether the text of special tokens is another one."""
    if ask.kind == "embedded":
        drawn = replace(HOT, max_new_tokens=600, sampling_seed=1, ignore_eos=True)
    else:
        drawn = replace(GREEDY, logit_bias={SPECIAL: FORCED})
    with_them = replace(drawn, skip_special_tokens=False)
    plain = with_them if "spaces_between_special_tokens" in change else drawn
    one, other = await ask.reply(plain), await ask.reply(replace(with_them, **change))
    assert one.output_ids == other.output_ids
    return one.text != other.text


async def spaces(ask: Asker) -> bool:
    return await special_text(ask, spaces_between_special_tokens=False)


async def several(ask: Asker) -> bool:
    await ask.reply(replace(HOT, n=2))
    return True


STUB = VLLM_STUB
NOT_EMBEDDED = frozenset({"embedded"})
NO_GRAMMAR = frozenset({"embedded", "fake", STUB})
FAKE_AT_ITS_PEAK = {"fake": AT_ITS_PEAK, STUB: AT_ITS_PEAK}
FAST = "fast tokenizers put no spaces there"
SPACES = (
    "sglang/srt/managers/detokenizer_manager.py: spaces_between_special_tokens",
    "vllm/v1/engine/detokenizer.py: spaces_between_special_tokens",
)
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "abab"}}

PARAMETERS: dict[str, Parameter] = {
    "max_new_tokens": Parameter(max_new_tokens),
    "temperature": Parameter(temperature, passed_over=FAKE_AT_ITS_PEAK),
    "top_p": Parameter(cools(top_p=1e-6), passed_over=FAKE_AT_ITS_PEAK),
    "top_k": Parameter(cools(top_k=1), passed_over=FAKE_AT_ITS_PEAK),
    "min_new_tokens": Parameter(min_new_tokens),
    "stop": Parameter(stop),
    "stop_token_ids": Parameter(stop_token_ids),
    "ignore_eos": Parameter(ignore_eos),
    "n": Parameter(several, frozenset({"sglang", "vllm", "embedded", "fake", STUB})),
    "sampling_seed": Parameter(
        seed,
        passed_over={"sglang": "takes seeds only if it is started deterministic"}
        | FAKE_AT_ITS_PEAK,
        sources=("sglang/srt/sampling/sampling_batch_info.py: if enable_deterministic",),
    ),
    "min_p": Parameter(cools(min_p=1.0), NOT_EMBEDDED, FAKE_AT_ITS_PEAK),
    "frequency_penalty": Parameter(changes(frequency_penalty=2.0), NOT_EMBEDDED),
    "presence_penalty": Parameter(changes(presence_penalty=2.0), NOT_EMBEDDED),
    "repetition_penalty": Parameter(changes(repetition_penalty=2.0), NOT_EMBEDDED),
    "regex": Parameter(writes("[ab]+", regex="[ab]+"), NO_GRAMMAR),
    "json_schema": Parameter(
        writes("true|false", json_schema=json.dumps({"type": "boolean"})), NO_GRAMMAR
    ),
    "ebnf": Parameter(writes("ab|ba", ebnf='root ::= "ab" | "ba"'), NO_GRAMMAR),
    "structural_tag": Parameter(writes("abab", structural_tag=json.dumps(TAG)), NO_GRAMMAR),
    "stop_regex": Parameter(stop_regex, frozenset({"embedded", "fake", "vllm", STUB})),
    "logit_bias": Parameter(logit_bias, NOT_EMBEDDED),
    "skip_special_tokens": Parameter(special_text, passed_over={"fake": NO_TEXT, STUB: NO_TEXT}),
    "spaces_between_special_tokens": Parameter(
        spaces, NOT_EMBEDDED, {"fake": NO_TEXT, STUB: NO_TEXT, "sglang": FAST, "vllm": FAST}, SPACES
    ),
    "no_stop_trim": Parameter(stop),
    "custom_params": Parameter(
        custom_params,
        frozenset({"embedded", "vllm", STUB}),
        dict.fromkeys(("sglang", "fake"), "they are for a custom processor"),
        ("sglang/srt/sampling/sampling_params.py: custom_params: Optional",),
    ),
}

WRONG: list[SamplingParams] = [
    replace(GREEDY, temperature=-1.0),
    replace(GREEDY, top_p=0.0),
    replace(GREEDY, top_p=1.5),
    replace(HOT, top_k=-2),  # greedily SGLang has 1 in its place
    replace(GREEDY, min_p=2.0),
    replace(GREEDY, frequency_penalty=3.0),
    replace(GREEDY, presence_penalty=-3.0),
    replace(GREEDY, repetition_penalty=0.0),
    replace(GREEDY, min_new_tokens=20),
    replace(GREEDY, max_new_tokens=-1),
    replace(GREEDY, logit_bias={99999: 1.0}),
    replace(GREEDY, regex="[ab]+", ebnf='root ::= "a"'),
]
"""What every kind refuses."""
