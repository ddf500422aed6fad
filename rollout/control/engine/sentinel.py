"""The sentinel of one group: asks each engine after a push whether it answers from old state.

Always true: an engine gets its prompts only while it generates and has no requests: after its
start, after its ``continue`` and before the gate opens, or before it joins its group.  The caller
fences an engine that answers from old state.  ``stale_answers`` decides.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from engines.protocol import PromptImage, SamplingParams, WorkerType
from engines.protocol.errors import EngineRejected
from engines.protocol.old_state import namespace
from engines.protocol.plain_text import describe
from rollout.config import Drain, WeightUpdate
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.stale_answers import (
    NUM_ASKED,
    Answer,
    Answers,
    find_stale,
    prompt_for,
    without_numbers,
)
from rollout.control.engine.state import EngineState
from rollout.core.errors import LifecycleError
from rollout.observability.timeline.recorder import engine_span
from rollout.weights.format.checkpoint_config import read_checkpoint_config, text_config_of

logger = logging.getLogger(__name__)

RID_PREFIX = "sentinel-"
# By whether the engine has log-probs of the prompt for it; else those of new tokens.  The embedded
# engine caches a prompt only with its second token.
_SAMPLING = {
    has_prompt: SamplingParams(max_new_tokens=0 if has_prompt else 2, temperature=0.0)
    for has_prompt in (True, False)
}
# One gray image of 56 x 56 pixels, as PNG.
_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAADgAAAA4CAAAAACN7WTCAAAAJElEQVR42u3LMQ0AAAwDoEqv9FpY"
    "dsNP+hRRFEVRFEVRFMWbAclXIFtsqkldAAAAAElFTkSuQmCC"
)

# Models for which SGLang 0.5.23 names images by their files: it ends at another name for one.
_NAMED_BY_FILE = ("qwen3_vl", "qwen3_vl_moe")


class Sentinel:
    """Asks the engines of one group.

    Attributes:
        prompt: token ids; empty if the sentinel is disabled or impossible.
        image_tokens: those for one image; empty if the model sees none, or in another form.
    """

    def __init__(self, settings: GroupSettings) -> None:
        self._settings = settings
        self._run = secrets.token_hex(8)
        self.prompt: tuple[int, ...] = ()
        self.image_tokens: tuple[int, ...] = ()
        is_pushed = settings.update is not WeightUpdate.FROZEN
        # Prefill and decode workers answer only in pairs, and encoders not at all.
        has_logprobs = settings.group.worker_type is WorkerType.REGULAR
        if settings.lifecycle.sentinel and is_pushed and has_logprobs:
            config = read_checkpoint_config(settings.model_path)
            text = text_config_of(config)
            size, length = _number(text, "vocab_size"), _number(text, "max_position_embeddings")
            self.prompt = prompt_for(size, length, settings.lifecycle.canary_prompts)
            self.image_tokens = _image_tokens(config)

    async def plant(self, member: EngineState) -> None:
        """Put the prompt into every cache of an engine that has just started.

        An engine that refuses it is not asked again, with a warning.
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
                return
            member.sees_images = False

    async def check(self, member: EngineState) -> None:
        """Ask whether an engine answers from old state, if its weights are others than before.

        Raises:
            LifecycleError: it does, or its log-probs are not numbers.
        """
        before = member.sentinel
        if before is None or before.made_of == _made_of(member):
            return
        now = await self._ask(member, before.process)
        if prompt := without_numbers(now):
            raise LifecycleError(
                f"with {now.made_of} it computes log-probs of the sentinel's {prompt} prompt that "
                "are not finite numbers; push weights without NaN (lifecycle.sentinel)"
            )
        member.sentinel = await self._checked(member, now, before)

    async def _checked(self, member: EngineState, now: Answers, before: Answers) -> Answers:
        """These answers, or others where one attempt does not decide; raises if they are stale."""
        budgets = self._settings.lifecycle
        find = partial(find_stale, before=before, tolerance=budgets.canary_tolerance)
        # Requests that were retracted are in the same batches.
        is_exact = before.is_exact and budgets.drain is not Drain.RETRACT
        stale = find(now, is_exact=is_exact)
        if stale is not None and not stale.is_certain:
            first, now = now, await self._ask(member, before.process, attempt=2)
            stale = find(now, is_exact=first.fresh == now.fresh)
        if stale is not None:
            raise LifecycleError(
                f"it answers from state that older weights computed: {stale.why} "
                "(lifecycle.sentinel)"
            )
        return now

    async def _ask(self, member: EngineState, process: str, attempt: int = 1) -> Answers:
        # With the same name a second attempt would get the first one's prefix from the cache.
        name = f"{namespace(self._run, member.weight_version)}:{process}-{attempt}"
        prompts: dict[str, PromptImage | None] = {"text": None}
        if member.sees_images:
            prompts["image"] = _image(member, self._run)
        through, fresh = {}, {}
        with engine_span(member.engine_id, "sentinel", 0.0):
            for prompt, image in prompts.items():
                # Each by its own name: they begin alike.
                through[prompt] = await self._answer(member, f"{name}:{prompt}", image)
                unknown = secrets.token_hex(8)
                other = image and _image(member, unknown)
                fresh[prompt] = await self._answer(member, f"{self._run}:{unknown}", other)
        return Answers(through, fresh, _made_of(member), process, member.record)

    async def _answer(self, member: EngineState, key: str, image: PromptImage | None) -> Answer:
        start = len(self.prompt) - NUM_ASKED
        seen = () if image is None else self.image_tokens
        has_prompt = self._settings.group.engine.of_kind.has_part_of_prompt_logprobs
        reply = await member.engine.generate(
            input_ids=(*self.prompt[:start], *seen, *self.prompt[start:]),
            sampling_params=_SAMPLING[has_prompt],
            rid=f"{RID_PREFIX}{secrets.token_hex(4)}",
            return_logprob=True,
            logprob_start_len=start if has_prompt else None,
            extra_key=key,
            image=image,
        )
        logprobs = (*(reply.input_logprobs or ()), *(reply.output_logprobs or ()))
        return Answer(logprobs, reply.cached_tokens)


def _image(member: EngineState, name: str) -> PromptImage:
    image = PromptImage(_IMAGE, name)
    return image.named_by_file() if member.names_images_by_file else image


def _made_of(member: EngineState) -> str:
    return f"version {member.weight_version}"


def _number(config: Mapping[str, Any], name: str) -> int:
    return config[name] if isinstance(config.get(name), int) else 0


def _image_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Begin, placeholder and end of one image, as far as the model's configuration names them."""
    names = (
        ("vision_start_token_id", "boi_token_index", "boi_token_id"),
        ("image_token_id", "image_token_index"),
        ("vision_end_token_id", "eoi_token_index", "eoi_token_id"),
    )
    found = [
        next((config[name] for name in place if isinstance(config.get(name), int)), None)
        for place in names
    ]
    return tuple(one for one in found if one is not None) if found[1] is not None else ()
