"""Carry one push to many engines: session, buckets, version, flush.

Always true: a session that was begun is ended, also after a failure; a group that was joined is
left, unless the trainer keeps it for the next push and no engine failed in this one; the prefix
cache is flushed and the version set by the last bucket only; an engine that failed in between gets
no further bucket and is reported, because it now holds half of a push and must not serve; until
``on_begin`` is called no engine has been asked to change anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.config import WeightUpdate
from rollout.errors import WeightsUnavailable
from rollout.fanout import Answer, fan_out
from rollout.weights.feed import FeedAddress, FeedReader, Source, StaticSource
from rollout.weights.joining import Joiner
from rollout.weights.manifest import Manifest
from rollout.weights.transports.by_value import ByValue
from rollout.weights.transports.carrier import Carrier, Payload, PushTarget, Stage

# What a call gets when the deadline has passed: enough to close a session with.
_LEAST_BUDGET_S = 5.0
# More than that is packed in a thread: the event loop has other engines to attend to.
_MOST_INLINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WeightPush:
    """New weights on their way.

    Attributes:
        version: the weight version they make.
        manifest: every tensor in them.
        buckets: what the carrier takes, or something to await for it (a Ray ObjectRef), so that
            only one bucket is in memory at a time; empty where they come from ``feed``.
        carrier: how they reach an engine.
        feed: where the trainer hands out buckets as it makes them; None if all are here.
        contents: what of the model they bring; None: what ``weights.update`` says, and with
            ``lora`` some of its tensors.
        canary: what the trainer's own model tells of the canary's prompts; empty if it was not
            asked.
    """

    version: int
    manifest: Manifest
    buckets: Sequence[Payload | Awaitable[Payload]] = ()
    carrier: Carrier = field(default_factory=ByValue)
    feed: FeedAddress | None = None
    contents: WeightUpdate | None = None
    canary: tuple[tuple[float, ...], ...] = ()

    def read_by(self, num_groups: int) -> WeightPush:
        """The same, for so many groups: a feed must know how many will come."""
        if self.feed is None:
            return self
        return replace(self, feed=replace(self.feed, num_readers=num_groups))

    def contents_under(self, update: WeightUpdate) -> WeightUpdate:
        """What of the model they bring to a server with this ``weights.update``."""
        return self.contents or (WeightUpdate.PARTIAL if update is WeightUpdate.LORA else update)

    @property
    def is_empty(self) -> bool:
        return not self.buckets and self.feed is None


async def push_weights(
    push: WeightPush,
    targets: Mapping[str, PushTarget],
    *,
    budget_s: float,
    reader: str = "",
    on_begin: Callable[[], None] = lambda: None,
    fingerprints: dict[str, str] | None = None,
    held: dict[str, str] | None = None,
) -> dict[str, Answer[None]]:
    """Send ``push`` to all targets; answers by engine id.

    Args:
        budget_s: seconds for the whole push; an engine that is late then is reported.
        reader: who this is among those that read the same feed: the group.
        on_begin: called before the first engine is asked to change anything.
        fingerprints: filled with those of the tensors that were sent, where the trainer made any.
        held: by engine, name of the group for broadcasts that it is in; changed to what it is in
            afterwards, whatever comes of the push.

    Raises:
        WeightsUnavailable: the trainer does not hand out what it announced.
    """
    carrying = _Carrying(push, targets, budget_s, {} if held is None else held)
    return await carrying.run(reader, on_begin, {} if fingerprints is None else fingerprints)


class _Carrying:
    """One push under way."""

    def __init__(
        self,
        push: WeightPush,
        targets: Mapping[str, PushTarget],
        budget_s: float,
        held: dict[str, str],
    ) -> None:
        self._push = push
        self._targets = targets
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + budget_s
        self._failed: dict[str, Answer[None]] = {}
        self._elapsed = dict.fromkeys(targets, 0.0)
        self._held = held
        self._joined: list[str] = []

    async def run(
        self, reader: str, on_begin: Callable[[], None], fingerprints: dict[str, str]
    ) -> dict[str, Answer[None]]:
        joins = self._push.carrier.joins
        if joins:  # whoever does not answer now is left out of the group
            await self._ask("look", {one: _bind(self._look, one) for one in self._going()})
        source = self._open(reader)
        try:
            async with asyncio.timeout_at(self._deadline):
                await source.open(self._joiners() if joins else ())
            if joins:
                await self._join(source.terms)
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
            engine_id: self._failed.get(engine_id, Answer(self._elapsed[engine_id]))
            for engine_id in self._targets
        }

    def _open(self, reader: str) -> Source:
        if self._push.feed is None:
            return StaticSource(self._push.buckets)
        return FeedReader(self._push.feed, reader)

    # -- groups -----------------------------------------------------------------------------

    async def _look(self, engine_id: str) -> None:
        """Whether it answers, and is still where it was."""
        target, held = self._targets[engine_id], self._held.get(engine_id)
        await target.engine.weight_version()
        if held and target.tells_groups:
            told = (await target.engine.server_info()).update_groups
            if told is not None and held not in told:
                del self._held[engine_id]

    def _joiners(self) -> list[Joiner]:
        return [
            Joiner(
                one,
                self._targets[one].payload_copies,
                self._targets[one].process,
                self._held.get(one, ""),
                self._targets[one].takes_flat,
            )
            for one in self._going()
        ]

    async def _join(self, terms: Mapping[str, Any]) -> None:
        """All of them or none: a group lacks nobody.  No weight has changed when it fails."""
        self._joined = self._going()
        if not terms["is_new"]:
            return
        await self._leave(self._joined, terms["over"])
        first = int(terms["rank_offset"])
        joining: dict[str, Callable[[], Awaitable[Any]]] = {}
        for engine_id in self._joined:
            target = self._targets[engine_id]
            joining[engine_id] = _bind(
                self._push.carrier.join, target, {**terms, "rank_offset": first}
            )
            first += target.payload_copies
            self._held[engine_id] = terms["group_name"]
        before = len(self._failed)
        await self._ask("init_weights_update_group", joining)
        failures = [str(one.failure) for one in self._failed.values()]
        if len(failures) > before:
            raise WeightsUnavailable(
                f"the group for weight version {self._push.version} did not form: "
                f"{'; '.join(failures)}; no engine's weights have changed"
            )

    async def _leave(self, engine_ids: Sequence[str], over: str = "") -> None:
        """Have these leave the group they are in, and the one the trainer says is over."""
        leaving: dict[str, Callable[[], Awaitable[Any]]] = {}
        for engine_id in engine_ids:
            names = {self._held.pop(engine_id, ""), over} - {""}
            if names:
                leaving[engine_id] = _bind(self._leave_all, self._targets[engine_id], names)
        await self._ask("leave", leaving)

    async def _leave_all(self, target: PushTarget, names: Iterable[str]) -> None:
        for name in names:
            await self._push.carrier.leave(target, name)

    def _is_whole(self) -> bool:
        """Whether none of those that joined has failed since."""
        return not any(one in self._failed for one in self._joined)

    async def _send_all(self, source: Source) -> None:
        begun = self._going() if self._push.carrier.needs_session else []
        try:
            await self._ask("begin_weight_update", self._each(begun, _begin))
            begun = [engine_id for engine_id in begun if engine_id not in self._failed]
            async for payload, is_last in source:
                if not self._going():
                    break
                packed = await self._pack(payload)
                stage = Stage(self._push.version, is_last)
                send = self._each(self._going(), self._push.carrier.send, packed, stage)
                await self._ask("update_weights", send)
                source.keeps = bool(source.terms.get("keeps")) and self._is_whole()
        finally:
            await self._ask("end_weight_update", self._each(begun, _end))

    async def _pack(self, payload: Payload) -> Any:
        if isinstance(payload, bytes) and len(payload) > _MOST_INLINE_BYTES:
            return await asyncio.to_thread(self._push.carrier.pack, payload)
        return self._push.carrier.pack(payload)

    def _going(self) -> list[str]:
        return [engine_id for engine_id in self._targets if engine_id not in self._failed]

    def _each(
        self, wanted: Iterable[str], call: Callable[..., Awaitable[Any]], *more: Any
    ) -> dict[str, Callable[[], Awaitable[Any]]]:
        return {one: _bind(call, self._targets[one], *more) for one in wanted}

    async def _ask(self, operation: str, asks: Mapping[str, Callable[[], Awaitable[Any]]]) -> None:
        asked = await fan_out(
            asks,
            operation=operation,
            budget_s=max(self._deadline - self._clock(), _LEAST_BUDGET_S),
        )
        for engine_id, answer in asked.items():
            self._elapsed[engine_id] += answer.elapsed_s
            if answer.failure is not None:
                self._failed.setdefault(engine_id, answer)


async def _begin(target: PushTarget) -> None:
    if target.has_session:
        await target.engine.begin_weight_update()


async def _end(target: PushTarget) -> None:
    if target.has_session:
        await target.engine.end_weight_update()


def _bind(call: Callable[..., Awaitable[Any]], *given: Any) -> Callable[[], Awaitable[Any]]:
    return lambda: call(*given)


__all__ = ["PushTarget", "WeightPush", "push_weights"]
