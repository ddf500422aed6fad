"""The log-prob check: compares engines' log-probs of fixed prompts (canaries).

Always true: an engine is queried only while it generates: after its ``continue`` and before the
gate opens, or before it joins its group.  The caller fences an engine with wrong log-probs.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from engines.protocol import SamplingParams, WorkerType
from engines.protocol.errors import EngineRejected
from rollout.config import LifecycleConfig
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.state import EngineState
from rollout.core.errors import LifecycleError, WeightMismatch
from rollout.core.fanout import EngineReply, fan_out
from rollout.observability.timeline.recorder import current_span
from rollout.rules.canary import (
    CanaryLogprobs,
    EngineLogprobs,
    Logprobs,
    Prompt,
    find_logprob_mismatches,
    prompts_for,
)
from rollout.rules.fingerprint_check import Verification
from rollout.weights.format.checkpoint_config import read_checkpoint_config, vocabulary_of

logger = logging.getLogger(__name__)

AdapterLogprobs = dict[str, CanaryLogprobs]
"""Log-probs by adapter; those of the model itself under the empty name."""
RID_PREFIX = "canary-"
_NO_TOKENS = SamplingParams(max_new_tokens=0, temperature=0.0)


class LogprobCheck:
    """The log-prob check of one group.

    Attributes:
        prompts: the fixed prompts; empty if the check is disabled or impossible.
        refused_version: weight version that no engine has passed with, and that one failed with;
            None for none.  No restarted engine is given it.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._tolerance = settings.lifecycle.canary_tolerance
        self._is_wanted = settings.lifecycle.verify_by != "version"
        self._warned_of: set[str] = set()
        self.refused_version: int | None = None
        # Prefill and decode workers answer only in pairs, and encoders not at all.
        has_logprobs = settings.group.worker_type is WorkerType.REGULAR
        self.prompts: tuple[Prompt, ...] = ()
        if has_logprobs:
            self.prompts = prompts_of(settings.lifecycle, settings.model_path)

    def is_only_check_for(self, member: EngineState) -> bool:
        """Whether some of this engine's weights can be verified only by log-probs."""
        has_fingerprints = member.has_all_fingerprints and not member.why_adapters_unknown
        return bool(self.prompts) and not has_fingerprints

    def require(self, member: EngineState, why_inconclusive: str) -> None:
        """Require the check of an engine whose fingerprints are inconclusive."""
        if self.prompts:
            member.needs_logprob_check = True
        elif self._is_wanted and member.engine_id not in self._warned_of:
            self._warned_of.add(member.engine_id)
            logger.warning(
                "engine %s: verified by version only: %s, and the log-prob check is disabled or "
                "not possible",
                member.engine_id,
                why_inconclusive,
            )

    def any_pending(self, members: Iterable[EngineState]) -> bool:
        """Whether any engine needs the check.  Then all run it, as references for each other."""
        return any(member.needs_logprob_check and not member.is_stale for member in members)

    async def collect(self, member: EngineState) -> Verification:
        """Its log-probs, for ``verify_replies``."""
        verification = Verification("canary", canaries=await self.query(member))
        if (span := current_span()) is not None:
            span.verified_by = verification.by
        return verification

    async def query(self, member: EngineState) -> AdapterLogprobs:
        """Its log-probs of all prompts, without and with each of its adapters.

        Raises:
            LifecycleError: the reply has no log-probs.
        """
        adapters = ("", *member.adapters)
        return {adapter: await self._query_adapter(member, adapter) for adapter in adapters}

    async def _query_adapter(self, member: EngineState, adapter: str) -> CanaryLogprobs:
        values = [
            await self._query_prompt(member, index, adapter) for index in range(len(self.prompts))
        ]
        return CanaryLogprobs(f"{adapter} version {member.weight_version}", tuple(values))

    async def verify_adapter(
        self,
        members: Sequence[EngineState],
        adapter: str,
        expected: Logprobs,
        budget_s: float,
    ) -> dict[str, EngineReply[Verification]]:
        """Compare the log-probs of engines that have loaded an adapter.

        Args:
            expected: those of the trainer's model; empty if it has given none.

        Returns:
            Replies by engine id; those with other log-probs are failures.
        """
        answers = await fan_out(
            {one.engine_id: partial(self._query_adapter, one, adapter) for one in members},
            operation="canary",
            budget_s=budget_s,
        )
        known = {one.engine_id: one for one in members}
        now = {name: {adapter: one.value} for name, one in answers.items() if one.value}
        wanted = {adapter: expected} if expected else {}
        compared = {name: EngineLogprobs(one, expected=wanted) for name, one in now.items()}
        wrong = find_logprob_mismatches(compared, self._tolerance)
        verified: dict[str, EngineReply[Verification]] = {}
        for name, answer in answers.items():
            verified[name] = EngineReply(answer.elapsed_s, Verification("canary"), answer.failure)
            if name in wrong:
                verified[name] = verified[name].as_failure("canary", name, wrong[name])
            elif name in now:
                known[name].canary = {**known[name].canary, **now[name]}
        return verified

    async def _query_prompt(
        self, member: EngineState, index: int, adapter: str
    ) -> tuple[float, ...]:
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
                f"it refuses canary prompt {index}: {error}; if it cannot return log-probs of "
                "prompts, set lifecycle.verify_by to version"
            ) from error
        values = reply.input_logprobs
        if values is None or len(values) != len(prompt) - 1:
            reason = reply.finish_reason
            detail = f": {reason.message}" if reason is not None and reason.message else ""
            raise LifecycleError(
                f"it returned {len(values or ())} log-probs of canary prompt {index}, which has "
                f"{len(prompt)} tokens{detail}"
            )
        return values

    def verify_replies(
        self, answers: dict[str, EngineReply[Any]], members: Iterable[EngineState]
    ) -> dict[str, EngineReply[Any]]:
        """Mark the replies of engines with wrong log-probs as failures."""
        engines = {member.engine_id: member for member in members}
        logprobs = {
            engine_id: reply.value.canaries
            for engine_id, reply in answers.items()
            if reply.failure is None and reply.value is not None
        }
        compared = {
            engine_id: EngineLogprobs(
                now,
                engines[engine_id].canary,
                not engines[engine_id].needs_logprob_check,
                engines[engine_id].expected,
            )
            for engine_id, now in logprobs.items()
        }
        wrong = find_logprob_mismatches(compared, self._tolerance)
        has_passed = any(one.has_passed() for one in compared.values())
        if wrong and wrong.keys() == compared.keys() and not has_passed:
            self.refused_version = engines[next(iter(wrong))].weight_version
        for engine_id, now in logprobs.items():
            if engine_id in wrong:
                answers[engine_id] = answers[engine_id].as_failure(
                    "canary", engine_id, wrong[engine_id]
                )
            else:
                record_logprobs(engines[engine_id], now)
        return answers

    async def why_mismatch(self, member: EngineState, peers: Sequence[EngineState]) -> str:
        """Check one restarted engine: why its log-probs are wrong; empty if they are right.

        Args:
            peers: engines verified at the same version.
        """
        now = await self.query(member)
        by_engine = {
            peer.engine_id: EngineLogprobs(peer.canary, is_verified=True)
            for peer in peers
            if peer.canary
        }
        by_engine[member.engine_id] = EngineLogprobs(now, member.canary, expected=member.expected)
        why = find_logprob_mismatches(by_engine, self._tolerance).get(member.engine_id, "")
        if not why:
            record_logprobs(member, now)
        return why

    async def why_changed(self, member: EngineState) -> str:
        """Why an engine does not compute what it did at its last check with the same weights; empty
        if it does, or if nothing is known to compare with.

        It answers requests meanwhile, so only a difference that shows twice counts.
        """
        why = ""
        for _ in range(2):
            now = await self.query(member) if self.prompts else {}
            answers = EngineLogprobs(now, member.canary)
            if not answers.of_same_weights():
                return ""
            found = find_logprob_mismatches({member.engine_id: answers}, self._tolerance)
            why = found.get(member.engine_id, "")
            if not why:
                return ""
        return why


def record_logprobs(member: EngineState, logprobs: AdapterLogprobs) -> None:
    """Record the log-probs of an engine that passed."""
    member.canary = logprobs
    member.needs_logprob_check = False


def check_expected(expected: Logprobs, prompts: Sequence[Prompt]) -> None:
    """Check the number of expected log-probs against the prompts.

    Raises:
        WeightMismatch: the numbers of prompts or tokens differ.
    """
    wanted = [len(prompt) - 1 for prompt in prompts]
    given = [len(values) for values in expected]
    if given != wanted:
        raise WeightMismatch(
            f"expected log-probs of {given} tokens; the canary prompts have {wanted} after the "
            "first (see canary_prompts; none with verify_by: version)"
        )


def prompts_of(lifecycle: LifecycleConfig, model_path: str) -> tuple[Prompt, ...]:
    """The canary prompts for this model; empty if the check is disabled or impossible."""
    if lifecycle.verify_by == "version":
        return ()
    if lifecycle.canary_prompts:
        return lifecycle.canary_prompts
    return prompts_for(vocabulary_of(read_checkpoint_config(model_path)))
