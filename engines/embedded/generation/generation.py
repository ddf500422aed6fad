"""One completion from its admission to its reply, without tensors or sockets.

Always true: a generation ends exactly once, with a finish reason or with a refusal; only the
generation thread changes it; readers on the event loop may look at any time, since its lists
only grow.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from engines.embedded.core.errors import EngineRefusal
from engines.embedded.generation.sampling_params import Params
from engines.http.reply_check import SAMPLING_MASK

if TYPE_CHECKING:  # it imports torch, which this module does without
    from engines.embedded.weights.lora_adapters import Adapter

StopFinder = Callable[[Sequence[int]], str | None]


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Generation:
    """A prompt, its sampling parameters, and the completion so far.

    Attributes:
        stop_ids: token ids that end it (end-of-sequence and the caller's own).
        early_ids: those that are not drawn before its least length; as in SGLang and vLLM, the end
            of sequence is one of them also where it ends nothing.
        find_stop: finds a stop string in the last tokens, or None where there are none.
        seed: of its random numbers; None takes them from the process's own stream.
        logprob_start_len: first prompt token whose log-probability is returned; -1 for none.
        adapter: the LoRA adapter it runs with, or None for the base model alone.
        cache_key: it uses only prefixes that were cached with this key.
        wants_experts: the experts that computed its tokens are kept.
        routed_experts: of each token that was computed, int32 of shape ``[layers, experts]``.
        wants_masks: the ids that its tokens were drawn from are kept.
        masks: of each token, those ids, or None where nothing was cut.
        input_logprobs: of the prompt's tokens after that one, None where it is NaN.
        spans: pairs (weight version, index of the first token it produced).
        finish_reason: SGLang's object, or None while running.
        refusal: why it has no reply: it was never admitted, or its logits are no numbers.
    """

    rid: str
    prompt_ids: list[int]
    params: Params
    _: KW_ONLY
    stop_ids: frozenset[int] = frozenset()
    early_ids: frozenset[int] = frozenset()
    find_stop: StopFinder | None = None
    seed: int | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    is_streamed: bool = False
    adapter: Adapter | None = None
    cache_key: str = ""
    wants_experts: bool = False
    wants_masks: bool = False
    masks: list[list[int] | None] = field(default_factory=list, init=False)
    input_logprobs: list[float | None] = field(default_factory=list, init=False)
    output_ids: list[int] = field(default_factory=list, init=False)
    routed_experts: list[bytes] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    spans: list[tuple[str, int]] = field(default_factory=list, init=False)
    cached_tokens: int = field(default=0, init=False)
    finish_reason: dict[str, Any] | None = field(default=None, init=False)
    refusal: EngineRefusal | None = field(default=None, init=False)
    changed: asyncio.Future[None] | None = field(default=None, init=False)
    random: Callable[[], float] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.random if self.seed is None else self._seeded
        if not self.return_logprob:
            self.logprob_start_len = -1

    def _seeded(self) -> float:
        """A number that depends on seed and place of the token alone, as in SGLang's deterministic
        sampling: a request that goes on from the tokens so far draws what this one would."""
        place = len(self.prompt_ids) + len(self.output_ids)
        return random.Random(f"{self.seed}/{place}").random()

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.refusal is not None

    def add(self, token_id: int, logprob: float, version: str) -> bool:
        """Add the next token; True if it was the last."""
        index = len(self.output_ids)
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, index))
        self.logprobs.append(logprob)
        self.output_ids.append(token_id)
        self.finish_reason = self._ending(token_id, index + 1)
        return self.finish_reason is not None

    def _ending(self, token_id: int, num_tokens: int) -> dict[str, Any] | None:
        params = self.params
        if num_tokens >= params.min_new_tokens:
            if token_id in self.stop_ids:
                return {"type": "stop", "matched": token_id}
            if self.find_stop is not None:
                matched = self.find_stop(self.output_ids)
                if matched is not None:
                    return {"type": "stop", "matched": matched}
        if num_tokens >= params.max_new_tokens:
            return {"type": "length", "length": params.max_new_tokens}
        return None

    def abort(self, message: str) -> None:
        """End it with the tokens it has."""
        if not self.is_over:
            self.finish_reason = {
                "type": "abort",
                "message": message,
                "status_code": None,
                "err_type": None,
            }

    def meta_info(self, ids: Sequence[int], version: str) -> dict[str, Any]:
        """SGLang's ``meta_info`` for a completion that is ``ids`` so far.

        ``version`` is the engine's present one, reported where there is no token yet."""
        num_tokens = len(ids)
        spans = [span for span in self.spans if span[1] < num_tokens]
        ends = [start for _, start in spans[1:]] + [num_tokens]
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": num_tokens,
            "cached_tokens": self.cached_tokens,
            "weight_version": spans[-1][0] if spans else version,
            "weight_versions": [
                {"version": name, "start": start, "end": end}
                for (name, start), end in zip(spans, ends, strict=bool(spans))
            ],
        }
        if self.return_logprob:
            meta["input_token_logprobs"] = self._of_prompt()
            meta["output_token_logprobs"] = [
                [logprob, token_id, None]
                for logprob, token_id in zip(self.logprobs, ids, strict=False)
            ]
        if self.wants_experts and num_tokens:
            # Nothing has followed the last token yet.
            rows = self.routed_experts[: len(self.prompt_ids) + num_tokens - 1]
            meta["routed_experts"] = base64.b64encode(b"".join(rows)).decode()
        if self.wants_masks:
            meta[SAMPLING_MASK] = self.masks[:num_tokens]
        return meta

    def _of_prompt(self) -> list[list[Any]]:
        """SGLang's ``input_token_logprobs``: nothing is before the first of them."""
        if not 0 <= self.logprob_start_len < len(self.prompt_ids):
            return []
        ids = self.prompt_ids[self.logprob_start_len :]
        values = [None, *self.input_logprobs]
        return [[value, token_id, None] for value, token_id in zip(values, ids, strict=False)]

    async def wait(self) -> None:
        """Return at the next change (for a stream) or at the end."""
        if not self.is_over:
            self.changed = asyncio.get_running_loop().create_future()
            if not self.is_over:
                await self.changed

    def wake(self) -> None:
        """Let ``wait`` return; called on the event loop."""
        if self.changed is not None and not self.changed.done():
            self.changed.set_result(None)
