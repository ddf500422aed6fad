"""The load of ``real/test_under_load.py`` finds what a step leaves out: flush, names, pause."""

from __future__ import annotations

import pytest

from rollout.core.errors import PhaseFailed
from rollout.router.proxy.context import Proxy
from tests.support.load import Load
from tests.support.offload_load import NUM_CLIENTS
from tests.support.real_policy import RealPolicy
from tests.support.referee import Referee

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.mark.parametrize("is_named", [True, False])
async def test_without_the_flush_only_its_name_keeps_an_old_prefix_out(
    policy: RealPolicy, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail: without the names of run and version, old prefixes answer."""
    if not is_named:
        same = property(lambda proxy: lambda weight_version: "same")
        monkeypatch.setattr(Proxy, "namespace", same, raising=False)
    referee = Referee(policy.weights_of)
    load = Load(policy.handle.url, 16, seed=5, lengths=(10, 30))
    async with load.running():
        await load.reaches(40)
        policy.sabotage.flush = True
        await policy.handle.push(policy.next_tensors())
        await load.reaches(load.ended.total() + 60)
    answers = load.taken()
    found = referee.findings(answers)
    assert bool(found) is not is_named, found
    assert all(f"not of version {policy.handle.weight_version}" in line for line in found)
    policy.sabotage.flush = False
    await policy.handle.push(policy.next_tensors())


async def test_without_the_pause_a_release_kills_the_engines(policy: RealPolicy) -> None:
    """The barrier is what keeps them alive: the same cycle without it loses every engine."""
    load = Load(policy.handle.url, NUM_CLIENTS, seed=4, lengths=(8, 400))
    async with load.running():
        await load.reaches(2)  # the others are in the middle
        policy.sabotage.pause = True
        with pytest.raises(PhaseFailed, match="release_memory_occupation"):
            await policy.handle.offload()
        policy.sabotage.pause = False
    engines = policy.engines()
    assert len(engines) == 2
    for engine in engines:
        # The health check may see the death before the release reports it.
        assert (
            "release_memory_occupation" in engine.fence_reason
            or "its process has ended" in engine.fence_reason
        )
        # The call crashed it, before anything stopped it.
        assert "AssertionError" in policy.log_of(engine.engine_id)
    assert load.broken
    assert set(load.ended.values()) == {1}
