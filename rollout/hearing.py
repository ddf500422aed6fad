"""Asks engines for their canaries, and keeps what those told that are proved.

Always true: an engine is asked only while it generates, so between its ``continue`` and the
opening of the gate, or before it is one of its group's; who does not answer as it should is fenced
by whoever asked.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from engines.errors import EngineRejected
from engines.protocol import SamplingParams, WorkerType
from rollout.canary import Canary, Heard, Logprobs, Prompt, judge_canaries, prompts_for
from rollout.config import LifecycleConfig
from rollout.errors import LifecycleError, WeightMismatch
from rollout.fanout import Answer
from rollout.group_settings import GroupSettings
from rollout.member import Member
from rollout.timeline.recorder import current
from rollout.verification import Proof, tells_of

logger = logging.getLogger(__name__)

Canaries = dict[str, Canary]
"""By adapter; the model's own under the empty name."""
RID_PREFIX = "canary-"
_NO_TOKENS = SamplingParams(max_new_tokens=0, temperature=0.0)


class Hearing:
    """The canaries of one group.

    Attributes:
        prompts: what is asked; empty where nothing can be.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._tolerance = settings.lifecycle.canary_tolerance
        self._is_wanted = settings.lifecycle.verify_by != "version"
        self._warned_of: set[str] = set()
        # Prefill and decode workers answer only in pairs, and encoders not at all.
        can_be_asked = settings.group.worker_type is WorkerType.REGULAR
        self.prompts: tuple[Prompt, ...] = ()
        if can_be_asked:
            self.prompts = prompts_of(settings.lifecycle, settings.model_path)

    def alone_proves(self, member: Member) -> bool:
        """Whether nothing but a canary tells what some of this engine's weights are."""
        is_told = member.has_checker and (
            not member.adapter or (member.record and tells_of(member.adapter, member.record))
        )
        return bool(self.prompts) and not is_told

    def owe(self, member: Member, because: str) -> None:
        """Fingerprints have left open what this engine holds."""
        if self.prompts:
            member.owes_canary = True
        elif self._is_wanted and member.engine_id not in self._warned_of:
            self._warned_of.add(member.engine_id)
            logger.warning(
                "engine %s: only its weight version is proved: %s, and a canary cannot be asked",
                member.engine_id,
                because,
            )

    def is_due(self, members: Iterable[Member]) -> bool:
        """Whether any of these owes one; then all are asked, for the others know the answer."""
        return any(member.owes_canary and not member.is_stale for member in members)

    async def prove(self, member: Member) -> Proof:
        """What it tells, for ``review``."""
        proof = Proof("canary", canaries=await self.ask(member))
        if (span := current()) is not None:
            span.proved_by = proof.by
        return proof

    async def ask(self, member: Member) -> Canaries:
        """What it tells of all prompts, without and with its adapter.

        Raises:
            LifecycleError: it answers without log-probabilities.
        """
        told = {}
        at = f"version {member.weight_version}"
        made_of = {"": at if member.base_version is None else f"base {member.base_version}"}
        if member.adapter:
            made_of[member.adapter] = at
        for adapter, of in made_of.items():
            values = [await self._ask(member, index, adapter) for index in range(len(self.prompts))]
            told[adapter] = Canary(of, tuple(values))
        return told

    async def _ask(self, member: Member, index: int, adapter: str) -> tuple[float, ...]:
        prompt = self.prompts[index]
        try:
            reply = await member.engine.generate(
                input_ids=prompt,
                sampling_params=_NO_TOKENS,
                rid=f"{RID_PREFIX}{secrets.token_hex(4)}",
                return_logprob=True,
                logprob_start_len=0,
                lora_path=adapter or None,
            )
        except EngineRejected as error:
            raise LifecycleError(
                f"it refuses canary prompt {index}: {error}; if it cannot tell log-probabilities "
                "of prompts, set lifecycle.verify_by to version"
            ) from error
        values = reply.input_logprobs
        if values is None or len(values) != len(prompt) - 1:
            reason = reply.finish_reason
            said = f": {reason.message}" if reason is not None and reason.message else ""
            raise LifecycleError(
                f"it told {len(values or ())} log-probabilities of canary prompt {index}, which "
                f"has {len(prompt)} tokens{said}"
            )
        return values

    def review(
        self, answers: dict[str, Answer[Any]], members: Iterable[Member]
    ) -> dict[str, Answer[Any]]:
        """Refuse the answers of engines whose weights are not what they should be."""
        roster = {member.engine_id: member for member in members}
        told = {
            engine_id: one.value.canaries
            for engine_id, one in answers.items()
            if one.failure is None and one.value is not None
        }
        wrong = judge_canaries(
            {engine_id: _heard(roster[engine_id], now) for engine_id, now in told.items()},
            self._tolerance,
        )
        for engine_id, now in told.items():
            if engine_id in wrong:
                answers[engine_id] = answers[engine_id].refused(
                    "canary", engine_id, wrong[engine_id]
                )
            else:
                keep(roster[engine_id], now)
        return answers

    async def why_unlike(self, member: Member, peers: Sequence[Member]) -> str:
        """Ask one that comes back, by itself: why its weights are not proved; empty if they are.

        Args:
            peers: engines that are proved at the same version.
        """
        now = await self.ask(member)
        heard = {
            peer.engine_id: Heard(peer.canary, is_proved=True) for peer in peers if peer.canary
        }
        heard[member.engine_id] = Heard(now, member.canary, expected=member.expected)
        if why := judge_canaries(heard, self._tolerance).get(member.engine_id, ""):
            return why
        keep(member, now)
        return ""


def keep(member: Member, told: Canaries) -> None:
    """It is proved, and this is what it tells."""
    member.canary = told
    member.owes_canary = False


def _heard(member: Member, now: Canaries) -> Heard:
    return Heard(now, member.canary, not member.owes_canary, member.expected)


def check_expected(expected: Logprobs, prompts: Sequence[Prompt]) -> None:
    """Refuse what cannot be what a model told of these prompts.

    Raises:
        WeightMismatch: there are more or fewer of them, or of their tokens.
    """
    wanted = [len(prompt) - 1 for prompt in prompts]
    given = [len(values) for values in expected]
    if given != wanted:
        raise WeightMismatch(
            f"expected log-probabilities of {given} tokens; the canary's prompts have {wanted} "
            "after the first (see canary_prompts; none with verify_by: version)"
        )


def prompts_of(lifecycle: LifecycleConfig, model_path: str) -> tuple[Prompt, ...]:
    """What engines of this model are asked; nothing where no canary is wanted or can be made."""
    if lifecycle.verify_by == "version":
        return ()
    return lifecycle.canary_prompts or _drawn_for(model_path)


def _drawn_for(model_path: str) -> tuple[Prompt, ...]:
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        text_config = config.get("text_config") or {}
        return prompts_for(int(config.get("vocab_size") or text_config.get("vocab_size") or 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return ()
