"""Pairs of equal requests, before and after a push, on every route: each is of its own weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any
from uuid import uuid4

import aiohttp

from tests.support.real_policy import RealPolicy
from tests.support.referee import Answer, Referee, Span

NUM_TOKENS = 6
_AT_ONCE = 8
_PER_PUSH = 60
_CHATS = 12
ROUTES = ("generate", "stream", "completions", "session")
SALTS = (None, "mine", "v0", "x" * 200)


async def check_pairs(policy: RealPolicy, num_pairs: int, seed: int = 0) -> dict[str, int]:
    """Ask pairs of requests with a push between each two, and hold all against transformers.

    Returns:
        How many replies there were by route, and how many took tokens from a prefix cache.
    """
    draw = Random(seed)
    (agents_url,) = (await policy.handle.status()).agents_urls
    pairs = [_Pair(number, draw, agents_url) for number in range(num_pairs)]
    counts = dict.fromkeys((*ROUTES, "cached"), 0)
    async with aiohttp.ClientSession(policy.handle.url) as client:
        for begin in range(0, num_pairs, _PER_PUSH):
            some = pairs[begin : begin + _PER_PUSH]
            asked = [*some, *draw.sample(some, len(some) // 3)]  # some again, out of the cache
            before = await _ask_all(client, asked, policy.handle.weight_version)
            await policy.handle.push(policy.next_tensors())
            after = await _ask_all(client, asked, policy.handle.weight_version)
            answers = [answer for answer, _ in before + after]
            assert (found := Referee(policy.weights_of).findings(answers)) == [], found[:3]
            for pair, (_, num_cached) in zip(asked * 2, before + after, strict=True):
                counts[pair.route] += 1
                counts["cached"] += num_cached > 0
    return counts


class _Pair:
    """One request, asked before a push and after it."""

    def __init__(self, number: int, draw: Random, agents_url: str) -> None:
        self.number = number
        self.agents_url = agents_url
        self.route = draw.choice(ROUTES)
        self.salt = draw.choice(SALTS)
        length = draw.randrange(4, 100)
        self.prompt = [draw.randrange(0, 90) for _ in range(length)]
        self.chat = draw.randrange(_CHATS)


async def _ask_all(
    client: aiohttp.ClientSession, pairs: Sequence[_Pair], version: int
) -> list[tuple[Answer, int]]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(pair: _Pair) -> tuple[Answer, int]:
        async with places:
            return await _ASK[pair.route](client, pair, version, uuid4().hex)

    return await asyncio.gather(*map(ask, pairs))


async def _post(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
    async with client.post(path, json=body) as reply:
        assert reply.status == 200, await reply.text()
        if not body.get("stream"):
            return await reply.json()
        events = [line async for line in reply.content if line.startswith(b"data: {")]
        return json.loads(events[-1][6:])


def _salted(pair: _Pair, name: str = "extra_key") -> dict[str, Any]:
    return {} if pair.salt is None else {name: pair.salt}


async def _generate(
    client: aiohttp.ClientSession, pair: _Pair, version: int, rid: str
) -> tuple[Answer, int]:
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {
        "input_ids": pair.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": pair.route == "stream",
        **_salted(pair),
    }
    payload = await _post(client, "/generate", body)
    return Answer.of(pair.prompt, payload), payload["meta_info"].get("cached_tokens") or 0


async def _completions(
    client: aiohttp.ClientSession, pair: _Pair, version: int, rid: str
) -> tuple[Answer, int]:
    body = {
        "prompt": pair.prompt,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        **_salted(pair, "cache_salt" if pair.number % 2 else "extra_key"),
    }
    reply = await _post(client, "/v1/completions", body)
    (choice,) = reply["choices"]
    details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    return _answer(rid, pair.prompt, ids, logprobs, version), details.get("cached_tokens") or 0


async def _session(
    client: aiohttp.ClientSession, pair: _Pair, version: int, rid: str
) -> tuple[Answer, int]:
    url = f"{pair.agents_url}/sessions/{rid}"
    body = {
        "messages": [{"role": "user", "content": f"Say {pair.chat}"}],
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **_salted(pair),
    }
    await _post(client, f"{url}/v1/chat/completions", body)
    async with client.get(url) as reply:
        (turn,) = (await reply.json())["turns"]
    prompt, ids = turn["prompt_ids"], turn["output_ids"]
    return _answer(rid, prompt, ids, turn["output_logprobs"], version), 0


def _answer(
    rid: str, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], version: int
) -> Answer:
    spans = (Span(version, 0, len(ids)),)
    return Answer(rid, tuple(prompt), tuple(ids), tuple(logprobs), spans, "length")


_ASK = {
    "generate": _generate,
    "stream": _generate,
    "completions": _completions,
    "session": _session,
}
