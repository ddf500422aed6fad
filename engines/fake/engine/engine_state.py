"""State of a fake engine (memory by tag, weights, adapters), and the calls that change it.

Always true: with a memory saver, weights are read and written only while their memory is there;
any other access ends the engine.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from engines.fake.engine.calls import CallHandler
from engines.fake.engine.fake_caches import FakeCaches
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, FakeWeights, digest_of, unpack_tensors
from engines.fake.engine.request import FakeRequest
from engines.protocol import MemoryTag, PauseMode, TensorInfo, WeightsReport
from engines.protocol.plain_text import differing_text
from engines.protocol.types import UpdateGroup
from engines.tensors.fingerprint import BYTES
from engines.tensors.flattened_bucket import FLATTENED_BUCKET, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSettings:
    """What a fake engine is started with.

    Attributes:
        memory_saver: a release gives memory back.
        weights_cpu_backup: its weights outlive a release.
        memory_bytes: what it holds, a third of it for each tag.
        needs_session: weights are updated between begin and end only (SGLang 0.5.21 and later).
        token_s: seconds each token takes; a real engine answers nothing at once.
        drain_s: seconds until an aborted request has left.
        vocab_size: token ids it knows.
        context_length: tokens a prompt must be shorter than; None takes any.
        eos_token_id: the token that ends an output, or None for a model that has none.
        reports_released: it reports the released tags and its update groups, as the embedded engine
            does and SGLang does not.
        reports_manifest: it lists its tensors, as the embedded engine does and SGLang does not.
        reports_memory: it reports the memory of each tag, as engines on a GPU do.
        understands_images: its model does.
        fingerprints: the method of its fingerprints, or empty as SGLang's, which no trainer makes.
        draft: the path of its draft model, or empty for none.
    """

    memory_saver: bool = True
    weights_cpu_backup: bool = False
    memory_bytes: int = 3_000
    needs_session: bool = True
    token_s: float = 0.001
    drain_s: float = 0.0
    vocab_size: int = 1000
    context_length: int | None = None
    eos_token_id: int | None = None
    reports_released: bool = False
    reports_manifest: bool = False
    reports_memory: bool = False
    understands_images: bool = False
    fingerprints: str = BYTES
    draft: str = ""


class FakeEngineState(CallHandler):
    """The part of ``FakeEngine`` that outlasts a request.

    Args:
        tensors: the model's tensors.
        settings: those of ``FakeSettings``.

    Attributes:
        caches: what it has of its weights after a request.
        paused: the mode of the pause, or None while it serves.
        in_flight: admitted requests, by id.
        released: tags whose memory is given back.
        is_cache_stale: the prefix cache holds entries of older weights.
        groups: weight update groups it has joined and not left.
        is_updating: a weight update session is open.
        adapters: loaded LoRA adapters, name -> a digest of its contents.
        computes_nan: the log-probs of its tokens are NaN, as with damaged weights.
        random_seed: drawn at its start, as SGLang does.
    """

    def __init__(
        self,
        engine_id: str = "fake-0",
        *,
        model_path: str = "/models/fake",
        tensors: Sequence[TensorInfo] = DEFAULT_TENSORS,
        weight_version: str = "0",
        caches: FakeCaches | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(engine_id)
        self.caches = caches or FakeCaches()
        self.settings = FakeSettings(**settings)
        self.paused: PauseMode | None = None
        self.in_flight: dict[str, FakeRequest] = {}
        self.released: set[MemoryTag] = set()
        self.is_cache_stale = False
        self.weights = FakeWeights(tensors, model_path)
        self.adapters: dict[str, str] = {}
        self.computes_nan = False
        self.random_seed = secrets.randbits(30)
        self.is_updating = False
        self.groups: set[str] = set()
        self._model_path = model_path
        self._version = weight_version
        self._snapshot: dict[str, str] = {}

    # For tests: facts out

    @property
    def weights_are_garbage(self) -> bool:
        """Whether any tensor's contents were lost and not written again."""
        return bool(self.weights.lost)

    @property
    def resident_bytes(self) -> int:
        """Memory it holds: a third of the whole per tag."""
        if self.is_dead:
            return 0
        return sum(self.bytes_by_tag().values()) + self.settings.memory_bytes % len(MemoryTag)

    def bytes_by_tag(self) -> dict[str, int]:
        """What it holds for each tag now."""
        released = self.released if self.settings.memory_saver else set()
        held = self.settings.memory_bytes // len(MemoryTag)
        return {tag: 0 if tag in released else held for tag in MemoryTag}

    @property
    def _num_holding_kv(self) -> int:
        """Requests whose KV cache is in memory."""
        return 0 if self.paused is PauseMode.RETRACT else len(self.in_flight)

    def _garble(self) -> None:
        self.weights.garble()

    # Memory

    async def release_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        async with self._call("release_memory_occupation", tags=tuple(tags)):
            wanted = set(tags) or set(MemoryTag)
            if self._num_holding_kv:
                self._assert(False, f"release while {self._num_holding_kv} requests run")
            if self.settings.memory_saver:
                self._assert(not wanted & self.released, "release of a tag twice")
                self.released |= wanted

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        async with self._call("resume_memory_occupation", tags=tuple(tags)):
            wanted = set(tags) or set(MemoryTag)
            if self.settings.memory_saver:
                self._assert(wanted <= self.released, "resume of a tag that is not released")
                self.released -= wanted
                if MemoryTag.WEIGHTS in wanted and not self.settings.weights_cpu_backup:
                    self.weights.lose()

    # Weights

    async def begin_weight_update(self) -> None:
        async with self._call("begin_weight_update"):
            if self.is_updating:
                raise self._rejected("begin_weight_update", "a weight update is already open")
            self.is_updating = True

    async def end_weight_update(self) -> None:
        async with self._call("end_weight_update"):
            if not self.is_updating:
                raise self._rejected("end_weight_update", "no weight update is open")
            self.is_updating = False

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        operation = "update_weights_from_tensor"
        async with self._call(operation, flush_cache=flush_cache, weight_version=weight_version):
            self._require_session(operation)
            self._assert(bool(serialized_named_tensors), "too few payloads")
            pairs = unpack_tensors(serialized_named_tensors[0])
            await self._write(operation, pairs, flush_cache, weight_version)

    async def init_weights_update_group(self, **group: Unpack[UpdateGroup]) -> None:
        operation, group_name = "init_weights_update_group", group["group_name"]
        async with self._call(operation, group_name=group_name):
            if group_name in self.groups:
                raise self._rejected(operation, f"group {group_name!r} has already been created")
            self.groups.add(group_name)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        async with self._call("destroy_weights_update_group", group_name=group_name):
            self._require_group("destroy_weights_update_group", group_name)
            self.groups.remove(group_name)

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
        operation = "update_weights_from_distributed"
        rest = {"load_format": load_format, "weight_version": weight_version}
        async with self._call(operation, group_name=group_name, flush_cache=flush_cache, **rest):
            self._require_session(operation)
            self._require_group(operation, group_name)
            if load_format == FLATTENED_BUCKET:
                try:
                    lay_out(names, dtypes, shapes)
                except ValueError as error:
                    why = f"Failed to receive weights: {error}"
                    raise self._rejected(operation, why) from None
            # No numbers are sent to a fake: the version stands for the contents.
            pairs = [(name, f"{name}@{weight_version}") for name in names]
            await self._write(operation, pairs, flush_cache, weight_version)

    async def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, weight_version: str | None = None
    ) -> None:
        operation = "update_weights_from_disk"
        async with self._call(operation, model_path=model_path, weight_version=weight_version):
            await self._write(operation, [], flush_cache, weight_version)
            self.weights.load_path(model_path)
            self.caches.copy(self.weights)
            self._model_path = model_path

    async def weight_version(self) -> str:
        async with self._call("weight_version"):
            return self._version

    async def weights_checker(self, action: str = "checksum") -> WeightsReport:
        async with self._call("weights_checker", action=action):
            self._require_weights("check weights")
            if action == "snapshot":
                self._snapshot = dict(self.weights.digests)
            elif action == "compare":
                self._compare()
            elif action == "reset_tensors":
                self.weights.lose()
            elif action == "checksum":
                return WeightsReport(self.weights.checksum(), (dict(self.weights.digests),))
            else:
                raise self._rejected("weights_checker", f"unknown action {action!r}")
            return WeightsReport(None)

    def _compare(self) -> None:
        if not self._snapshot:
            raise self._rejected("weights_checker", "no snapshot to compare with")
        now = self.weights.digests
        if different := [name for name in now if now[name] != self._snapshot.get(name)]:
            raise self._rejected("weights_checker", differing_text(different))
        self._snapshot = {}

    async def weights_manifest(self) -> tuple[TensorInfo, ...]:
        async with self._call("weights_manifest"):
            return tuple(self.weights.tensors.values())

    # LoRA

    async def load_lora_adapter(self, name: str, path: str) -> None:
        async with self._call("load_lora_adapter", name=name):
            self._load_adapter("load_lora_adapter", name, path)

    async def load_lora_adapter_from_tensors(
        self, name: str, config: Mapping[str, Any], serialized_named_tensors: Sequence[str]
    ) -> Mapping[str, str]:
        async with self._call("load_lora_adapter_from_tensors", name=name):
            content = digest_of(tuple(serialized_named_tensors))
            self._load_adapter("load_lora_adapter_from_tensors", name, content)
            return {}

    async def unload_lora_adapter(self, name: str) -> None:
        async with self._call("unload_lora_adapter", name=name):
            if self.adapters.pop(name, None) is None:
                raise self._rejected("unload_lora_adapter", f"no adapter {name!r} is loaded")

    # What refuses a call

    def _require_session(self, operation: str) -> None:
        if self.settings.needs_session and not self.is_updating:
            raise self._rejected(operation, "weights are updated only after begin_weight_update")

    def _require_group(self, operation: str, group_name: str) -> None:
        if group_name not in self.groups:
            raise self._rejected(operation, f"no weight update group {group_name!r}")

    def _require_weights(self, what: str) -> None:
        self._assert(MemoryTag.WEIGHTS not in self.released, f"{what} while weights are released")

    # What calls do

    def _load_adapter(self, operation: str, name: str, source: str) -> None:
        if name in self.adapters:
            raise self._rejected(operation, f"adapter {name!r} is already loaded")
        self._require_weights("load an adapter")
        self.adapters[name] = source

    async def _write(
        self,
        operation: str,
        pairs: Sequence[tuple[str, Any]],
        flush_cache: bool,
        weight_version: str | None,
    ) -> None:
        self._require_weights("update")
        await self._until(lambda: self.paused is not None or not self.in_flight)
        self.weights.write(pairs)
        self.caches.copy(self.weights)
        self._version = weight_version or self._version
        self.is_cache_stale = not flush_cache
        if flush_cache:
            self.caches.flush()
        if flush_cache and self._num_holding_kv:
            self.is_cache_stale = True
            raise self._rejected(operation, "weights changed, but the cache was not flushed")
