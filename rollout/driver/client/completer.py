"""One sample until it ends: request, reply, retry, and requests for the rest if it was cut off.

Always true: every sample ends completed, truncated or failed with a reason.  If its abort scope
stops, it ends aborted with its tokens, or pending without any; a gate that only a push opens ends
the scope with an error.  No token is generated twice, except after its engine was lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from engines.protocol import GenerateReply, SamplingParams
from rollout.core.errors import LifecycleError
from rollout.core.samples import Sample, SampleStatus, version_number
from rollout.driver.client.generation_client import (
    FailureKind,
    GenerationClient,
    GenerationError,
    GenerationRequest,
)
from rollout.driver.client.limiter import Limiter
from rollout.driver.client.partial import extend, has_other_kind, remaining, restart
from rollout.driver.client.retry import RetryPolicy, RetryState
from rollout.driver.client.sampling_check import why_not_trained

_HALF_RID_BYTES = 8


class AbortScope:
    """Requests that are stopped together.

    Attributes:
        rids: ids of the requests in flight.
        prefix: common to all its request ids, and to no other's.
        num_lost: replies that were lost with their engine or connection.
        num_cut: replies that came back aborted.

    Args:
        on_error: called with what ends all of them at once.
    """

    def __init__(self, on_error: Callable[[Exception], None] = lambda error: None) -> None:
        self._on_error = on_error
        self.rids = set[str]()
        self.prefix = os.urandom(_HALF_RID_BYTES).hex()
        self.num_lost = 0
        self.num_cut = 0
        self._stopped = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Send no further request.  Requests in flight go on until the caller aborts them."""
        self._stopped.set()

    def end(self, error: Exception) -> None:
        """Stop, because of an error of all requests."""
        self.stop()
        self._on_error(error)

    def reopen(self) -> None:
        self._stopped.clear()

    async def sleep(self, seconds: float) -> None:
        """Sleep; a stop ends it early."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            pass


class Completer:
    """Completes samples through a client; shared by all streams of a driver.

    Attributes:
        weight_version: the newest version of the policy that is known.
    """

    def __init__(
        self, client: GenerationClient, limiter: Limiter, retry_policy: RetryPolicy
    ) -> None:
        self.client = client
        self.limiter = limiter
        self.weight_version: int | None = None
        self._retry_policy = retry_policy

    async def complete(
        self,
        sample: Sample,
        sampling: SamplingParams,
        *,
        scope: AbortScope,
        is_stale: Callable[[Sample], bool],
        base: int = 0,
        affinity: str = "",
        is_training: bool = True,
    ) -> None:
        """Generate until ``sample`` ends or the scope stops.

        Args:
            is_stale: called with a sample that was cut off; if True, its tokens are discarded.
            base: output tokens that do not count against the budget (earlier turns).
            is_training: the sample fails if its log-probs are not those that a trainer computes.
        """
        async with self.limiter.slot():
            state = RetryState()
            try:
                while await self._step(
                    sample, sampling, scope, state, is_stale, base, affinity, is_training
                ):
                    pass
            except GenerationError as error:
                sample.fail(str(error))
            except ValueError as error:
                sample.fail(f"unusable reply: {error}")

    async def _step(
        self,
        sample: Sample,
        sampling: SamplingParams,
        scope: AbortScope,
        state: RetryState,
        is_stale: Callable[[Sample], bool],
        base: int,
        affinity: str,
        is_training: bool,
    ) -> bool:
        """Send one request.  Returns whether another is needed."""
        rest = remaining(sampling, len(sample.output_ids) - base)
        if rest is None:
            sample.status = SampleStatus.TRUNCATED
            return False
        if len(sample.output_ids) > base and not sampling.can_continue:
            if base:
                raise GenerationError("a turn with a grammar was cut off and cannot be continued")
            restart(sample)
            rest = sampling
        if scope.is_stopping:
            sample.status = SampleStatus.ABORTED if sample.output_ids else SampleStatus.PENDING
            return False
        ids = [*sample.prompt_ids, *sample.output_ids]
        try:
            reply = await self._request(sample, ids, rest, scope, affinity)
        except GenerationError as error:
            scope.num_lost += error.kind is FailureKind.LOST
            await self._wait_or_raise(error, scope, state)
            return True
        if is_training and (why := why_not_trained(reply.logprob_kind, sampling)):
            raise GenerationError(f"the engine reports {why}")
        if len(sample.output_ids) > base and has_other_kind(sample, reply):
            if base:
                raise GenerationError(
                    "a turn was cut off, and the next engine's log-probs are of another kind"
                )
            restart(sample)
            return True
        extend(sample, reply, budget=base + sampling.max_new_tokens)
        for span in sample.weight_versions[-1:]:
            self.note_version(version_number(span.version))
        if sample.status is not SampleStatus.ABORTED:
            return False
        scope.num_cut += 1
        if reply.output_ids:
            state.has_progressed()
        elif not scope.is_stopping:
            failure = GenerationError(
                "aborted repeatedly without a token", kind=FailureKind.ABORTED
            )
            await self._wait_or_raise(failure, scope, state)
        if not base and not scope.is_stopping and is_stale(sample):
            restart(sample)
        return True

    def note_version(self, version: int | None) -> None:
        """Note a weight version of the policy; None or an older one changes nothing."""
        if version is not None:
            self.weight_version = max(version, self.weight_version or 0)

    async def _request(
        self,
        sample: Sample,
        ids: list[int],
        sampling: SamplingParams,
        scope: AbortScope,
        affinity: str,
    ) -> GenerateReply:
        rid = scope.prefix + os.urandom(_HALF_RID_BYTES).hex()
        scope.rids.add(rid)
        try:
            return await self.client.generate(GenerationRequest(rid, ids, sampling, affinity))
        finally:
            scope.rids.remove(rid)

    async def _wait_or_raise(
        self, error: GenerationError, scope: AbortScope, state: RetryState
    ) -> None:
        """Wait until the next try, or raise ``error`` if there is none."""
        if scope.is_stopping and error.kind is not FailureKind.REFUSED:
            return
        if error.kind is FailureKind.NEEDS_PUSH:
            scope.end(LifecycleError(str(error)))
            return
        now_s = asyncio.get_running_loop().time()
        wait_s = state.wait_s(error, now_s=now_s, policy=self._retry_policy)
        if wait_s is None:
            raise error
        await scope.sleep(wait_s)
