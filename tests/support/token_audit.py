"""Random requests over engines that get new weights and die, and each reply held against the truth.

Every reply is right in each token, or refused in words; the reasons are counted.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import openai

from engines.kinds import kind_of
from engines.protocol import GenerateReply, SamplingParams
from rollout.core.errors import GenerationFailed, RolloutError
from rollout.core.samples import Sample
from rollout.rules.contract import NO_CONTRACT, VERSION_FIELDS, Contract, contract_of
from rollout.rules.routing import BackendState
from rollout.testing.tiny_model import make_byte_tokenizer
from tests.support.real_policy import RealPolicy
from tests.support.token_truth import Asked, Engines, Truth, counted, is_judged

# clock: pauses of random length.

NUM_AT_ONCE = 16
SILENT_S = 300
"""No push or request may take longer."""
_ALPHABET = range(20, 90)


@dataclass
class Report:
    """What a run has found.

    Attributes:
        num_unjudged: replies of which only form, kind and versions are known.
        differences: a line for each reply that is not what it should be.
        refused, failed_pushes: requests without a reply, and pushes without success, by reason.
    """

    num_replies: int = 0
    num_tokens: int = 0
    num_seams: int = 0
    num_pushes: int = 0
    num_kills: int = 0
    num_unjudged: int = 0
    num_chats: int = 0
    longest: int = 0
    versions: set[int] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed_pushes: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        """Requests and chats that are over."""
        return self.num_replies + self.num_chats + self.refused.total()

    def figures(self) -> str:
        """The run in words."""
        return (
            f"{self.num_replies} replies and {self.num_chats} chats of {self.num_tokens} tokens, "
            f"the longest of {self.longest}; {self.num_pushes} pushes "
            f"({self.failed_pushes.total()} more failed), {self.num_kills} kills, "
            f"{self.num_seams} seams, {len(self.versions)} versions; kinds: "
            f"{counted(self.kinds)}; {self.num_unjudged} not judged; "
            f"refused: {counted(self.refused)}; {len(self.differences)} differences"
        )


def engines_of(kind: str, logprobs: Any, *, in_order: bool = False) -> Engines:
    """How engines of this kind compute, as read in SGLang 0.5.23 and vLLM 0.32.0.

    Args:
        in_order: it schedules nothing ahead.
    """
    end = make_byte_tokenizer().eos_token_id
    is_vllm = kind_of(kind).dialect == "vllm"
    return Engines(
        logprobs,
        counts_prompt=is_vllm,
        counts_all=kind != "sglang" or in_order,
        holds_stops=kind != "sglang",
        cuts_in_turn=is_vllm,
        end=end,
    )


def drawn(random: Random, most: int, *, has_seeds: bool = True) -> SamplingParams:
    """Random parameters; about every third request has something rare."""
    wanted: dict[str, Any] = {"max_new_tokens": int(math.exp(random.uniform(0, math.log(most))))}
    wanted["temperature"] = random.choice((0.0, 0.3, 1.0, 1.0, 1.0, 1.7))
    for name, values in (
        ("top_p", (0.9, 0.5)),
        ("top_k", (5,)),
        ("min_p", (0.2,)),
    ):
        if random.random() < 0.15:
            wanted[name] = random.choice(values)
    for name, values in (
        ("repetition_penalty", (1.2,)),
        ("presence_penalty", (1.5,)),
        ("frequency_penalty", (0.5,)),
        ("logit_bias", ({40: 2.0, 51: -3.0},)),
        ("stop", (("ab",), ("x", "}~"))),
        ("stop_token_ids", ((61,),)),
        ("sampling_seed", (7,)),
    ):
        if random.random() < 0.06:
            wanted[name] = random.choice(values)
    if not has_seeds:
        wanted.pop("sampling_seed", None)
    if random.random() < 0.1:
        wanted["min_new_tokens"] = random.randint(0, wanted["max_new_tokens"])
    wanted["ignore_eos"] = random.random() < 0.7
    return SamplingParams(**wanted)


def wanted(random: Random, served: int) -> Contract:
    """A random contract; some can be met at once, some later, and some never."""
    field = random.choice(VERSION_FIELDS)
    value = random.randint(0, 2) if field == "max_version_lag" else served + random.randint(-1, 1)
    return contract_of({field: max(0, value)})


def contract_options(contract: Contract) -> dict[str, Any]:
    """What ``policy.generate`` takes for it."""
    values = {field: getattr(contract, field) for field in VERSION_FIELDS}
    return {field: value for field, value in values.items() if value is not None}


def reason_of(error: BaseException) -> str:
    """The kind of a refusal: its text without names and numbers."""
    text = str(error).partition("\n")[0]
    text = re.sub(r"[a-z]+-\d+\b|[0-9a-f]{8,}|https?://\S+", "_", text)
    return re.sub(r"\d+", "N", text)[:150]


class Auditor:
    """One run.

    Args:
        most: tokens of a reply.
        has_experts: some requests want routed experts.
        in_order: see ``engines_of``.
        has_seeds: some requests have a seed, of which vLLM 0.32.0 dies now and then on a CPU.
    """

    def __init__(
        self,
        policy: RealPolicy,
        *,
        seed: int,
        most: int = 2000,
        has_experts: bool = False,
        in_order: bool = False,
        has_seeds: bool = True,
    ) -> None:
        self._has_seeds = has_seeds
        self._policy = policy
        self._random = Random(seed)
        self._most = most
        self._has_experts = has_experts
        tokenizer = make_byte_tokenizer()
        self._truth = Truth(policy.weights_of, tokenizer.decode)
        kinds = {group.kind for group in policy.handle.status().result(30).groups}
        rules = {one.logprobs for one in policy.engines()}
        self._engines = [
            engines_of(kind, rule, in_order=in_order) for kind in kinds for rule in rules
        ]
        self._ends = asyncio.Event()
        self._judging = asyncio.Semaphore(1)
        self.report = Report()

    async def run(
        self, num_replies: int, num_kills: int = 0, every_s: tuple[float, float] = (1, 5)
    ) -> Report:
        """Send so many requests, with pushes and deaths meanwhile.

        Args:
            every_s: between two pushes.
        """
        left = iter(range(num_replies))
        pushing = asyncio.create_task(self._push(every_s))
        killing = asyncio.create_task(self._kill(num_kills, num_replies))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(NUM_AT_ONCE, num_replies)):
                    group.create_task(self._client(left))
        finally:
            self._ends.set()
            await asyncio.gather(pushing, killing)
        return self.report

    async def _client(self, left: Any) -> None:
        for _ in left:
            random = Random(self._random.random())
            if random.random() < 0.1:
                await self._chat(random)
                continue
            prompt = tuple(random.choices(_ALPHABET, k=random.choice((3, 20, 200))))
            # SGLang reports experts at the end only, so a request that wants them starts over.
            experts = self._has_experts and random.random() < 0.2
            most = 100 if experts else self._most
            sampling = drawn(random, most, has_seeds=self._has_seeds)
            served = self._served
            contract = wanted(random, served) if random.random() < 0.25 else NO_CONTRACT
            asked = Asked(prompt, sampling, contract, served, experts)
            await self._ask(asked, is_streamed=random.random() < 0.5)

    @property
    def _served(self) -> int:
        return self._policy.handle.weight_version or 0

    async def _ask(self, asked: Asked, *, is_streamed: bool) -> None:
        report = self.report
        handle, more = self._policy.handle, contract_options(asked.contract)
        more |= {"routed_experts": True} if asked.has_experts else {}
        reply: GenerateReply | None = None
        try:
            async with asyncio.timeout(SILENT_S):
                if is_streamed:
                    async for part in handle.stream(list(asked.prompt), asked.sampling, **more):
                        reply = part
                else:
                    reply = await handle.generate(list(asked.prompt), asked.sampling, **more)
        except GenerationFailed as error:
            report.refused[reason_of(error)] += 1
            return
        except TimeoutError:
            report.differences.append(f"no reply within {SILENT_S} s: {asked}")
            return
        assert reply is not None
        assert reply.finish_reason is not None
        if reply.finish_reason.kind == "abort" and (why := reply.finish_reason.message):
            report.refused[f"abort: {reason_of(Exception(why))}"] += 1
            return
        async with self._judging:
            wrong = await asyncio.to_thread(self._judge, asked, reply)
        report.num_replies += 1
        report.num_tokens += len(reply.output_ids)
        report.longest = max(report.longest, len(reply.output_ids))
        report.num_seams += reply.num_failovers
        report.versions |= {int(span.version) for span in reply.weight_versions}
        report.kinds[str(reply.logprob_kind)] += 1
        report.num_unjudged += not any(is_judged(asked.sampling, one) for one in self._engines)
        if wrong:
            spans = [(one.version, one.start, one.end) for one in reply.weight_versions]
            how = "stream" if is_streamed else "whole"
            report.differences.append(
                f"{'; '.join(wrong)} | {how}, {asked.sampling.to_wire()}, {len(asked.prompt)} "
                f"prompt tokens, spans {spans}, {reply.num_failovers} failovers, by "
                f"{reply.engine_id or 'several'}"
            )

    async def _chat(self, random: Random) -> None:
        """A conversation of some turns; each is a request."""
        report, sampling = self.report, SamplingParams(temperature=random.choice((0.0, 0.7, 1.0)))
        body = {"temperature": sampling.temperature, "max_tokens": random.randint(1, 200)}
        history: list[Any] = []
        async with self._policy.handle.session() as session:
            client = openai.AsyncOpenAI(
                base_url=session.base_url, api_key=session.api_key, timeout=SILENT_S, max_retries=0
            )
            async with client:
                for turn in range(random.randint(1, 3)):
                    history.append({"role": "user", "content": f"turn {turn} {random.random()}"})
                    try:
                        reply = await client.chat.completions.create(
                            messages=history, model="policy", **body
                        )
                    except openai.APIError as error:
                        report.refused[f"chat: {reason_of(error)}"] += 1
                        break
                    history.append(reply.choices[0].message)
            samples = await session.samples()
        async with self._judging:
            wrong = await asyncio.to_thread(self._judge_samples, sampling, samples)
        report.num_chats += 1
        report.num_tokens += sum(sum(sample.mask) for sample in samples)
        report.differences += [f"{line} | chat of {len(history)} messages" for line in wrong]

    def _judge_samples(self, sampling: SamplingParams, samples: list[Sample]) -> list[str]:
        found = [
            [
                line
                for sample in samples
                for line in self._truth.differences_of_sample(sampling, sample, engines)
            ]
            for engines in self._engines
        ]
        return min(found, key=len)

    def _judge(self, asked: Asked, reply: GenerateReply) -> list[str]:
        found = [self._truth.differences(asked, reply, engines) for engines in self._engines]
        return min(found, key=len)

    async def _push(self, every_s: tuple[float, float]) -> None:
        while not await self._ended_within(self._random.uniform(*every_s)):
            try:
                async with asyncio.timeout(2 * SILENT_S):
                    await self._policy.handle.push(self._policy.next_tensors())
            except RolloutError as error:  # the death of a group's only engine: a trainer retries
                self.report.failed_pushes[reason_of(error)] += 1
            else:
                self.report.num_pushes += 1

    async def _kill(self, num_kills: int, num_replies: int) -> None:
        """End an engine behind each share of the requests, while another one serves."""
        report = self.report
        while report.num_kills < num_kills:
            if await self._ended_within(self._random.uniform(0.1, 0.5)):
                return
            num_ended = report.num_ended
            if num_ended < num_replies * (report.num_kills + 1) / (num_kills + 1):
                continue
            alive = [
                one
                for one in (await asyncio.to_thread(self._policy.engines))
                if one.state == BackendState.SERVING and one.pid and not one.fence_reason
            ]
            if len(alive) < 2:
                continue
            pid = self._random.choice(alive).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            self.report.num_kills += 1

    async def _ended_within(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._ends.wait()
        except TimeoutError:
            return False
        return True
