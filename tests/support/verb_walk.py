"""Random sequences of all public verbs of a server, with kills, restarts and repeated commands.

Always true, checked after every verb: while the gate is open, every engine that gets requests holds
what was pushed under the published version.  At the end of a sequence some documented call leads to
that state again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from rollout.core.errors import RolloutError, WeightMismatch
from rollout.core.types import ServerStatus

# What a verb does, and how often it is chosen.
VERBS: Mapping[str, int] = {
    "offload": 6,
    "push": 12,
    "serve": 3,
    "pause_generation": 2,
    "flush_cache": 2,
    "release_memory_occupation": 2,
    "onload_weights": 2,
    "update_weights": 3,
    "verify": 2,
    "onload_kv": 2,
    "continue_generation": 4,
    "remove": 1,
    "add": 2,
    "again": 6,
    "kill": 4,
    "kill all": 3,
    "fault": 4,
    "wait": 8,
}
PUSHES = ("push", "update_weights")
OPENING = ("push", "serve", "continue_generation")


class Rig(Protocol):
    """A server and its engines, as a walk drives them."""

    async def call(self, verb: str, push: Any = None, engine_id: str = "") -> None:
        """One public verb of the server."""

    def push(self, version: int, contents: int) -> Any:
        """A push of these contents."""

    async def status(self) -> ServerStatus: ...

    async def kill(self, engine_ids: Collection[str]) -> None:
        """``kill -9`` of these engines."""

    def plan_fault(self, engine_id: str, random: Random) -> str:
        """Plan a fault of a call of this engine; says which, or is empty."""

    def clear_faults(self) -> None:
        """Drop the faults that have not struck."""

    async def wait(self) -> None:
        """Give recovery time."""

    async def held(self, contents: int) -> dict[str, bool]:
        """The living engines that get requests, and whether each holds these contents."""


@dataclass
class VerbWalk:
    """One sequence.

    Attributes:
        log: what was done, and how it ended.
        contents: of each version, those that may have been pushed last.
        served: the versions at which the gate was open.
        killed: engines that were killed since recovery last had time.
    """

    rig: Rig
    random: Random
    log: list[str] = field(default_factory=list)
    contents: dict[int, set[int]] = field(default_factory=lambda: {0: {0}})
    served: set[int] = field(default_factory=set)
    killed: set[str] = field(default_factory=set)
    _last: tuple[str, int, int, str] | None = None

    async def run(self, num_steps: int) -> None:
        try:
            for _ in range(num_steps):
                (verb,) = self.random.choices(list(VERBS), list(VERBS.values()))
                await self._step(verb)
                await self._check()
            await self._lead_out()
        except AssertionError as error:
            story = "\n".join(f"  {line}" for line in self.log)
            raise AssertionError(f"{error}\n{story}") from error

    # -- one verb ---------------------------------------------------------------------------

    async def _step(self, verb: str) -> None:
        status = await self.rig.status()
        engines = [engine.engine_id for group in status.groups for engine in group.engines]
        vacant = [slot for group in status.groups for slot in group.vacant_slots]
        chosen = self.random.choice(vacant if verb == "add" and vacant else engines or vacant)
        match verb:
            case "wait":
                self.log.append(verb)
                await self.rig.wait()
                self.killed.clear()
            case "kill" | "kill all" | "fault" if not engines:
                pass
            case "kill" | "kill all":
                killed = engines if verb == "kill all" else [chosen]
                self.log.append(f"kill {', '.join(killed)}")
                await self.rig.kill(killed)
                self.killed.update(killed)
            case "fault":
                if planned := self.rig.plan_fault(chosen, self.random):
                    self.log.append(f"fault: {planned}")
            case "again":
                if self._last is not None:
                    await self._call(*self._last)
            case _:
                version, contents = self._new_push(status.weight_version)
                await self._call(verb, version, contents, chosen)

    def _new_push(self, published: int) -> tuple[int, int]:
        """Mostly a newer version; sometimes the same, with the same contents or not, or older."""
        kind = self.random.choices(("newer", "same", "other", "older"), (10, 3, 1, 1))[0]
        version = {"newer": published + 1, "older": published - 1}.get(kind, published)
        version = max(0, version)
        return version, version + (1001 if kind == "other" else 0)

    async def _call(self, verb: str, version: int, contents: int, engine_id: str) -> bool:
        is_push = verb in PUSHES
        self._last = verb, version, contents, engine_id
        push = self.rig.push(version, contents) if is_push else None
        before = await self.rig.status()
        what = f"{verb} {f'{version} ({contents})' if is_push else ''}".strip()
        is_sent = True
        try:
            await self.rig.call(verb, push, engine_id)
            how = "done"
        except RolloutError as error:
            how = f"{type(error).__name__}: {error}"[:300]
            is_sent = not isinstance(error, WeightMismatch)
        self.log.append(f"{what}: {how}")
        if "not newer" in how and version and version == before.weight_version:
            assert version in self.served, f"version {version} is refused, and has not served"
        elif is_push and how == "done" and version in self.served:
            assert contents in self.contents[version], f"version {version} has other contents now"
        elif how == "done" and verb in OPENING and (is_push or not self._is_unnoticed(before)):
            after = await self.rig.status()
            assert after.gate != "open" or _holders(after), f"{verb}: done, and no engine serves"
        if is_push and is_sent:
            known = set() if how == "done" else self.contents.get(version, set())
            self.contents[version] = known | {contents}
        return how == "done"

    def _is_unnoticed(self, before: ServerStatus) -> bool:
        """The only engines were killed, and a command that calls no engine may not notice it."""
        holders = _holders(before)
        return bool(holders) and self.killed.issuperset(holders)

    # -- what must hold ---------------------------------------------------------------------

    async def _check(self) -> None:
        status = await self.rig.status()
        if status.gate != "open":
            return
        version = status.weight_version
        self.served.add(version)
        for contents in sorted(self.contents[version]):
            if all((await self.rig.held(contents)).values()):
                return
        raise AssertionError(
            f"engines serve version {version}, and do not hold {self.contents[version]}: "
            f"{await self.rig.held(min(self.contents[version]))}"
        )

    async def _lead_out(self) -> None:
        """No dead end: repeat, push again, or the next step."""
        self.log.append("-- which call leads out?")
        self.rig.clear_faults()
        await self.rig.wait()
        if self.random.random() < 0.5:
            await self._one_call()
            return
        ways: list[Callable[[], Awaitable[None]]] = [self._nothing, self._add, self._repeat]
        # Twice: a group whose engines were all removed while offloaded is onloaded, then filled.
        for way in [*ways, self._push_again, self._next_step] * 2:
            await way()
            await self.rig.wait()
            await self._check()
            if await self._serves():
                return
        raise AssertionError(f"no call leads out: {await self.rig.status()}")

    async def _one_call(self) -> None:
        """Whatever the state was: memory is given, and newer weights serve."""
        await self._add()
        if self.random.random() < 0.5:
            assert await self._call("offload", 0, 0, ""), "offload failed"
            for group in (await self.rig.status()).groups:
                assert group.phase == "offloaded" or not group.needs_offload, group
        version = (await self.rig.status()).weight_version + 1
        if not await self._call("push", version, version, ""):
            # A group whose engines were all removed while offloaded is filled only now.
            assert "fill a slot with engines.add" in self.log[-1], "push failed"
            await self._add()
            assert await self._call("push", version, version, ""), "push failed"
        await self._check()
        assert await self._serves(), "push: done, and no engine serves"

    async def _nothing(self) -> None:
        """Recovery alone."""

    async def _add(self) -> None:
        """A group whose only engine was removed says so."""
        for group in (await self.rig.status()).groups:
            for slot in group.vacant_slots if not group.engines else ():
                await self._call("add", 0, 0, slot)

    async def _repeat(self) -> None:
        if self._last is not None and self._last[0] != "remove":
            await self._call(*self._last)

    async def _push_again(self) -> None:
        version = (await self.rig.status()).weight_version
        await self._call("push", version, max(self.contents[version]), "")

    async def _next_step(self) -> None:
        version = (await self.rig.status()).weight_version + 1
        await self._call("offload", 0, 0, "")
        await self._call("push", version, version, "")

    async def _serves(self) -> bool:
        status = await self.rig.status()
        return status.gate == "open" and bool(await self.rig.held(0))


def _holders(status: ServerStatus) -> list[str]:
    """The engines that did not die since they were verified, as far as the server knows."""
    return [
        engine.engine_id
        for group in status.groups
        for engine in group.engines
        if not (engine.fence_reason or engine.is_stale)
    ]
