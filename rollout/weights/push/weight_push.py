"""Sends one push to many engines: session, buckets, version, flush.

Always true: a session that was begun is ended, also after a failure; engines leave the group that
they joined, unless the trainer keeps it for the next push and no engine failed in this one; from
its first bucket until the last, an engine reports a version that no launch takes for one; only the
last bucket flushes the prefix cache and sets the version; an engine that fails gets no further
bucket and is reported, because it holds a part of the push and must not serve; no engine changes
its weights before ``on_begin`` is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from engines.protocol import unverified_text
from engines.protocol.adapter_names import engine_name
from rollout.config import WeightsConfig, WeightUpdate
from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.core.fanout import EngineReply, fan_out
from rollout.weights.format.encoding import EncodedPush
from rollout.weights.format.manifest import Manifest, check_contents
from rollout.weights.format.pushed_files import why_damaged
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.stream_reader import (
    BucketSource,
    PushStreamAddress,
    PushStreamReader,
    StaticBuckets,
)
from rollout.weights.routes.adapter import AsAdapter
from rollout.weights.routes.by_value import ByValue
from rollout.weights.routes.route import (
    BroadcastMember,
    EngineRoute,
    Payload,
    PushTarget,
    Route,
    Stage,
)

WITHOUT_KV = (
    "before_kv failed: the engines hold verified weights, have no KV cache and get no requests; "
    "free the memory and continue with serve()"
)
WITH_KV = "before_kv failed: the engines serve the new weights"
# For a request after the deadline: enough to end a session.
_LEAST_BUDGET_S = 5.0
# Larger payloads are encoded in a thread, so that they do not block the event loop.
_MOST_INLINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightPush:
    """A push of new weights.

    Attributes:
        version: the new weight version, at most ``MAX_VERSION``.
        manifest: all its tensors.
        buckets: payloads for the route, or awaitables of payloads (a Ray ObjectRef), so that only
            one bucket is in memory at a time, or empty if they come from ``stream``.
        route: sends them to an engine.
        stream: where the trainer sends buckets as it makes them, or None if ``buckets`` has all.
        contents: the part of the model that is pushed.  None means the value of
            ``weights.update``; with ``lora`` it means some of the base's tensors.
        canary: log-probs of the canary prompts from the trainer's own model, or empty if it did not
            compute them.
        checks_path: the engines compare what they hold after the push with what they held before.
        routes: engine id -> its own route, where they differ; a bucket then has several payloads.
        encoded: for copies in the store, what engines got in place of the whole tensors in
            ``buckets``, or None for nothing.
    """

    version: int
    manifest: Manifest
    buckets: Sequence[Payload | Awaitable[Payload]] = ()
    route: Route = field(default_factory=ByValue)
    stream: PushStreamAddress | None = None
    contents: WeightUpdate | None = None
    canary: tuple[tuple[float, ...], ...] = ()
    checks_path: bool = False
    routes: Mapping[str, EngineRoute] = field(default_factory=dict)
    encoded: EncodedPush | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", checked_version(self.version))

    def route_of(self, engine_id: str) -> EngineRoute | None:
        """The route of an engine, or None if it came after a push with several was planned."""
        return self.routes.get(engine_id) if self.routes else EngineRoute("", self.route)

    def read_by(self, num_groups: int) -> WeightPush:
        """The same push for so many groups: a stream waits for all of them."""
        if self.stream is None:
            return self
        return replace(self, stream=replace(self.stream, num_readers=num_groups))

    def contents_under(self, update: WeightUpdate) -> WeightUpdate:
        """The part of the model that is pushed to a server with this ``weights.update``."""
        return self.contents or default_contents(update)

    @property
    def adapter(self) -> str:
        """Name of the LoRA adapter that is pushed, or empty for none."""
        return self.route.name if isinstance(self.route, AsAdapter) else ""

    @property
    def engine_adapter(self) -> str:
        """What engines call the adapter that is pushed."""
        return engine_name(self.adapter, self.version)

    @property
    def is_empty(self) -> bool:
        return not self.buckets and self.stream is None


def default_contents(update: WeightUpdate) -> WeightUpdate:
    """What tensors under the model's names are, to a server with this ``weights.update``."""
    return WeightUpdate.PARTIAL if update is WeightUpdate.LORA else update


def check_fits(
    push: WeightPush,
    server: str,
    weights: WeightsConfig,
    why_not_newer: str,
    expected: Manifest | None,
) -> None:
    """Raise if this server could not load a push, or would load it wrongly.

    Args:
        weights: the server's settings.
        why_not_newer: why it cannot have its version.
        expected: the tensors of its model, or None if the checkpoint has no manifest.

    Raises:
        WeightMismatch: the reason; nothing was sent.
    """
    update = weights.update
    if update is WeightUpdate.FROZEN:
        raise WeightMismatch(f"server {server} is frozen: its weights are never updated")
    if why_not_newer:
        raise WeightMismatch(why_not_newer)
    if push.is_empty:
        raise WeightMismatch(f"the push of weight version {push.version} holds no tensors")
    contents = push.contents_under(update)
    if contents is not update and update is not WeightUpdate.LORA:
        raise WeightMismatch(
            f"a push of contents {contents!s} to server {server}, whose weights.update is "
            f"{update!s}: only with lora are adapters pushed, and the base under them"
        )
    check_contents(push.manifest, expected, weights, contents)


async def push_weights(
    push: WeightPush,
    targets: Mapping[str, PushTarget],
    *,
    budget_s: float,
    reader: str = "",
    on_begin: Callable[[], None] = lambda: None,
    fingerprints: dict[str, str] | None = None,
    groups: dict[str, str] | None = None,
) -> dict[str, EngineReply[None]]:
    """Send ``push`` to all targets that have a route; returns their replies by engine id.

    Args:
        budget_s: seconds for the whole push; a late engine is reported as failed.
        reader: name of this group among the readers of the stream.
        on_begin: called before the first engine changes its weights.
        fingerprints: filled with those of the tensors sent, if the trainer computed them.
        groups: engine id -> name of its broadcast group; updated, also if the push fails.

    Raises:
        WeightsUnavailable: the trainer does not send the buckets.
    """
    run = _PushRun(push, targets, budget_s, {} if groups is None else groups)
    return await run.run(reader, on_begin, {} if fingerprints is None else fingerprints)


class _PushRun:
    """One push while it runs."""

    def __init__(
        self,
        push: WeightPush,
        targets: Mapping[str, PushTarget],
        budget_s: float,
        groups: dict[str, str],
    ) -> None:
        self._push = push
        self._targets = targets
        self._routes = {
            engine_id: found for engine_id in targets if (found := push.route_of(engine_id))
        }
        self._clock = asyncio.get_running_loop().time
        self._budget_s = budget_s
        self._deadline = self._clock() + budget_s
        self._failed: dict[str, EngineReply[None]] = {}
        self._elapsed = dict.fromkeys(targets, 0.0)
        self._groups = groups
        self._joined: list[str] = []

    async def run(
        self, reader: str, on_begin: Callable[[], None], fingerprints: dict[str, str]
    ) -> dict[str, EngineReply[None]]:
        # An engine that does not reply is left out of the group.
        checks = {engine_id: partial(self._check_group, engine_id) for engine_id in self._joiners()}
        await self._call("look", checks)
        source = self._open(reader)
        try:
            await self._begin(source)
            if joiners := self._joiners():
                await self._join(joiners, source.terms)
            on_begin()
            await self._send_all(source)
        except BaseException:
            source.keeps = False
            raise
        finally:
            await source.close()
            if not (source.keeps and self._is_whole()):
                await self._leave(self._joined)
        fingerprints.update(self._push.manifest.fingerprints)
        fingerprints.update(source.fingerprints)
        return {
            engine_id: self._failed.get(engine_id, EngineReply(self._elapsed[engine_id]))
            for engine_id in self._routes
        }

    async def _begin(self, source: BucketSource) -> None:
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                await source.open(self._members())
        except TimeoutError:
            if not limit.expired():
                raise
            raise WeightsUnavailable(
                f"weight version {self._push.version}: its source had not begun when the "
                f"{self._budget_s:g} s of the push were over; no engine's weights have changed"
            ) from None

    def _open(self, reader: str) -> BucketSource:
        if self._push.stream is None:
            return StaticBuckets(self._push.buckets)
        return PushStreamReader(self._push.stream, reader)

    # -- groups -----------------------------------------------------------------------------

    async def _check_group(self, engine_id: str) -> None:
        """Check that an engine replies, and whether it still is in its group."""
        target, name = self._targets[engine_id], self._groups.get(engine_id)
        await target.engine.weight_version()
        if name and target.reports_groups:
            groups = (await target.engine.server_info()).update_groups
            if groups is not None and name not in groups:
                del self._groups[engine_id]

    def _members(self) -> list[BroadcastMember]:
        return [
            BroadcastMember(
                engine_id,
                self._targets[engine_id].payload_copies,
                self._targets[engine_id].process,
                self._groups.get(engine_id, ""),
            )
            for engine_id in self._joiners()
        ]

    def _joiners(self) -> list[str]:
        return [engine_id for engine_id in self._active() if self._route(engine_id).joins]

    async def _join(self, joiners: list[str], terms: Mapping[str, Any]) -> None:
        """All engines join, or none. If it fails, no weights have changed."""
        self._joined = joiners
        if not terms["is_new"]:
            return
        await self._leave(self._joined, terms["over"])
        first = int(terms["rank_offset"])
        joining: dict[str, Callable[[], Awaitable[Any]]] = {}
        for engine_id in self._joined:
            target = self._targets[engine_id]
            joining[engine_id] = partial(
                self._route(engine_id).join, target, {**terms, "rank_offset": first}
            )
            first += target.payload_copies
            self._groups[engine_id] = terms["group_name"]
        before = len(self._failed)
        await self._call("init_weights_update_group", joining)
        failures = [str(reply.failure) for reply in self._failed.values()]
        if len(failures) > before:
            raise WeightsUnavailable(
                f"the group for weight version {self._push.version} did not form: "
                f"{'; '.join(failures)}; no engine's weights have changed"
            )

    async def _leave(self, engine_ids: Sequence[str], over: str = "") -> None:
        """Make engines leave their group, and the one that the trainer has closed."""
        leaving: dict[str, Callable[[], Awaitable[Any]]] = {}
        for engine_id in engine_ids:
            if names := {self._groups.pop(engine_id, ""), over} - {""}:
                leaving[engine_id] = partial(self._leave_all, engine_id, names)
        await self._call("leave", leaving)

    async def _leave_all(self, engine_id: str, names: Iterable[str]) -> None:
        for name in names:
            await self._route(engine_id).leave(self._targets[engine_id], name)

    def _is_whole(self) -> bool:
        """Whether no engine that joined has failed."""
        return not any(engine_id in self._failed for engine_id in self._joined)

    async def _send_all(self, source: BucketSource) -> None:
        begun = [engine_id for engine_id in self._active() if self._route(engine_id).needs_session]
        try:
            await self._call("begin_weight_update", self._each(begun, _begin))
            begun = [engine_id for engine_id in begun if engine_id not in self._failed]
            is_first = True
            async for payload, is_last in self._in_time(source):
                if not self._active():
                    break
                await self._check_files(payload, source)
                packed = await self._pack(payload)
                if is_first:  # of a push without a bucket, the engines keep their version
                    names = self._each(self._active(), self._name_unverified)
                    await self._call("update_weight_version", names)
                    is_first = False
                stage = Stage(self._push.version, is_last, self._push.checks_path)
                await self._call("update_weights", self._sends(packed, stage))
                source.keeps = bool(source.terms.get("keeps")) and self._is_whole()
        finally:
            await self._call("end_weight_update", self._each(begun, _end))

    async def _in_time(self, source: BucketSource) -> AsyncIterator[tuple[Payload, bool]]:
        """The buckets of a source, each of which has until the deadline of the push.

        Raises:
            WeightsUnavailable: one is late.
        """
        buckets, index = aiter(source), 0
        while True:
            try:
                async with asyncio.timeout_at(self._deadline) as limit:
                    bucket = await anext(buckets)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not limit.expired():
                    raise
                raise WeightsUnavailable(
                    f"weight version {self._push.version}: bucket {index} was not there when the "
                    f"{self._budget_s:g} s of the push were over; see what its source waits for"
                ) from None
            yield bucket
            index += 1

    async def _name_unverified(self, target: PushTarget) -> None:
        """Name what a push leaves that ends early, whatever ends then."""
        held = None if self._push.checks_path else target.weight_version
        await target.engine.update_weight_version(unverified_text(self._push.version, held))

    def _sends(
        self, packed: Mapping[str, Any], stage: Stage
    ) -> dict[str, Callable[[], Awaitable[Any]]]:
        return {
            engine_id: partial(
                engine_route.route.send,
                self._targets[engine_id],
                packed[engine_route.payload],
                stage,
            )
            for engine_id in self._active()
            if (engine_route := self._routes[engine_id]).payload in packed
        }

    async def _check_files(self, payload: Payload, source: BucketSource) -> None:
        """Compare what is in the files of a bucket with what the trainer wrote.

        Raises:
            WeightsUnavailable: it differs; the engines have not loaded it.
        """
        parts = self._parts(payload)
        folders = {
            parts[engine_route.payload]["path"]
            for engine_id in self._active()
            if (engine_route := self._routes[engine_id]).route.loads_files
            and engine_route.payload in parts
            if not self._targets[engine_id].is_compared
        }
        fingerprints = {**self._push.manifest.fingerprints, **source.fingerprints}
        for folder in folders:
            if why := await asyncio.to_thread(why_damaged, Path(folder), fingerprints):
                version = self._push.version
                raise WeightsUnavailable(
                    f"{why}; no engine has loaded it. Push weight version {version} again"
                )

    def _parts(self, payload: Payload) -> Mapping[str, Any]:
        """What the engines get of a bucket, by the names of the payloads."""
        parts = payload if self._push.routes else {"": payload}
        if not isinstance(parts, Mapping):
            raise WeightMismatch("a push with several routes has a mapping of payloads, not bytes")
        return parts

    async def _pack(self, payload: Payload) -> Mapping[str, Any]:
        """A bucket as it is sent, by the names of its payloads."""
        parts = self._parts(payload)
        routes = {
            engine_route.payload: engine_route.route for engine_route in self._routes.values()
        }
        pack = partial(_packed, {name: parts[name] for name in routes if name in parts}, routes)
        return await asyncio.to_thread(pack) if _is_large(parts.values()) else pack()

    def _route(self, engine_id: str) -> Route:
        return self._routes[engine_id].route

    def _active(self) -> list[str]:
        return [engine_id for engine_id in self._routes if engine_id not in self._failed]

    def _each(
        self, wanted: Iterable[str], call: Callable[..., Awaitable[Any]]
    ) -> dict[str, Callable[[], Awaitable[Any]]]:
        return {engine_id: partial(call, self._targets[engine_id]) for engine_id in wanted}

    async def _call(
        self, operation: str, calls: Mapping[str, Callable[[], Awaitable[Any]]]
    ) -> None:
        replies = await fan_out(
            calls,
            operation=operation,
            budget_s=max(self._deadline - self._clock(), _LEAST_BUDGET_S),
        )
        for engine_id, reply in replies.items():
            self._elapsed[engine_id] += reply.elapsed_s
            if reply.failure is not None:
                self._failed.setdefault(engine_id, reply)


def _packed(parts: Mapping[str, Payload], routes: Mapping[str, Route]) -> dict[str, Any]:
    return {name: routes[name].pack(part) for name, part in parts.items()}


def _is_large(payloads: Iterable[Payload]) -> bool:
    values: list[Any] = []
    for payload in payloads:
        values += [payload] if isinstance(payload, bytes) else payload.values()
    return any(isinstance(value, bytes) and len(value) > _MOST_INLINE_BYTES for value in values)


async def _begin(target: PushTarget) -> None:
    if target.has_session:
        await target.engine.begin_weight_update()


async def _end(target: PushTarget) -> None:
    if target.has_session:
        await target.engine.end_weight_update()


__all__ = ["PushTarget", "WeightPush", "push_weights"]
