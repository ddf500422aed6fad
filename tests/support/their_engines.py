"""Fake engines that somebody else runs: attached by address, never ended from here, replaced."""

from __future__ import annotations

from typing import Any

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.launcher import FakeRunningEngine
from engines.launch import EngineSpec
from engines.protocol import Endpoint
from engines.protocol.errors import EngineNotReady


class TheirEngines(FakeLauncher):
    """Attaches to what runs at an address; the first time, that is a new engine.

    Args:
        settings: those of the engines.

    Attributes:
        at: the engine that runs at each address now.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.at: dict[Endpoint, FakeEngine] = {}
        self._settings = settings

    async def launch(self, spec: EngineSpec) -> FakeRunningEngine:
        self.specs.append(spec)
        endpoint = Endpoint.of_url(spec.url)
        if endpoint not in self.at:
            self.start(endpoint)
        if self.at[endpoint].is_dead:
            raise EngineNotReady("nothing listens there", engine=spec.engine_id, operation="attach")
        process = self.processes[spec.engine_id] = _Theirs(self, endpoint)
        return process

    def start(self, endpoint: Endpoint, version: str = "0") -> FakeEngine:
        """Another process at an address, in the place of the one before."""
        if before := self.at.get(endpoint):
            before.die("its owner restarted it")
        made = FakeEngine("theirs", endpoint=endpoint, weight_version=version, **self._settings)
        self.at[endpoint] = made
        return made

    def connect(self, endpoint: Endpoint, engine_id: str) -> Any:
        return _Line(self, endpoint)

    def __getitem__(self, engine_id: str) -> FakeEngine:
        return self.at[self.processes[engine_id].endpoint]


class _Line:
    """A client: each call reaches what runs at the address then."""

    def __init__(self, theirs: TheirEngines, endpoint: Endpoint) -> None:
        self._theirs, self._endpoint = theirs, endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs.at[self._endpoint], name)


class _Theirs(FakeRunningEngine):
    """What runs at an address, which only its owner ends."""

    def __init__(self, theirs: TheirEngines, endpoint: Endpoint) -> None:
        super().__init__(theirs.at[endpoint], 0)
        self.pid = None
        self._theirs, self._endpoint = theirs, endpoint

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def is_alive(self) -> bool:
        return not self._theirs.at[self._endpoint].is_dead

    async def resident_bytes(self) -> int | None:
        return None

    async def stop(self, grace_s: float) -> bool:
        return False

    async def kill(self) -> None: ...
