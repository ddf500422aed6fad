"""The versions of LoRA adapters on the engines of a server: staged, published, drained, unloaded.

Always true:
- the router maps to a version only after every engine that serves has verified it;
- a version is unloaded only after the router maps to another one, and no request or session stays
  with it;
- an adapter has at most ``MOST_VERSIONS`` on the engines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from typing import TypeVar

from engines.process.background import Then, keep_task
from engines.protocol.adapter_names import adapter_of, engine_name, version_of
from engines.protocol.plain_text import describe
from rollout.config import ServerConfig
from rollout.control.group.server_group import ServerGroup
from rollout.control.server.group_registry import GroupRegistry
from rollout.control.server.router_client import RouterClient
from rollout.core.errors import WeightMismatch
from rollout.core.fanout import barrier, wait_all
from rollout.core.types import PhaseReport
from rollout.rules.lifecycle import STAGE
from rollout.weights.push.weight_push import WeightPush

logger = logging.getLogger(__name__)

MOST_VERSIONS = 3
"""The most of one adapter: the published one, those that requests still use, and the next."""
_WAIT_S = 60.0

T = TypeVar("T")


class AdapterVersions:
    """All versions of all adapters that the engines of one server have.

    Args:
        margin_s: a group has its own deadlines; this long after them, it counts as lost.

    Attributes:
        pushes: what was loaded, by the engines' names.
    """

    def __init__(
        self, config: ServerConfig, registry: GroupRegistry, router: RouterClient, margin_s: float
    ) -> None:
        self.pushes: dict[str, WeightPush] = {}
        self._config = config
        self._registry = registry
        self._router = router
        self._budget_s = 3 * config.lifecycle.update_timeout_s + margin_s
        self._published: Set[str] = frozenset()
        self._unloading = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def stage(self, push: WeightPush, *, is_open: bool) -> Sequence[PhaseReport]:
        """Load a version into every engine that serves, and verify it; after an error, into none.

        Args:
            is_open: requests end meanwhile, so that older versions may become unused.

        Raises:
            WeightMismatch: the engines refuse it, or have too many versions of the adapter.
            PhaseFailed: an engine failed, or has not loaded what was sent.
        """
        name = push.engine_adapter
        if name in self.pushes:  # a call is repeated, whose gate did not open
            return ()
        await self._make_room(push.adapter, is_open=is_open)
        try:
            reports = await self._on_groups(lambda group: group.stage_adapter(push))
        except BaseException:
            try:
                await self._unload([name])
            except Exception as more:  # must not hide the first failure
                logger.warning("adapter %s could not be unloaded: %s", name, describe(more))
            raise
        self.pushes[name] = push
        return list(reports.values())

    def has_published(self, versions: Mapping[str, int]) -> None:
        """The router maps to these from now on; the others are unloaded when they are unused."""
        self._published = {engine_name(*adapter_version) for adapter_version in versions.items()}
        for name in self.pushes.keys() - self._published - self._tasks.keys():
            task = keep_task(partial(self._unload_unused, name), f"unload:{name}", Then.IS_OVER)
            self._tasks[name] = task
            task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        del self._tasks[name]

    async def stop(self) -> None:
        """Unload nothing any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await wait_all(tasks)

    async def _make_room(self, adapter: str, *, is_open: bool) -> None:
        """Wait until the engines may have one more version of an adapter."""
        versions = sorted(
            (pushed for pushed in self.pushes if adapter_of(pushed) == adapter), key=version_of
        )
        for name in [version for version in versions if version not in self._published]:
            if len(versions) < MOST_VERSIONS:
                return
            wait_s = self._config.lifecycle.drain_timeout_s if is_open else 0.0
            if not await self._router.unpinned(name, wait_s) or not await self._unload([name]):
                num = (await self._router.pinned()).get(name, 0)
                raise WeightMismatch(
                    f"the engines have {len(versions)} versions of adapter {adapter!r}, of at most "
                    f"{MOST_VERSIONS}, and after {wait_s:g} s {num} requests and sessions stay "
                    f"with {name}: push again when they have ended, or close the sessions; what "
                    "served before serves on"
                )
            versions.remove(name)

    async def _unload_unused(self, name: str) -> None:
        try:
            while not await self._router.unpinned(name, _WAIT_S):
                pass
            await self._unload([name])
        except Exception as error:  # the next push tries again
            logger.warning("adapter %s could not be unloaded: %s", name, describe(error))

    async def _unload(self, names: Sequence[str]) -> bool:
        """Whether they are gone: an engine that does not serve keeps them."""
        async with self._unloading:
            served = await self._on_groups(lambda group: group.unload_adapters(names))
            if all(served.values()):
                for name in names:
                    self.pushes.pop(name, None)
        return all(served.values())

    async def _on_groups(self, call: Callable[[ServerGroup], Awaitable[T]]) -> dict[str, T]:
        calls = {name: call(group) for name, group in self._registry.groups.items()}
        return await barrier(calls, operation=STAGE, budget_s=self._budget_s)
