"""One sample until it ends: request, reply, retry, and requests for the rest if it was cut off.

Always true: every sample ends completed, truncated or failed with a reason.  If its abort scope
stops, it ends aborted with its tokens, or pending without any; a gate that only a push opens ends
the scope with an error.  No token is generated twice, except after its engine was lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.protocol import GenerateReply, SamplingParams
from engines.protocol.logprob_kind import LogprobKind, LogprobRule
from rollout.core.errors import ConfigError, LifecycleError, VersionUnavailable
from rollout.core.samples import Sample, SampleFailure, SampleStatus, version_number
from rollout.driver.client.generation_client import (
    EngineLoad,
    FailureKind,
    GenerationClient,
    GenerationError,
    GenerationRequest,
)
from rollout.driver.client.limiter import Limiter
from rollout.driver.client.partial import extend, has_other_kind, remaining, restart
from rollout.driver.client.retry import RetryPolicy, RetryState
from rollout.driver.client.sampling_check import why_not_trained
from rollout.driver.user_code import (
    CallEnded,
    HookError,
    errors_of,
    original,
    raised_by,
    result_of,
    wrong_result,
)
from rollout.rules.contract import NO_CONTRACT, Contract

logger = logging.getLogger(__name__)

_HALF_RID_BYTES = 8
_CLIENT = "the generation client"
_CONTROL_S = 10.0


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
        self.prefix = os.urandom(_HALF_RID_BYTES).hex() + "-"  # an abort by prefix needs its end
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


@dataclass(slots=True)
class _Work:
    """What ``Completer.complete`` has of one sample."""

    sample: Sample
    sampling: SamplingParams
    scope: AbortScope
    contract: Contract
    may_restart: Callable[[], bool]
    base: int
    affinity: str
    of_hook: bool
    state: RetryState = field(default_factory=RetryState)


class Completer:
    """Completes samples through a client; shared by all streams of a driver.

    Attributes:
        weight_version: the newest version of the policy that is known.

    Args:
        limit_s: for one request; None: the client ends each itself.
    """

    def __init__(
        self,
        client: GenerationClient,
        limiter: Limiter,
        retry_policy: RetryPolicy,
        limit_s: float | None = None,
    ) -> None:
        self._limit_s = limit_s
        self.client = client
        self.limiter = limiter
        self.weight_version: int | None = None
        self._retry_policy = retry_policy
        self._rules: Sequence[LogprobRule] | None = None
        self._finding_rules = asyncio.Lock()

    async def complete(
        self,
        sample: Sample,
        sampling: SamplingParams,
        *,
        scope: AbortScope,
        contract: Contract = NO_CONTRACT,
        may_restart: Callable[[], bool] = lambda: False,
        base: int = 0,
        affinity: str = "",
        of_hook: bool = False,
        on_failure: Callable[[Sample, BaseException], None] = lambda sample, cause: None,
    ) -> None:
        """Generate until ``sample`` ends or the scope stops.

        Args:
            contract: of each request.  An exact version, or a kind of log-probs, that cannot be had
                ends the scope.
            may_restart: called when tokens are too old for the contract; if True they are
                discarded, else the sample goes on without that limit.
            base: output tokens that do not count against the budget (earlier turns).
            of_hook: it is a turn of a generate hook, which alone fails by its kind of log-probs.
            on_failure: called with what the client raised, if it is no ``GenerationError``.
        """
        work = _Work(sample, sampling, scope, contract, may_restart, base, affinity, of_hook)
        async with self.limiter.slot():
            try:
                while await self._step(work):
                    pass
            except HookError as error:
                sample.fail(str(error), traceback.format_exc(), failure=SampleFailure.ENGINE)
                on_failure(sample, original(error))
            except GenerationError as error:
                is_too_long = error.kind is FailureKind.TOO_LONG
                failure = SampleFailure.TOO_LONG if is_too_long else SampleFailure.ENGINE
                sample.fail(str(error), failure=failure)
            except ValueError as error:
                sample.fail(f"unusable reply: {error}", failure=SampleFailure.ENGINE)

    async def _step(self, work: _Work) -> bool:
        """Send one request.  Returns whether another is needed."""
        sample, sampling, scope, base = work.sample, work.sampling, work.scope, work.base
        rest = remaining(sampling, len(sample.output_ids) - base)
        if rest is None:
            sample.status = SampleStatus.TRUNCATED
            return False
        if len(sample.output_ids) > base and not sampling.can_continue:
            if base:
                raise GenerationError(
                    "a turn with a grammar or a penalty was cut off and cannot be continued: "
                    "it would begin again in the middle (docs/how-to/router.md#seams)"
                )
            restart(sample)
            rest = sampling
        if scope.is_stopping:
            sample.status = SampleStatus.ABORTED if sample.output_ids else SampleStatus.PENDING
            return False
        try:
            reply = await self._request(work, rest)
        except GenerationError as error:
            await self._go_on(work, error)
            return True
        has_least = sampling.min_new_tokens > rest.min_new_tokens == 0
        is_begun = len(sample.output_ids) > base
        if is_begun and has_other_kind(sample, reply, has_least_length=has_least):
            if base:
                raise GenerationError(
                    "a turn was cut off, and the next engine's log-probs are of another kind"
                )
            restart(sample)
            return True
        extend(sample, reply, budget=base + sampling.max_new_tokens)
        for span in sample.weight_versions[-1:]:
            self.note_version(version_number(span.version))
        is_cut = sample.status is SampleStatus.ABORTED
        scope.num_cut += is_cut
        # The router sees one request, and a sample that was cut off has had several.
        if why := self._why_broken(work, is_cut=is_cut):
            self._leave_version(work, why)
            return True
        if not is_cut:
            return False
        if reply.output_ids:
            work.state.has_progressed()
        elif not scope.is_stopping:
            failure = GenerationError(
                "aborted repeatedly without a token", kind=FailureKind.ABORTED
            )
            await self._wait_or_raise(failure, work)
        return True

    async def _go_on(self, work: _Work, error: GenerationError) -> None:
        """Prepare the next request after a failure, or raise it if there is none."""
        scope = work.scope
        scope.num_lost += error.kind is FailureKind.LOST
        if error.kind is FailureKind.VERSION:
            self.note_version(error.weight_version)
            self._leave_version(work, str(error), error.weight_version)
        elif error.kind is FailureKind.LOGPROB_KIND:
            why = await self._why_no_kind(work.sampling) or str(error)
            if work.of_hook:
                raise GenerationError(why, kind=error.kind)
            scope.end(ConfigError(why, setting="sampling", value=work.sampling.to_wire()))
        else:
            await self._wait_or_raise(error, work)

    async def _why_no_kind(self, sampling: SamplingParams) -> str:
        """Why no engine has a trainer's log-probs for a request, and what works; else empty."""
        async with self._finding_rules:  # of many samples that are refused, the first one looks
            if self._rules is None:
                load = await self.load()
                self._rules = () if load is None else load.logprobs
        kinds = {rule.kind_of(sampling.to_wire()) for rule in self._rules}
        reasons = filter(None, (why_not_trained(kind, sampling) for kind in sorted(kinds)))
        return next((f"the engines report {why}" for why in reasons), "")

    def _why_broken(self, work: _Work, *, is_cut: bool) -> str:
        """Why the tokens of a sample may not be gone on from, or kept; else empty."""
        contract, versions = work.contract, work.sample.versions
        is_open = is_cut and not work.base and not work.scope.is_stopping
        if not versions or (contract.weight_version is None and not is_open):
            return ""
        return contract.why_broken(min(versions), max(versions), self.weight_version)

    def _leave_version(self, work: _Work, why: str, served: int | None = None) -> None:
        """Begin again with other weights, because these break the contract."""
        if work.contract.weight_version is not None:
            version = self.weight_version if served is None else served
            work.scope.end(VersionUnavailable(why, weight_version=version))
        elif not work.base and work.may_restart():
            restart(work.sample)
        else:  # the check at delivery looks how old it is
            work.contract = replace(work.contract, min_weight_version=None, max_version_lag=None)

    def note_version(self, version: int | None) -> None:
        """Note a weight version of the policy; None or an older one changes nothing."""
        if version is not None:
            self.weight_version = max(version, self.weight_version or 0)

    async def _request(self, work: _Work, sampling: SamplingParams) -> GenerateReply:
        sample, scope = work.sample, work.scope
        rid = scope.prefix + os.urandom(_HALF_RID_BYTES).hex()
        ids = [*sample.prompt_ids, *sample.output_ids]
        request = GenerationRequest(rid, ids, sampling, work.affinity, contract=work.contract)
        scope.rids.add(rid)
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                with errors_of(_CLIENT):
                    reply = await self.client.generate(request)
        except (GenerationError, HookError, CallEnded):
            raise
        except Exception as error:
            if limit.expired() and isinstance(error, TimeoutError):
                why = f"{_CLIENT} did not return within its limit of {self._limit_s:g} s"
                raise GenerationError(why, kind=FailureKind.LOST) from None
            raise HookError(raised_by(_CLIENT, error)) from error
        finally:
            scope.rids.remove(rid)
        if not isinstance(reply, GenerateReply):
            raise wrong_result(_CLIENT, self.client.generate, reply, "a GenerateReply")
        # A client that is no router's may pass the wish over.
        is_trained = work.contract.logprob_kind is LogprobKind.FULL
        if is_trained and (why := why_not_trained(reply.logprob_kind, work.sampling)):
            raise GenerationError(f"the engines report {why}", kind=FailureKind.LOGPROB_KIND)
        return reply

    # -- what costs no sample ---------------------------------------------------------------

    async def abort(self, rids: Sequence[str], prefix: str, *, limit_s: float) -> None:
        """Abort requests; an error is logged, because callers look whether they have ended."""
        abort = self.client.abort
        try:
            await result_of(f"{_CLIENT}'s abort", abort, rids, prefix=prefix, limit_s=limit_s)
        except Exception:
            logger.exception("requests could not be aborted")

    async def load(self) -> EngineLoad | None:
        """How busy the engines are, or None if that is unknown.

        Raises:
            CallEnded: the client raised something, or did not return.
        """
        try:
            load = await result_of(f"{_CLIENT}'s load", self.client.load, limit_s=_CONTROL_S)
        except CallEnded:
            raise
        except Exception as error:
            why = raised_by(f"{_CLIENT}'s load", error)
            raise CallEnded(why) from original(error)
        if not isinstance(load, EngineLoad | None):
            raise wrong_result(f"{_CLIENT}'s load", self.client.load, load, "an EngineLoad or None")
        return load

    async def server_metrics(self) -> Mapping[str, float]:
        """The client's metrics of its server; none, and a line in the log, if it fails."""
        try:
            what = f"{_CLIENT}'s server_metrics"
            return dict(await result_of(what, self.client.server_metrics, limit_s=_CONTROL_S))
        except Exception:
            logger.exception("this step has no metrics of the server")
            return {}

    async def _wait_or_raise(self, error: GenerationError, work: _Work) -> None:
        """Wait until the next try, or raise ``error`` if there is none."""
        scope = work.scope
        if scope.is_stopping and not error.is_final:
            return
        if error.kind is FailureKind.NEEDS_PUSH:
            scope.end(LifecycleError(str(error)))
            return
        now_s = asyncio.get_running_loop().time()
        wait_s = work.state.wait_s(error, now_s=now_s, policy=self._retry_policy)
        if wait_s is None:
            raise error
        await scope.sleep(wait_s)
