"""Clients that keep a router busy, and account for every request they made."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp

from tests.support.referee import Answer

# They share a beginning, so that the prefix caches are hit, by prompts and by continuations.
_SHARED = tuple(range(60, 84))
PROMPTS = [_SHARED + tuple(7 * number + i for i in range(9)) for number in range(12)]


class Load:
    """Clients that ask for one completion after another.

    Every fourth one lets the router go on when its request is aborted; the others do it
    themselves, with the tokens they were given.  Every third one brings a cache key of its own,
    where the router would write the weight version: nothing but the flush keeps its entries of
    two versions apart.

    Attributes:
        answers: those not yet taken with ``taken``.
        num_whole: completions that reached the length asked for.
        statuses: of all replies.
        ended: how often each request ended, by id.
        broken: requests that ended in no reply at all, and why.
    """

    def __init__(self, url: str, num_clients: int, seed: int, lengths: tuple[int, int]) -> None:
        self._url = url
        self._num_clients = num_clients
        self._seed = seed
        self._lengths = lengths
        self._ends = asyncio.Event()
        self._changed = asyncio.Condition()
        self.answers: list[Answer] = []
        self.asked: list[str] = []
        self.ended: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.broken: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.num_whole = 0
        self.num_tokens = 0
        self.num_seams = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Load]:
        """Sends requests until the block ends; then waits for their replies."""
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=self._num_clients)
        async with aiohttp.ClientSession(
            self._url, connector=connector, timeout=timeout
        ) as session:
            clients = [
                asyncio.create_task(self._client(session, number))
                for number in range(self._num_clients)
            ]
            try:
                yield self
            finally:
                self._ends.set()
                await asyncio.gather(*clients)

    @property
    def num_in_flight(self) -> int:
        return len(self.asked) - self.ended.total()

    async def reaches(self, num_ended: int) -> None:
        """Returns when so many requests have ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended.total() >= num_ended)

    def taken(self) -> list[Answer]:
        """The answers since it was called last."""
        answers, self.answers = self.answers, []
        return answers

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        random = Random(self._seed * 1_000 + number)
        is_carried = number % 4 == 0
        headers = {"X-Token-Failover": "on"} if is_carried else {}
        for serial in range(1_000_000):
            if self._ends.is_set():
                return
            prompt, length = random.choice(PROMPTS), random.randint(*self._lengths)
            tokens: tuple[int, ...] = ()
            for turn in range(100):
                rid = f"{number}.{serial}.{turn}."
                body = _body(rid, prompt + tokens, length - len(tokens))
                if has_own_key(rid):
                    body["extra_key"] = "mine"
                answer = await self._ask(session, rid, body, headers)
                if answer is None:
                    break
                tokens += answer.output
                # An abort may come after the last token: there is nothing left to ask for then.
                if len(tokens) >= length or answer.kind != "abort":
                    assert len(tokens) == length, f"{rid}: {len(tokens)} tokens, not {length}"
                    self.num_whole += 1
                    break
                assert not is_carried, f"{rid}: the router gave an abort back"

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        rid: str,
        body: dict[str, Any],
        headers: dict[str, str],
    ) -> Answer | None:
        self.asked.append(rid)
        answer = None
        try:
            async with session.post("/generate", json=body, headers=headers) as reply:
                self.statuses[reply.status] += 1
                if reply.status == 200:
                    payload = await reply.json()
                    answer = Answer.of(body["input_ids"], payload)
                    if headers:  # else the reply is passed on, with the engine's id
                        assert answer.rid == rid, f"asked {rid}, answered {answer.rid}"
                    self.answers.append(answer)
                    self.kinds[answer.kind] += 1
                    self.num_tokens += len(answer.output)
                    self.num_seams += payload["meta_info"].get("num_failovers", 0)
                else:
                    self.broken.append(f"{rid}: {reply.status} {(await reply.text())[:200]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.broken.append(f"{rid}: {type(error).__name__}: {error}")
        self.ended[rid] += 1
        async with self._changed:
            self._changed.notify_all()
        return answer


def has_own_key(rid: str) -> bool:
    """Whether the client of this request chose the key of its cache entries."""
    return int(rid.split(".")[0]) % 3 == 0


def _body(rid: str, prompt: tuple[int, ...], num_tokens: int) -> dict[str, Any]:
    return {
        "rid": rid,
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        "return_logprob": True,
    }
