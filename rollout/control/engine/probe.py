"""The probe of one group: asks its engines fixed prompts, through their caches and past them.

It is the log-prob check (are the weights right?) and the sentinel (does an engine answer from what
older weights computed?); ``rules/probe.py`` decides.  Always true: an engine gets prompts only
while it generates: after its start, after its ``continue_generation`` and before the gate opens,
or before it joins its group.  The caller fences an engine that fails.  One answer past the caches
serves both.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from engines.protocol import PromptImage, SamplingParams, WorkerType
from engines.protocol.errors import EngineRejected
from engines.protocol.old_state import namespace
from engines.protocol.plain_text import describe
from rollout.config import Drain, VerifyConfig, WeightUpdate
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.state import EngineState
from rollout.core.errors import LifecycleError, WeightMismatch
from rollout.core.fanout import EngineReply, fan_out
from rollout.observability.timeline.recorder import current_span, engine_span
from rollout.rules.fingerprint_check import Verification
from rollout.rules.probe import (
    NUM_SHORT,
    Answer,
    Answers,
    CanaryLogprobs,
    EngineLogprobs,
    Logprobs,
    Prompt,
    find_logprob_mismatches,
    find_stale,
    first_asked,
    prompt_for,
)
from rollout.weights.format.checkpoint_config import (
    context_length_of,
    image_tokens_of,
    read_checkpoint_config,
    vocabulary_of,
)

logger = logging.getLogger(__name__)

RID_PREFIX = "probe-"
# Of an engine that has no log-probs of a prompt through its caches.  The embedded engine caches a
# prompt only with its second token.
_NUM_NEW = 2
# One gray image of 56 x 56 pixels, as PNG.
_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAAAAACN7WTCAAAAJElEQVR42u3LMQ0AAAwDoEqv9FpY"
    "dsNP+hRRFEVRFEVRFMWbAclXIFtsqkldAAAAAElFTkSuQmCC"
)
# Models for which SGLang 0.5.23 names images by their files: it ends at another name for one.
_NAMED_BY_FILE = ("qwen3_vl", "qwen3_vl_moe")


class Probe:
    """Asks the engines of one group.

    Attributes:
        prompts: those of the log-prob check, or empty if it is disabled or impossible.
        prompt: the one of the sentinel, or empty if that is disabled or impossible.
        image_tokens: those for one image, or empty if the model sees none, or in another form.
        refused_version: weight version that no engine has passed with, and that one failed with, or
            None for none.  No restarted engine is given it.
    """

    def __init__(self, settings: GroupSettings) -> None:
        verify, model_path = settings.verify, settings.model_path
        self._settings = settings
        self._run = secrets.token_hex(8)
        self._is_wanted = verify.by != "version"
        self._warned_of: set[str] = set()
        self.refused_version: int | None = None
        self.prompts: tuple[Prompt, ...] = ()
        self.prompt: Prompt = ()
        self.image_tokens: tuple[int, ...] = ()
        # Through its caches an engine has log-probs of the prompt's end, or of new tokens alone.
        self._has_prompt = settings.group.engine.of_kind.has_part_of_prompt_logprobs
        self._start = 0
        if settings.group.worker_type is not WorkerType.REGULAR:
            return  # prefill and decode workers answer only in pairs, and encoders not at all
        self.prompts = prompts_of(verify, model_path)
        prompt = _prompt_of(verify, model_path)
        if verify.sentinel and settings.update is not WeightUpdate.FROZEN and first_asked(prompt):
            self.prompt = prompt
            self._start = first_asked(prompt) if self.prompts == (prompt,) else 0
            self.image_tokens = image_tokens_of(read_checkpoint_config(model_path))

    # -- of engines that generate again -------------------------------------------------------

    async def plant(self, member: EngineState) -> None:
        """Put the sentinel's prompt into every cache of an engine that has just started.

        An engine that refuses it gets it no more, with a warning.
        """
        if self.prompt and self.image_tokens:
            model = await member.engine.model_info()
            member.sees_images = bool(model.raw.get("has_image_understanding"))
            member.names_images_by_file = model.raw.get("model_type") in _NAMED_BY_FILE
        while self.prompt:
            try:
                member.sentinel = await self._ask(member, secrets.token_hex(4))
                return
            except EngineRejected as error:
                what = "shows it no image" if member.sees_images else "does not ask it"
                logger.warning(
                    "engine %s: the sentinel %s: %s", member.engine_id, what, describe(error)
                )
            if not member.sees_images:
                member.refuses_long_prompts = True
                return
            member.sees_images = False

    async def check(self, member: EngineState, *, with_logprobs: bool) -> Verification | None:
        """Ask an engine whose weights are others than before whether it answers from old state.

        Returns:
            ``with_logprobs``: its log-probs, for ``verify_replies``.

        Raises:
            LifecycleError: it does, or its log-probs are not numbers; or it returned none.
        """
        fresh = await self._check_caches(member, with_logprobs=with_logprobs)
        if not with_logprobs:
            return None
        verification = Verification("canary", canaries=await self.logprobs(member, fresh))
        if (span := current_span()) is not None:
            span.verified_by = verification.by
        return verification

    async def why_wrong(self, member: EngineState, peers: Sequence[EngineState]) -> str:
        """Why one restarted engine does not answer as its weights should.

        Args:
            peers: engines verified at the same version.
        """
        with_logprobs = member.needs_logprob_check
        try:
            fresh = await self._check_caches(member, with_logprobs=with_logprobs)
        except LifecycleError as error:
            return str(error)
        if not with_logprobs:
            return ""
        by_engine = {
            peer.engine_id: EngineLogprobs(peer.canary, is_verified=True)
            for peer in peers
            if peer.canary
        }
        now = await self.logprobs(member, fresh)
        by_engine[member.engine_id] = EngineLogprobs(now, member.canary, expected=member.expected)
        why = self._mismatches(by_engine).get(member.engine_id, "")
        if not why:
            record_logprobs(member, now)
        return why

    # -- the sentinel -------------------------------------------------------------------------

    async def _check_caches(self, member: EngineState, *, with_logprobs: bool) -> Answer | None:
        """See ``check``.

        Returns:
            The answer past the caches, where it is one to the log-prob check too.
        """
        before = member.sentinel
        if before is None or before.made_of == _made_of(member):
            return None
        is_shared = with_logprobs and self._start > 0
        ask = partial(self._ask, member, before.process, with_prompt=is_shared)
        now = await ask()
        if prompt := now.without_numbers():
            raise LifecycleError(
                f"with {now.made_of} it computes log-probs of the sentinel's {prompt} prompt "
                "that are not finite numbers; push weights without NaN (verify.sentinel)"
            )
        tolerance = self._settings.verify.canary_tolerance
        judge = partial(find_stale, before=before, tolerance=tolerance)
        # Requests that were retracted are in the same batches.
        retracts = self._settings.lifecycle.drain is Drain.RETRACT
        stale = judge(now, is_exact=before.is_exact and not retracts)
        if stale is not None and not stale.is_certain:
            first, now = now, await ask(attempt=2)
            stale = judge(now, is_exact=first.fresh == now.fresh)
        if stale is not None:
            raise LifecycleError(
                f"it answers from state that older weights computed: {stale.why} (verify.sentinel)"
            )
        member.sentinel = now
        return now.text if is_shared else None

    async def _ask(
        self, member: EngineState, process: str, attempt: int = 1, *, with_prompt: bool = False
    ) -> Answers:
        # With the same name a second attempt would get the first one's prefix from the cache.
        name = f"{namespace(self._run, member.weight_version)}:{process}-{attempt}"
        start, num_new = first_asked(self.prompt), 0 if self._has_prompt else _NUM_NEW
        asked = start if self._has_prompt else None
        ask = partial(self._answer, member, start=asked, num_new=num_new)
        past = partial(ask, self.prompt)
        if with_prompt:
            past = partial(self._canary, member, self.prompt, 0, start=start, num_new=num_new)
        with engine_span(member.engine_id, "sentinel", 0.0):
            if not member.sees_images:
                through = await ask(self.prompt, name)
                text = fresh = await past()
            else:
                shown = (*self.prompt[:start], *self.image_tokens, *self.prompt[start:])
                through = await ask(shown, name, image=_image(member, self._run))
                fresh = await ask(shown, image=_image(member, secrets.token_hex(8)))
                text = await past()
        return Answers(through, fresh, text, _made_of(member), process, member.record)

    async def _answer(
        self,
        member: EngineState,
        prompt: Prompt,
        key: str = "",
        *,
        start: int | None,
        num_new: int = 0,
        image: PromptImage | None = None,
        adapter: str = "",
    ) -> Answer:
        """Ask for the log-probs of a prompt after the token at ``start``, and of new tokens.

        Args:
            key: names the prompt's prefixes in the caches, or empty for a name that none has.
            start: None for those of new tokens alone.
        """
        reply = await member.engine.generate(
            input_ids=prompt,
            sampling_params=SamplingParams(max_new_tokens=num_new, temperature=0.0),
            rid=f"{RID_PREFIX}{secrets.token_hex(4)}",
            return_logprob=True,
            logprob_start_len=start,
            extra_key=key or f"{self._run}:{secrets.token_hex(8)}",
            image=image,
            lora_path=adapter or None,
        )
        of_prompt, reason = reply.input_logprobs, reply.finish_reason
        return Answer(
            (*((self._has_prompt and of_prompt) or ()), *(reply.output_logprobs or ())),
            reply.cached_tokens,
            of_prompt or (),
            reason.message if reason is not None else "",
        )

    # -- the log-prob check -------------------------------------------------------------------

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

    async def logprobs(
        self, member: EngineState, fresh: Answer | None = None
    ) -> dict[str, CanaryLogprobs]:
        """Its log-probs of all prompts, without an adapter (the empty name) and with each it has.

        Args:
            fresh: its answer just now to the only prompt, without an adapter.

        Raises:
            LifecycleError: the reply has no log-probs.
        """
        logprobs = {"": await self._logprobs_under(member, "", fresh)}
        for adapter in member.adapters:
            logprobs[adapter] = await self._logprobs_under(member, adapter)
        return logprobs

    async def _logprobs_under(
        self, member: EngineState, adapter: str, fresh: Answer | None = None
    ) -> CanaryLogprobs:
        start = 0 if member.refuses_long_prompts else self._start
        is_whole = start or self._settings.verify.canary_prompts
        end = None if is_whole else NUM_SHORT  # the beginning has the same log-probs alone
        values = []
        for index, prompt in enumerate(self.prompts):
            ask = partial(self._canary, member, prompt[:end], index, start=start, adapter=adapter)
            values.append((fresh or await ask()).of_prompt)
        return CanaryLogprobs(f"{adapter} {_made_of(member)}", tuple(values), start)

    async def _canary(
        self, member: EngineState, prompt: Prompt, index: int, *, start: int, **more: Any
    ) -> Answer:
        """An answer with log-probs of a prompt, past the caches; raises if it has none."""
        try:
            answer = await self._answer(member, prompt, start=start, **more)
        except EngineRejected as error:
            raise LifecycleError(
                f"it refuses canary prompt {index}: {error}; if it cannot return log-probs of "
                "prompts, set verify.by to version"
            ) from error
        if len(answer.of_prompt) != len(prompt) - 1 - start:
            raise LifecycleError(
                f"it returned {len(answer.of_prompt)} log-probs of canary prompt {index}, "
                f"which has {len(prompt)} tokens" + (answer.why and f": {answer.why}")
            )
        return answer

    async def verify_adapter(
        self,
        members: Sequence[EngineState],
        adapter: str,
        expected: Logprobs,
        budget_s: float,
    ) -> dict[str, EngineReply[Verification]]:
        """Compare the log-probs of engines that have loaded an adapter.

        Args:
            expected: those of the trainer's model, or empty if it has given none.

        Returns:
            Replies by engine id; those with other log-probs are failures.
        """

        async def ask(member: EngineState) -> Verification:
            return Verification(
                "canary", canaries={adapter: await self._logprobs_under(member, adapter)}
            )

        engines = {member.engine_id: member for member in members}
        answers = await fan_out(
            {name: partial(ask, member) for name, member in engines.items()},
            operation="canary",
            budget_s=budget_s,
        )
        wanted = {adapter: expected} if expected else {}
        compared = {
            name: EngineLogprobs(reply.value.canaries, expected=wanted)
            for name, reply in answers.items()
            if reply.value is not None
        }
        for name in self._mark(answers, compared):
            engines[name].canary |= compared[name].now
        return answers

    def verify_replies(
        self, answers: dict[str, EngineReply[Any]], members: Iterable[EngineState]
    ) -> dict[str, EngineReply[Any]]:
        """Mark the replies of engines with wrong log-probs as failures."""
        engines = {member.engine_id: member for member in members}
        compared = {
            name: EngineLogprobs(
                reply.value.canaries,
                engines[name].canary,
                not engines[name].needs_logprob_check,
                engines[name].expected,
            )
            for name, reply in answers.items()
            if reply.failure is None and reply.value is not None
        }
        passed = self._mark(answers, compared)
        has_passed = any(logprobs.has_passed() for logprobs in compared.values())
        if compared and not passed and not has_passed:
            self.refused_version = engines[next(iter(compared))].weight_version
        for name in passed:
            record_logprobs(engines[name], compared[name].now)
        return answers

    def _mark(
        self, answers: dict[str, EngineReply[Any]], compared: Mapping[str, EngineLogprobs]
    ) -> list[str]:
        """Mark the replies of engines with wrong log-probs; returns the engines that pass."""
        wrong = self._mismatches(compared)
        for name, why in wrong.items():
            answers[name] = answers[name].as_failure("canary", name, why)
        return [name for name in compared if name not in wrong]

    async def why_changed(self, member: EngineState) -> str:
        """Why an engine does not compute what it did at its last check with the same weights, or
        empty if it does, or if nothing is known to compare with.

        It answers requests meanwhile, so only a difference that shows twice counts.
        """
        why = ""
        for _ in range(2):
            compared = EngineLogprobs(
                await self.logprobs(member) if self.prompts else {}, member.canary
            )
            if not compared.of_same_weights():
                return ""
            why = self._mismatches({member.engine_id: compared}).get(member.engine_id, "")
            if not why:
                return ""
        return why

    def _mismatches(self, engines: Mapping[str, EngineLogprobs]) -> dict[str, str]:
        return find_logprob_mismatches(engines, self._settings.verify.canary_tolerance)


def _image(member: EngineState, name: str) -> PromptImage:
    image = PromptImage(_IMAGE, name)
    return image.named_by_file() if member.names_images_by_file else image


def _made_of(member: EngineState) -> str:
    return f"version {member.weight_version}"


def record_logprobs(member: EngineState, logprobs: Mapping[str, CanaryLogprobs]) -> None:
    """Record the log-probs of an engine that passed."""
    member.canary = dict(logprobs)
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
            "first (see canary_prompts; none with verify.by: version)"
        )


def prompts_of(verify: VerifyConfig, model_path: str) -> tuple[Prompt, ...]:
    """The prompts of the log-prob check for this model, or empty if it is disabled or
    impossible."""
    if verify.by == "version":
        return ()
    prompt = _prompt_of(verify, model_path)
    return verify.canary_prompts or ((prompt,) if prompt else ())


def _prompt_of(verify: VerifyConfig, model_path: str) -> Prompt:
    config = read_checkpoint_config(model_path)
    return prompt_for(vocabulary_of(config), context_length_of(config), verify.canary_prompts)
