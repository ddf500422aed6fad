"""The actor of an engine makes whole tensors of deltas, on the engine's node."""

from __future__ import annotations

from typing import Any

import pytest

from engines.fake.http_fake import HttpFakeLauncher
from engines.protocol import Endpoint
from tests.support.ray_worlds import World

pytest.importorskip("torch")
from rollout.weights.push.host_copies import KnownHost
from tests.support import random_deltas

pytestmark = pytest.mark.embedded


async def test_deltas_become_whole_tensors_in_the_actor_of_an_engine(world: World) -> None:
    handles = world.load("engine_handle")
    name = handles.ActorName("copies", "engine")
    named = world.ray.remote(handles.EngineActor).options(name=name.name, namespace=name.namespace)
    actor: Any = named.remote(HttpFakeLauncher(), name, name)
    started = handles.StartedProcess(Endpoint("127.0.0.1", 1), None, (), "node")
    engine = handles.RayEngine("engine", [handles.EnginePart(actor, started)], 10.0)
    loading = random_deltas.Loading()
    host = KnownHost(engine)
    pushes = random_deltas.DirectPushes(loading, random_deltas.tensors_of_all_dtypes(), host)
    for version, encoding in enumerate(["full", "delta", "delta"], 1):
        assert await pushes.push(version) == (encoding, None)
        assert await loading.held() == random_deltas.fingerprints(pushes.tensors, loading.loaded)
        pushes.tensors = random_deltas.changed(pushes.tensors)
    await pushes.aclose()
    await engine.kill()
