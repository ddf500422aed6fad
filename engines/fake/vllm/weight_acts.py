"""Weights and adapters of a fake vLLM: sessions, buckets, and the calls of the plugin."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.engine.fake_weights import FatalCall, tensors_in_file, unpack_tensors
from engines.protocol.errors import EngineRejected
from engines.tensors.flattened_bucket import FLATTENED_BUCKET, lay_out

Json = dict[str, Any]
Arguments = Mapping[str, Any]
_OPERATIONS = {
    "path": "update_weights_from_disk",
    "broadcast": "update_weights_from_distributed",
}
"""The call that a bucket is, by what the plugin's ``update_info`` has; else it is by tensor."""
_RANK = "dp0:pp0:pcp0:tp0:"
_PICKLE = b"\x80"


class FakeVllmWeights(FakeEngine):
    """The part of ``FakeVllm`` that a push changes.

    Args:
        has_plugin: this package's plugin is in its workers.
        state: as ``FakeEngine`` takes it.
    """

    def __init__(self, engine_id: str = "fake-0", *, has_plugin: bool = True, **state: Any) -> None:
        super().__init__(engine_id, **state)
        self.has_plugin = has_plugin

    async def _start_update(self, arguments: Arguments) -> Json:
        operation = "begin_weight_update"
        async with self._call(operation):
            if self.is_updating:
                why = "start_weight_update called while a weight update is already active"
                raise self._rejected(operation, why, 500)
            self._require_weights("start an update")
            self.is_updating = True
        return {"message": "Weight update started"}

    async def _update(self, arguments: Arguments) -> Json:
        """What the push does not name keeps its contents, and nothing says so."""
        info = arguments["update_info"]
        by = info.keys() & _OPERATIONS.keys()
        operation = _OPERATIONS[by.pop()] if by else "update_weights_from_tensor"
        async with self._call(operation, weight_version=None):
            self._require_weights("update")
            if not self.is_updating:
                raise self._rejected(operation, "start_weight_update must be called before", 500)
            try:
                self._load(info)
            except FatalCall as error:  # half of the push stays
                self.is_updating = False
                raise self._rejected(operation, str(error), 500) from None
        return {"message": "Weights updated"}

    def _load(self, info: Arguments) -> None:
        """Raises FatalCall for what the plugin refuses."""
        if "path" in info:
            self.weights.load_path(info["path"])
            return
        broadcast = info.get("broadcast")
        pairs = self._broadcast(broadcast) if broadcast else _tensors_of(info["content"])
        if unknown := sorted(name for name, _ in pairs if name not in self.weights.tensors):
            raise FatalCall(f"the model has no tensor {unknown[0]}")
        self.weights.write(pairs)

    def _broadcast(self, bucket: Arguments) -> list[tuple[str, Any]]:
        """No numbers are sent to a fake: the name of the group stands for the contents."""
        names, group_name = bucket["names"], bucket["group_name"]
        if bucket["load_format"] == FLATTENED_BUCKET:
            try:
                lay_out(names, bucket["dtypes"], bucket["shapes"])
            except ValueError as error:
                raise FatalCall(str(error)) from None
        if why := self._why_outside(group_name):
            raise FatalCall(why)
        return [(name, f"{name}@{group_name}") for name in names]

    async def _finish_update(self, arguments: Arguments) -> Json:
        operation, version = "end_weight_update", arguments.get("weight_version")
        async with self._call(operation, weight_version=version):
            if not self.is_updating:
                raise self._rejected(operation, "no weight update is active", 500)
            self._require_weights("finish an update")
            self.is_updating = False
            self._version = version or self._version
            self.is_cache_stale = True
        return {"message": "Weight update finished"}

    async def _set_version(self, arguments: Arguments) -> Json:
        version = arguments["new_version"]
        async with self._call("update_weight_version", version=version):
            self._version = version
        return {"success": True, "new_version": version}

    async def _check(self, arguments: Arguments) -> Json:
        action = arguments["action"]
        async with self._call("weights_checker", action=action):
            self._require_weights("check weights")
            if action == "reset":
                self.weights.lose()
                return {"status": "reset"}
            return {"checksums": {_RANK + name: one for name, one in self.weights.digests.items()}}

    async def _rpc(self, arguments: Arguments) -> Json:
        method = arguments["method"]
        if method == "rollout_receive_bucket" and self.has_plugin:
            return await self._receive(arguments["kwargs"])
        methods: dict[str, tuple[str, Callable[..., Any]]] = {
            "rollout_fingerprints": ("weights_checker", self._tell_fingerprints),
            "rollout_manifest": ("weights_manifest", self._tell_manifest),
            "rollout_state": ("server_state", self._tell_state),
            "rollout_join_group": ("init_weights_update_group", self._join_group),
            "rollout_leave_group": ("destroy_weights_update_group", self._leave_group),
        }
        found = methods.get(method)
        if found is None or not self.has_plugin:
            raise self._rejected("collective_rpc", f"no method {method!r}", 500)
        operation, act = found
        given = arguments.get("kwargs", {})
        more = {name: given[name] for name in ("group_name",) if name in given}
        if operation == "weights_checker":
            more["action"] = "checksum"
        async with self._call(operation, **more):
            return {"results": [act(**given)]}

    async def _receive(self, bucket: Arguments) -> Json:
        """An update whose error is the worker's answer."""
        try:
            await self._update({"update_info": {"broadcast": bucket}})
        except EngineRejected as error:
            return {"results": [{"error": error.body or str(error)}]}
        return {"results": [{"error": ""}]}

    def _join_group(self, group_name: str, **where: Any) -> Json:
        if group_name in self.groups:
            return {"error": f"weight update group {group_name!r} exists already"}
        self.groups.add(group_name)
        return {"error": ""}

    def _leave_group(self, group_name: str) -> Json:
        if why := self._why_outside(group_name):
            return {"error": why}
        self.groups.remove(group_name)
        return {"error": ""}

    def _why_outside(self, group_name: str) -> str:
        return "" if group_name in self.groups else f"no weight update group {group_name!r}"

    def _tell_fingerprints(self) -> Any:
        self._require_weights("check weights")
        return {"checksums": dict(self.weights.digests), "num_bytes": 0}

    def _tell_manifest(self) -> Any:
        return [
            {"name": one.name, "dtype": one.dtype, "shape": one.shape, "is_tied": one.is_tied}
            for one in self.weights.tensors.values()
        ]

    def _tell_state(self) -> Any:
        reports = self.settings.reports_memory or self.settings.reports_released
        counts_memory = self.settings.memory_saver and reports
        return {
            "released": sorted(self.released) if self.settings.reports_released else [],
            "resident_bytes": self.bytes_by_tag() if counts_memory else {},
            "fingerprints": self.settings.fingerprints,
            "opens_handles": False,
            "groups": sorted(self.groups),
        }

    # Adapters

    async def _load_lora(self, arguments: Arguments) -> Json:
        operation = "load_lora_adapter"
        async with self._call(operation, name=arguments["lora_name"]):
            self._load_adapter(operation, arguments["lora_name"], arguments["lora_path"])
        return {}

    async def _unload_lora(self, arguments: Arguments) -> Json:
        operation, name = "unload_lora_adapter", arguments["lora_name"]
        async with self._call(operation, name=name):
            if self.adapters.pop(name, None) is None:
                raise self._rejected(operation, f"no adapter {name!r} is loaded", 404)
        return {}


def _tensors_of(content: str) -> list[tuple[str, Any]]:
    """Tensors of a safetensors file; or of fakes, which no such file holds.

    Raises:
        FatalCall: it is neither.
    """
    try:
        data = base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise FatalCall(f"the content is not base64: {error}") from None
    if data.startswith(_PICKLE):
        return unpack_tensors(content)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "content.safetensors"
        file.write_bytes(data)
        return list(tensors_in_file(file))
