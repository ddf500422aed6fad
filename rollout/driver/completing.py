"""One sample to its end: asked for, cut off, asked for again, within one budget.

Always true: every sample ends completed, truncated, failed with a reason, or, when its scope
stops, aborted with its tokens (pending without any).  No token is asked for twice unless the
engine that drew it was lost with it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from engines.protocol import GenerateReply, SamplingParams
from rollout.driver.door import Ask, Door, DoorError, Trouble
from rollout.driver.limiter import Limiter
from rollout.driver.partial import extend, remaining, restart
from rollout.driver.retry import Patience, Troubles
from rollout.samples import Sample, SampleStatus

_HALF_RID_BYTES = 8


class Scope:
    """Asks that can be stopped together.

    Attributes:
        rids: of the asks that are in flight.
        prefix: what all its rids, and no other's, begin with.
        num_lost: replies that were lost with their engine or connection.
        num_cut: replies that came back aborted.
    """

    def __init__(self) -> None:
        self.rids: set[str] = set()
        self.prefix = os.urandom(_HALF_RID_BYTES).hex()
        self.num_lost = 0
        self.num_cut = 0
        self._stopped = asyncio.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """Nothing more is asked; what is in flight is still to be aborted."""
        self._stopped.set()

    def reopen(self) -> None:
        self._stopped.clear()

    async def sleep(self, seconds: float) -> None:
        """Wait, but not past a stop."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            pass


class Completer:
    """Completes samples through a door.

    Args:
        on_version: told the weight version of every reply, as text.
    """

    def __init__(
        self,
        door: Door,
        limiter: Limiter,
        patience: Patience,
        *,
        on_version: Callable[[str], None],
    ) -> None:
        self._door = door
        self._limiter = limiter
        self._patience = patience
        self._on_version = on_version

    async def complete(
        self,
        sample: Sample,
        sampling: SamplingParams,
        scope: Scope,
        *,
        is_stale: Callable[[Sample], bool] = lambda sample: False,
        base: int = 0,
        session_id: str = "",
    ) -> None:
        """Go on with ``sample`` until it ends or the scope stops.

        Args:
            is_stale: asked of a sample that was cut off; one that is begins anew.
            base: output tokens that do not count against the budget (earlier turns).
        """
        async with self._limiter.slot():
            troubles = Troubles()
            try:
                while await self._goes_on(
                    sample, sampling, scope, troubles, is_stale, base, session_id
                ):
                    pass
            except DoorError as error:
                sample.fail(str(error))
            except ValueError as error:
                sample.fail(f"unusable answer: {error}")

    async def _goes_on(
        self,
        sample: Sample,
        sampling: SamplingParams,
        scope: Scope,
        troubles: Troubles,
        is_stale: Callable[[Sample], bool],
        base: int,
        session_id: str,
    ) -> bool:
        """One ask; whether another is needed."""
        rest = remaining(sampling, len(sample.output_ids) - base)
        if rest is None:
            sample.status = SampleStatus.TRUNCATED
            return False
        if scope.is_stopping:
            sample.status = SampleStatus.ABORTED if sample.output_ids else SampleStatus.PENDING
            return False
        ids = [*sample.prompt_ids, *sample.output_ids]
        try:
            reply = await self._ask(ids, rest, scope, session_id)
        except DoorError as error:
            scope.num_lost += error.trouble is Trouble.LOST
            return await self._may_retry(error, scope, troubles)
        extend(sample, reply, budget=base + sampling.max_new_tokens)
        for span in sample.weight_versions[-1:]:
            self._on_version(span.version)
        if sample.status is not SampleStatus.ABORTED:
            return False
        scope.num_cut += 1
        if reply.output_ids:
            troubles.has_progressed()
        elif not scope.is_stopping:
            cut = DoorError("aborted again and again without a token", trouble=Trouble.ABORTED)
            await self._may_retry(cut, scope, troubles)
        if not base and not scope.is_stopping and is_stale(sample):
            restart(sample)
        return True

    async def _ask(
        self, ids: list[int], sampling: SamplingParams, scope: Scope, session_id: str
    ) -> GenerateReply:
        rid = scope.prefix + os.urandom(_HALF_RID_BYTES).hex()
        scope.rids.add(rid)
        try:
            return await self._door.generate(Ask(rid, ids, sampling, session_id))
        finally:
            scope.rids.discard(rid)

    async def _may_retry(self, error: DoorError, scope: Scope, troubles: Troubles) -> bool:
        if scope.is_stopping and error.trouble is not Trouble.REFUSED:
            return True
        wait_s = troubles.wait_s(
            error.trouble,
            retry_after_s=error.retry_after_s,
            now_s=asyncio.get_running_loop().time(),
            patience=self._patience,
        )
        if wait_s is None:
            raise error
        await scope.sleep(wait_s)
        return True
