"""Pushes of weights to a vLLM server, and what it holds.

Always true:

- a push is one session of vLLM, also if its buckets come from files: vLLM loads the parts of a
  layer together, and a layer that is split over two sessions would stay half old;
- no token is generated between a session's start and its end, which would end the server: a session
  that begins without a pause has one of its own, and a push that fails leaves the server paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from engines.http.call import EngineCall
from engines.protocol import Endpoint, PauseMode, TensorInfo, WeightsReport, encoded_from
from engines.protocol.errors import EngineRejected
from engines.protocol.plain_text import differing_text
from engines.protocol.types import UpdateGroup
from engines.vllm import routes, vllm_json
from engines.vllm.pauses import VllmPauses
from engines.vllm.server_report import METHODS_OF_PLUGIN, has_plugin
from engines.vllm.update_info import update_info


class VllmPushes(VllmPauses):
    """Weights, by tensors, by broadcast and from files."""

    def __init__(self, endpoint: Endpoint, **connection: Any) -> None:
        super().__init__(endpoint, **connection)
        self._version: str | None = None  # of the push that is under way
        self._flushes = False  # its last bucket has come
        self._is_own_session = False  # of a push from files, whose caller opens none
        self._baseline: WeightsReport | None = None

    async def begin_weight_update(self) -> None:
        await self._start("begin_weight_update")

    async def _start(self, operation: str) -> None:
        if self._is_own_session:  # a push from files that was given up
            await self._finish(operation)
        if not await self._is_paused(operation, self.deadlines.control_s):
            await self._pause(operation, PauseMode.RETRACT)
            self._is_own_pause = True
        await self._post(operation, routes.START_UPDATE, {}, self.deadlines.update_s)
        self._version, self._flushes = None, False

    async def end_weight_update(self) -> None:
        await self._finish("end_weight_update")

    async def _finish(self, operation: str) -> None:
        """End the session; the version is published with it, and not before."""
        version, flushes = self._version, self._flushes
        self._version, self._flushes, self._is_own_session = None, False, False
        body = {} if version is None else {"weight_version": version}
        await self._post(operation, routes.FINISH_UPDATE, body, self.deadlines.update_s)
        if flushes:
            await self._flush(operation, 0.0)
        if self._is_own_pause and (flushes or version is not None):  # otherwise it was given up
            await self._continue(operation)

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        operation = "update_weights_from_tensor"
        try:
            info = await self._info_of(serialized_named_tensors)
        except ValueError as error:
            raise self._call(operation, 0.0).rejected(
                "was not sent", status=400, body=str(error)
            ) from None
        await self._update(operation, info, flush_cache, weight_version)

    async def _info_of(self, payloads: Sequence[str]) -> Mapping[str, Any]:
        return await asyncio.to_thread(update_info, payloads)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        """One bucket of a push from files, whose session opens here; the one that flushes ends it.

        So does an error.
        """
        operation = "update_weights_from_disk"
        if not self._is_own_session:
            await self._start(operation)
            self._is_own_session = True
        try:
            await self._update(operation, {"path": model_path}, flush_cache, weight_version)
        except EngineRejected:
            self._is_own_session = False  # vLLM has closed it
            raise
        if flush_cache:
            await self._finish(operation)

    async def _update(
        self, operation: str, info: Mapping[str, Any], flushes: bool, version: str | None
    ) -> None:
        body = {"update_info": await self._with_version(info)}
        await self._post(operation, routes.UPDATE, body, self.deadlines.update_s)
        self._note_update(flushes, version)

    async def _with_version(self, info: Mapping[str, Any]) -> Mapping[str, Any]:
        """The payload with the version of the server, which encoded tensors must begin from."""
        if (await self._known_info()).raw.get("encodings"):
            return {**info, "base": encoded_from(await self.weight_version())}
        return info

    def _note_update(self, flushes: bool, version: str | None) -> None:
        self._flushes = self._flushes or flushes
        self._version = version or self._version

    async def init_weights_update_group(self, **group: Unpack[UpdateGroup]) -> None:
        await self._do("init_weights_update_group", "join", group, self.deadlines.group_s)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        operation, group = "destroy_weights_update_group", {"group_name": group_name}
        await self._do(operation, "leave", group, self.deadlines.group_s)

    async def _do(
        self, operation: str, what: str, arguments: Mapping[str, Any], budget_s: float
    ) -> None:
        """Call a method of the plugin that returns its error."""
        method, read = METHODS_OF_PLUGIN[what], vllm_json.read_errors
        if errors := await self._rpc(operation, method, read, arguments, budget_s):
            raise self._call(operation, 0.0).rejected("failed", status=400, body="; ".join(errors))

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        """One bucket, which every worker receives from the group.  vLLM closes the session at an
        error."""
        bucket = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
        }
        operation = "update_weights_from_distributed"
        arguments = await self._with_version(bucket)
        await self._do(operation, "receive", arguments, self.deadlines.update_s)
        self._note_update(flush_cache, weight_version)

    async def update_weight_version(
        self, version: str, *, abort_all_requests: bool = False
    ) -> None:
        if abort_all_requests:
            await self.abort_request()
        body = {"new_version": version}
        await self._post(
            "update_weight_version", routes.SET_VERSION, body, self.deadlines.control_s
        )

    async def weight_version(self) -> str:
        return await self._ask(
            "weight_version", routes.WEIGHT_INFO, lambda answer: str(answer["weight_version"])
        )

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        operation = "weights_checker"
        if action == "reset_tensors":
            body = {"action": "reset"}
            await self._post(operation, routes.CHECKER, body, self.deadlines.check_s)
            return WeightsReport(None)
        report = await self._checksums(operation)
        if action == "checksum":
            return report
        if action == "snapshot":
            self._baseline = report
        else:
            baseline, self._baseline = self._baseline, None
            _check_same(self._call(operation, 0.0), baseline, report)
        return WeightsReport(None)

    async def _checksums(self, operation: str) -> WeightsReport:
        if has_plugin(await self._known_info()):
            method = METHODS_OF_PLUGIN["fingerprints"]
            return await self._rpc(operation, method, vllm_json.read_fingerprints)
        call, answer = await self._post(
            operation, routes.CHECKER, {"action": "checksum"}, self.deadlines.check_s
        )
        return call.read(answer, vllm_json.read_checksums)

    async def weights_manifest(self) -> tuple[TensorInfo, ...]:
        """The engine's tensors; only the plugin lists them."""
        method = METHODS_OF_PLUGIN["manifest"]
        return await self._rpc("weights_manifest", method, vllm_json.read_manifest)


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
