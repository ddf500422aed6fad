"""Pushes of weights to a vLLM server, and the comparison of its weights with earlier ones.

Always true:

- a push is one session of vLLM, also if its buckets come from files: vLLM loads the parts of a
  layer together, and a layer that is split over two sessions would stay half old;
- no token is generated between a session's start and its end, which would end the server: a session
  that begins without a pause has one of its own, and a push that fails leaves the server paused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engines.http.call import EngineCall
from engines.http.connections import HttpReply
from engines.protocol import WeightsReport, encoded_from
from engines.protocol.errors import EngineRejected
from engines.protocol.plain_text import differing_text
from engines.vllm import routes, vllm_json
from engines.vllm.calls import VllmCalls
from engines.vllm.pauses import Pauses
from engines.vllm.server_report import METHODS_OF_PLUGIN, has_plugin


@dataclass(frozen=True, slots=True)
class _Session:
    """What is known of the session that is open, or of none.

    Attributes:
        version: what its buckets publish, when it ends, or None for a push that was given up.
        flushes: its last bucket has come.
        is_of_files: the push is from files, and its caller opens no session.
    """

    version: str | None = None
    flushes: bool = False
    is_of_files: bool = False

    @property
    def is_complete(self) -> bool:
        return self.flushes or self.version is not None


class Pushes:
    """Buckets of a push; alone knows the session that they are in."""

    def __init__(self, calls: VllmCalls, pauses: Pauses) -> None:
        self._calls = calls
        self._pauses = pauses
        self._session = _Session()

    async def begin(self, operation: str) -> None:
        """Open the session of a push, paused."""
        if self._session.is_of_files:  # a push from files that was given up
            await self.end(operation)
        await self._pauses.pause_for_push(operation)
        await self._calls.post(operation, routes.START_UPDATE, {}, self._calls.deadlines.update_s)
        self._session = _Session()

    async def end(self, operation: str) -> None:
        """End the session; the version is published with it, and not before."""
        ended, self._session = self._session, _Session()
        body = {} if ended.version is None else {"weight_version": ended.version}
        update_s = self._calls.deadlines.update_s
        await self._calls.post(operation, routes.FINISH_UPDATE, body, update_s)
        if ended.flushes:
            await self._pauses.flush(operation, 0.0)
        if ended.is_complete:
            await self._pauses.resume_after_push(operation)

    async def update(
        self, operation: str, info: Mapping[str, Any], *, flushes: bool, version: str | None
    ) -> None:
        """Load one bucket, which ``info`` says how to find."""
        body = {"update_info": await self._with_version(info)}
        await self._calls.post(operation, routes.UPDATE, body, self._calls.deadlines.update_s)
        self._note(flushes, version)

    async def update_from_files(
        self, operation: str, path: str, *, flushes: bool, version: str | None
    ) -> None:
        """One bucket of a push from files, whose session opens here; the one that flushes ends it.

        So does an error.
        """
        if not self._session.is_of_files:
            await self.begin(operation)
            self._session = replace(self._session, is_of_files=True)
        try:
            await self.update(operation, {"path": path}, flushes=flushes, version=version)
        except EngineRejected:
            self._session = replace(self._session, is_of_files=False)  # vLLM has closed it
            raise
        if flushes:
            await self.end(operation)

    async def receive(
        self, operation: str, bucket: Mapping[str, Any], *, flushes: bool, version: str | None
    ) -> None:
        """One bucket that every worker receives from a group.  vLLM closes the session at an
        error."""
        arguments = await self._with_version(bucket)
        await self._calls.act(operation, "receive", arguments, self._calls.deadlines.update_s)
        self._note(flushes, version)

    async def _with_version(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """The payload with the version of the server, which encoded tensors must begin from."""
        if (await self._calls.known_info()).raw.get("encodings"):
            return {**info, "base": encoded_from(await self._calls.weight_version())}
        return info

    def _note(self, flushes: bool, version: str | None) -> None:
        """A bucket has been loaded."""
        before = self._session
        self._session = replace(
            before, flushes=before.flushes or flushes, version=version or before.version
        )


class WeightChecks:
    """Checksums of the server's tensors; alone has the snapshot to compare with."""

    def __init__(self, calls: VllmCalls) -> None:
        self._calls = calls
        self._snapshot: WeightsReport | None = None

    async def check(self, operation: str, action: str) -> WeightsReport:
        if action == "reset_tensors":
            await self._post(operation, "reset")
            return WeightsReport(None)
        report = await self._checksums(operation)
        if action == "checksum":
            return report
        if action == "snapshot":
            self._snapshot = report
        else:
            snapshot, self._snapshot = self._snapshot, None
            _check_same(self._calls.call(operation, 0.0), snapshot, report)
        return WeightsReport(None)

    async def _checksums(self, operation: str) -> WeightsReport:
        if has_plugin(await self._calls.known_info()):
            method = METHODS_OF_PLUGIN["fingerprints"]
            return await self._calls.rpc(operation, method, vllm_json.read_fingerprints)
        call, answer = await self._post(operation, "checksum")
        return call.read(answer, vllm_json.read_checksums)

    async def _post(self, operation: str, action: str) -> tuple[EngineCall, HttpReply]:
        check_s = self._calls.deadlines.check_s
        return await self._calls.post(operation, routes.CHECKER, {"action": action}, check_s)


def _check_same(call: EngineCall, before: WeightsReport | None, now: WeightsReport) -> None:
    """Raise if there is no snapshot, or a tensor has changed since it.

    Raises:
        EngineRejected: names them.
    """
    if before is None:
        raise call.rejected("failed", status=400, body="no snapshot to compare with")
    different = [
        name
        for of_rank, old in zip(now.tensors, before.tensors, strict=True)
        for name in of_rank
        if of_rank[name] != old.get(name)
    ]
    if different:
        raise call.rejected("failed", status=400, body=differing_text(different))
