"""One completion from its admission to its answer, without tensors or sockets.

Always true: a generation ends exactly once, with a finish reason or with a refusal; only the
generation thread changes it; readers on the event loop may look at any time, since its lists
only grow.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from engines.embedded.errors import Refusal
from engines.embedded.params import Params

if TYPE_CHECKING:
    from engines.embedded.lora import Adapter

StopFinder = Callable[[Sequence[int]], str | None]


class Generation:
    """A prompt, how to go on from it, and what has come of it so far.

    Attributes:
        stop_ids: token ids that end it (end-of-sequence and the caller's own).
        adapter: the LoRA adapter it runs with; None for the base model alone.
        find_stop: finds a stop string in the last tokens; None where there are none.
        spans: pairs (weight version, index of the first token it produced).
        finish_reason: SGLang's object; None while running.
        refusal: why it was never admitted.
        logprob_start_len: from which prompt token on the prompt's log-probabilities are wanted; -1
            for none.
        input_logprobs: of the prompt's tokens after that one, None for a value that is no number.
    """

    __slots__ = (
        "__weakref__",
        "adapter",
        "cached_tokens",
        "changed",
        "find_stop",
        "finish_reason",
        "input_logprobs",
        "is_streamed",
        "logprob_start_len",
        "logprobs",
        "output_ids",
        "params",
        "prompt_ids",
        "random",
        "refusal",
        "return_logprob",
        "rid",
        "spans",
        "stop_ids",
    )

    def __init__(
        self,
        rid: str,
        prompt_ids: list[int],
        params: Params,
        *,
        stop_ids: frozenset[int] = frozenset(),
        find_stop: StopFinder | None = None,
        seed: int | None = None,
        return_logprob: bool = False,
        logprob_start_len: int = -1,
        is_streamed: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        self.adapter = adapter
        self.rid = rid
        self.prompt_ids = prompt_ids
        self.params = params
        self.stop_ids = stop_ids
        self.find_stop = find_stop
        self.random = random.Random(seed).random if seed is not None else random.random
        self.return_logprob = return_logprob
        self.logprob_start_len = logprob_start_len if return_logprob else -1
        self.input_logprobs: list[float | None] = []
        self.is_streamed = is_streamed
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[str, int]] = []
        self.cached_tokens = 0
        self.finish_reason: dict[str, Any] | None = None
        self.refusal: Refusal | None = None
        self.changed: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.refusal is not None

    def add(self, token_id: int, logprob: float, version: str) -> bool:
        """Take the next token; whether it was the last."""
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
