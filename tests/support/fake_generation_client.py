"""A client of fake engines in memory that behaves like a router, for tests of drivers and hooks.

Always true: a request goes to the serving engine with the fewest requests; while the gate holds,
requests wait and are sent in order when it opens; a dead engine fails one request and gets no more;
what a request wants of weight versions is waited for, or refused, and no reply is without it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from engines.fake import FakeEngine
from engines.protocol import GenerateReply
from engines.protocol.errors import EngineError, EngineRejected, EngineUnreachable
from rollout.driver.client.generation_client import (
    EngineLoad,
    FailureKind,
    GenerationError,
    GenerationRequest,
    kind_of_refusal,
)
from rollout.rules.contract import Fit


class FakeGenerationClient:
    """A ``GenerationClient`` over ``engines``, a list that tests may change at any time.

    Attributes:
        requests: all requests, in order.
        reports: the reported metrics of steps, in order.
        aborted: ids of all abort calls, in order.
        is_closed: requests fail with 503 instead of waiting.
        needs_push: requests fail because only a push of this version lets them through.
        weight_version: reported with the load; None: an engine alone, which knows no contract.
        hold_timeout_s: for which a request waits at the gate.
    """

    def __init__(self, engines: Sequence[FakeEngine]) -> None:
        self.engines = list(engines)
        self.requests: list[GenerationRequest] = []
        self.reports: list[Mapping[str, Any]] = []
        self.aborted: list[str] = []
        self.is_closed = False
        self.needs_push: int | None = None
        self.weight_version: int | None = None
        self._in_flight: Counter[str] = Counter()
        self.hold_timeout_s = 600.0
        self._is_open = True
        self._changed = asyncio.Event()
        self._aborts: dict[str, asyncio.Event] = {}

    def hold(self) -> None:
        """Hold new requests until ``open``."""
        self._is_open = False

    def open(self) -> None:
        """Send held requests, and new ones at once."""
        self._is_open = True
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        return self._in_flight.total()

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        self.requests.append(request)
        if self.is_closed:
            raise _unavailable("HTTP 503: closed")
        if self.needs_push is not None:
            why = f"only a push of weight version {self.needs_push} opens the gate"
            raise GenerationError(why, kind=FailureKind.NEEDS_PUSH)
        await self._pass_gate(request)
        serving = [engine for engine in self.engines if not engine.is_dead]
        if not serving:
            raise _unavailable("HTTP 503: no engine")
        engine = min(serving, key=lambda engine: self._in_flight[engine.engine_id])
        self._in_flight[engine.engine_id] += 1
        try:
            reply = await engine.generate(
                input_ids=request.input_ids,
                sampling_params=request.sampling,
                rid=request.rid,
                return_logprob=True,
            )
            self._check_versions(request, reply)
            return replace(reply, engine_id=engine.engine_id)
        except EngineRejected as error:
            is_final = 400 <= (error.status or 400) < 500
            kind = kind_of_refusal(error.body) if is_final else FailureKind.LOST
            raise GenerationError(f"HTTP {error.status}: {error.body}", kind=kind) from None
        except EngineUnreachable as error:
            raise GenerationError(f"HTTP 502: {error}", kind=FailureKind.LOST) from None
        finally:
            self._in_flight[engine.engine_id] -= 1

    async def abort(self, rids: Sequence[str], *, prefix: str = "") -> None:
        live = {rid for engine in self.engines for rid in engine.in_flight} | {*self._aborts}
        begin_so = [rid for rid in live if prefix and rid.startswith(prefix)]
        for rid in [*rids, *begin_so]:
            self.aborted.append(rid)
            if rid in self._aborts:
                self._aborts[rid].set()
                continue
            for engine in self.engines:
                with suppress(EngineError):
                    await engine.abort_request(rid)

    async def report(self, figures: Mapping[str, Any]) -> None:
        self.reports.append(figures)

    async def load(self) -> EngineLoad | None:
        serving = [engine for engine in self.engines if not engine.is_dead]
        return EngineLoad(
            num_engines=len(serving),
            num_running=sum(len(engine.in_flight) for engine in serving),
            weight_version=self.weight_version,
            why_waiting=f"{len(self._aborts)} requests wait at the gate" if self._aborts else "",
            why_closed="the gate is closed" if self.is_closed else "",
        )

    async def server_metrics(self) -> Mapping[str, float]:
        version = self.weight_version
        return {} if version is None else {"server/weight_version": float(version)}

    async def close(self) -> None:
        return

    async def _pass_gate(self, request: GenerationRequest) -> None:
        """Wait until the gate is open for what the request wants."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self.hold_timeout_s
        while not self._may_pass(request):
            aborted = self._aborts[request.rid] = asyncio.Event()
            waits = [
                asyncio.create_task(self._changed.wait()),
                asyncio.create_task(aborted.wait()),
            ]
            left_s = until_s - loop.time()
            try:
                done, _ = await asyncio.wait(
                    waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                del self._aborts[request.rid]
                for wait in waits:
                    wait.cancel()
            if aborted.is_set():
                raise GenerationError("HTTP 499: aborted while held", kind=FailureKind.ABORTED)
            if not done:
                raise (
                    self._refusal("no such version came")
                    if self._is_open
                    else _unavailable("HTTP 503: held for too long")
                )

    def _may_pass(self, request: GenerationRequest) -> bool:
        if not self._is_open or self.weight_version is None:
            return self._is_open
        fit = request.contract.fit(self.weight_version)
        if fit is Fit.NEVER:
            raise self._refusal(f"version {request.contract.weight_version} is past")
        return fit is Fit.NOW

    def _check_versions(self, request: GenerationRequest, reply: GenerateReply) -> None:
        versions = [int(span.version) for span in reply.weight_versions]
        if self.weight_version is None or not versions:
            return
        contract = request.contract
        if why := contract.why_broken(min(versions), max(versions), self.weight_version):
            raise self._refusal(why)

    def _refusal(self, why: str) -> GenerationError:
        return GenerationError(why, kind=FailureKind.VERSION, weight_version=self.weight_version)


def _unavailable(message: str) -> GenerationError:
    return GenerationError(message, kind=FailureKind.UNAVAILABLE, retry_after_s=1.0)
