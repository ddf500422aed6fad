"""Requests with each sampling parameter over a push of the same weights, held against calm ones.

A greedy reply that goes on behind a seam is the calm one: the weights are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from rollout.router.continuation.parameters import BY_NAME, AtSeam
from tests.support.waits import until

TOLERANCE = 1e-3
"""In nats."""
GREEDY = {"temperature": 0.0, "ignore_eos": True}
_TIMEOUT = aiohttp.ClientTimeout(total=240)
_NUM_BEFORE = 24
"""Tokens of each stream before the push."""


@dataclass(frozen=True)
class Case:
    """One request.

    Attributes:
        name: of the parameter.
        sampling: beside ``GREEDY``.
        body: other fields.
        is_vllm: on vLLM's own route, not on ``/generate``.
        num: the most tokens.
    """

    name: str
    sampling: Mapping[str, Any]
    body: Mapping[str, Any] = field(default_factory=dict)
    is_vllm: bool = False
    num: int = 0

    def of_length(self, num: int) -> Case:
        return replace(self, num=num)


@dataclass
class Outcome:
    """What a client got.

    Attributes:
        num_seen: token ids of the events so far.
        error: in words; empty for none.
        is_over: all of it has come.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    meta: Mapping[str, Any] = field(default_factory=dict)
    num_seen: int = 0
    error: str = ""
    is_over: bool = False

    @property
    def has_begun(self) -> bool:
        return self.is_over or self.num_seen >= _NUM_BEFORE

    @property
    def seam(self) -> int:
        """Where the last version of its tokens begins."""
        return int((self.meta.get("weight_versions") or [{"start": 0}])[-1]["start"])

    @property
    def end(self) -> Mapping[str, Any]:
        return self.meta.get("finish_reason") or {}

    def take(self, event: Mapping[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"]["message"])
            return
        if "choices" in event:
            self._take_vllm(event)
            return
        self.ids, self.text, self.meta = event["output_ids"], event["text"], event["meta_info"]
        self.logprobs = [one[0] for one in self.meta.get("output_token_logprobs") or ()]
        self.num_seen = len(self.ids)

    def _take_vllm(self, event: Mapping[str, Any]) -> None:
        """What vLLM sends, of which each event has what is new."""
        for choice in event["choices"]:
            self.ids = [*self.ids, *choice["token_ids"]]
            self.text += choice["text"]
            content = (choice["logprobs"] or {}).get("content") or ()
            self.logprobs = [*self.logprobs, *(one["logprob"] for one in content)]
            self.num_seen = len(self.ids)
            if choice["finish_reason"]:
                end = {"type": choice["finish_reason"], "message": str(choice["stop_reason"])}
                versions = choice["weight_versions"]
                num = event.get("num_failovers")
                self.meta = {
                    "finish_reason": end,
                    "weight_versions": versions,
                    "num_failovers": num,
                }


async def _request(
    session: aiohttp.ClientSession, case: Case, number: int, outcome: Outcome, *, stream: bool
) -> None:
    sampling = {**GREEDY, "max_new_tokens": case.num, **case.sampling}
    path, prompt = "/generate", [11, 12, 13 + number]
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    if case.is_vllm:
        path = "/inference/v1/generate"
        sampling |= {"max_tokens": sampling.pop("max_new_tokens"), "logprobs": 0}
        body = {"token_ids": prompt, "sampling_params": sampling, "output_mode": "text"}
    body |= {"stream": stream, **case.body}
    headers = {"x-token-failover": "on"}
    async with session.post(path, json=body, headers=headers) as response:
        if not stream:
            outcome.take(await response.json())
            outcome.is_over = True
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                outcome.take(json.loads(line[6:]))
            elif line.startswith(b"{"):
                outcome.take(json.loads(line))
    outcome.is_over = True


async def calm(url: str, cases: Sequence[Case]) -> list[Outcome]:
    """The whole replies without a push."""
    async with aiohttp.ClientSession(url, timeout=_TIMEOUT) as session:
        found = [Outcome() for _ in cases]
        async with asyncio.TaskGroup() as group:
            for number, (case, one) in enumerate(zip(cases, found, strict=True)):
                group.create_task(_request(session, case, number, one, stream=False))
        return found


async def over_a_push(
    url: str, cases: Sequence[Case], push: Callable[[], Any]
) -> list[tuple[Outcome, Outcome]]:
    """The whole reply and the stream of each, with a push when each stream has begun."""
    async with aiohttp.ClientSession(url, timeout=_TIMEOUT) as session:
        found = [(Outcome(), Outcome()) for _ in cases]
        async with asyncio.TaskGroup() as group:
            for number, (case, (whole, stream)) in enumerate(zip(cases, found, strict=True)):
                group.create_task(_request(session, case, number, whole, stream=False))
                group.create_task(_request(session, case, number, stream, stream=True))
            await until(lambda: all(stream.has_begun for _, stream in found), 120)
            await asyncio.to_thread(push)
        return found


def why_not_equal(one: Outcome, other: Outcome) -> str:
    """The first difference of two replies; empty if there is none."""
    if one.error or other.error:
        return one.error or other.error
    pairs = zip(one.ids, other.ids, strict=False)
    at = next((num for num, (left, right) in enumerate(pairs) if left != right), None)
    if at is not None:
        return f"another token at {at}"
    if len(one.ids) != len(other.ids) or one.text != other.text:
        return f"{len(one.ids)} tokens and {len(other.ids)}, texts {one.text == other.text}"
    gaps = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return f"log-prob {gaps[worst]:.2g} off at {worst}" if gaps[worst] > TOLERANCE else ""


def cell_of(kind: str, case: Case) -> AtSeam:
    """What the table says of it."""
    row = BY_NAME[case.name]
    return (row.others if case.is_vllm else None) or row.at(kind)


async def findings(
    url: str, cases: Sequence[Case], cells: Sequence[AtSeam], push: Callable[[], Any]
) -> list[str]:
    """What is not as these cells say, a line each."""
    expected = await calm(url, cases)
    found = await over_a_push(url, cases, push)
    return [
        f"{case.name}: {why}"
        for case, cell, want, (whole, stream) in zip(cases, cells, expected, found, strict=True)
        if (why := _why_wrong(cell, case, want, whole, stream))
    ]


def _why_wrong(cell: AtSeam, case: Case, want: Outcome, whole: Outcome, stream: Outcome) -> str:
    is_carried = cell is AtSeam.CARRIED
    seams = [whole.seam] if not is_carried else [whole.seam, stream.seam]
    if is_carried != all(seams):
        return f"seams at {seams} of {len(want.ids)} tokens"
    if why := why_not_equal(want, whole):
        return f"whole: {why}"
    if whole.meta["num_failovers"] != 1:
        return f"{whole.meta['num_failovers']} failovers for one push"
    if is_carried:
        why = why_not_equal(want, stream)
        return f"stream: {why}" if why else ""
    if stream.end.get("type") != "abort" or case.name not in stream.end.get("message", ""):
        return f"stream: ended with {stream.end}"
    begun = len(stream.ids)
    is_beginning = 0 < begun < len(want.ids) and stream.ids == want.ids[:begun]
    return "" if is_beginning else f"stream: {begun} tokens, not the first of the calm reply"
