"""``serve`` after an offload: what the release has discarded comes back from a weight source."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeTensor
from engines.fake.engine.fake_weights import DEFAULT_TENSORS, fingerprint_of
from engines.protocol.errors import EngineRejected
from rollout.control.deployment import Deployment
from rollout.control.group.server_group import GroupSettings
from rollout.core.errors import LifecycleError, PhaseFailed, WeightsUnavailable
from rollout.core.types import EngineSlot
from rollout.weights.format.manifest import Manifest
from rollout.weights.store.weight_source import Restored
from tests.support.builders import TWO_GROUPS, ServerBench, make_server, manifest, push
from tests.support.virtual_time import pass_time, virtual_time

OFFLOADING: dict[str, dict[str, Any]] = {"main": {"num_engines": 2}}
HEALTH = {"probe_interval_s": 1.0, "probe_timeout_s": 0.5, "max_restarts": 100, "backoff_s": 0.01}


class Kept:
    """A source with some versions, as the store has them.

    Attributes:
        contents: by version, what an engine gets that loads it.
        has_fingerprints: of what was pushed.
        refusing: slots whose engine gets nothing.
    """

    def __init__(self, *versions: int, has_fingerprints: bool = True) -> None:
        self.contents = {version: version for version in versions}
        self.has_fingerprints = has_fingerprints
        self.refusing: Collection[str] = ()
        self.engines: Mapping[str, Any] = {}
        self.given: list[str] = []

    async def why_lacks(self, version: int) -> str:
        return "" if version in self.contents else f"the store lacks {version}"

    async def restore(self, engine: Any, version: int, slot: EngineSlot) -> Restored | None:
        if await self.why_lacks(version) or slot.engine_id in self.refusing:
            return None
        self.given.append(slot.engine_id)
        await engine.update_weights_from_disk(f"/kept/{version}", weight_version=str(version))
        self.engines[slot.engine_id].engine.weights.write(
            (one.name, FakeTensor(one.shape, self.contents[version])) for one in DEFAULT_TENSORS
        )
        tensors = manifest().tensors
        prints = {
            name: fingerprint_of(FakeTensor(spec.shape, version)) for name, spec in tensors.items()
        }
        return Restored(Manifest(tensors, prints if self.has_fingerprints else {}))


@asynccontextmanager
async def offloaded_at_1(
    folder: Path,
    patch: pytest.MonkeyPatch,
    *sources: Kept,
    groups: Mapping[str, Any] = OFFLOADING,
    **more: Any,
) -> AsyncIterator[ServerBench]:
    """A server that has served version 1, and has given its memory to the trainer."""
    patch.setattr(GroupSettings, "all_sources", lambda _: sources)
    bench = make_server(folder, groups, **more)
    for source in sources:
        source.engines = bench.launcher.processes
    await bench.server.start()
    try:
        await bench.server.push(push(1))
        await bench.server.offload()
        yield bench
    finally:
        await bench.server.stop()


async def serves_1(bench: ServerBench) -> None:
    """Every engine that gets requests holds what was pushed as version 1."""
    status = await bench.server.status()
    assert (status.phase, status.gate, status.weight_version) == ("serving", "open", 1)
    serving = [name for name, state in bench.router.states.items() if state == "serving"]
    assert serving
    expected = {one.name: fingerprint_of(FakeTensor(one.shape, 1)) for one in DEFAULT_TENSORS}
    for name in serving:
        assert bench[name].weights.digests == expected
        assert not bench[name].weights_are_garbage
        assert bench[name].paused is None
        assert not bench[name].released


def resumed(bench: ServerBench) -> list[str]:
    return [
        one.engine_id for one in bench.engines if "resume_memory_occupation" in one.operations()
    ]


@pytest.mark.parametrize("groups", [OFFLOADING, TWO_GROUPS], ids=["one group", "two groups"])
@pytest.mark.parametrize("has_fingerprints", [True, False])
async def test_the_published_version_serves_again_without_a_push(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: dict[str, Any],
    has_fingerprints: bool,
) -> None:
    kept = Kept(1, has_fingerprints=has_fingerprints)
    async with offloaded_at_1(tmp_path, monkeypatch, kept, groups=groups) as bench:
        for _ in range(2):
            report = await bench.server.serve()
            await serves_1(bench)
            assert report.weight_version == 1
            assert "update_weights" in report.phase_s
            (verified,) = [one for one in report.reports if one.command == "verify"]
            assert {one.verified_by for one in verified.engines} == {"fingerprint"}
            await bench.server.serve()  # repeated, it does nothing
            await bench.server.offload()
        offloading = [name for name in bench.launcher.processes if not name.startswith("apart")]
        assert sorted(kept.given) == sorted(offloading * 2)


async def test_a_version_that_no_source_has_is_refused_before_memory_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offloaded_at_1(tmp_path, monkeypatch, Kept(0)) as bench:
        with pytest.raises(LifecycleError) as caught:
            await bench.server.serve()
        for part in (
            "weights of group main",
            "the store lacks 1",
            "push(weights)",
            "engine.weights_cpu_backup",
            "weights.store",
        ):
            assert part in str(caught.value)
        assert resumed(bench) == []
        assert (await bench.server.status()).phase == "offloaded"
        assert bench.router.gate == "holding"
        await bench.server.push(push(2))
        assert bench.router.gate == "open"


async def test_an_older_version_of_the_source_is_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offloaded_at_1(tmp_path, monkeypatch, Kept(1)) as bench:
        await bench.server.push(push(2))
        await bench.server.offload()
        with pytest.raises(LifecycleError, match="the store lacks 2"):
            await bench.server.serve()


async def test_an_engine_that_does_not_load_is_fenced_and_the_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offloaded_at_1(tmp_path, monkeypatch, Kept(1)) as bench:
        bench["main-0"].fail_next("update_weights_from_disk", EngineRejected("no room", status=500))
        report = await bench.server.serve()
        await serves_1(bench)
        assert [one.engine_id for part in report.reports for one in part.failures] == ["main-0"]
        assert bench.router.states == {"main-0": "fenced", "main-1": "serving"}
        assert bench["main-0"].is_dead


async def test_an_engine_that_alone_gets_nothing_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(1)
    kept.refusing = ("main-1",)
    async with offloaded_at_1(tmp_path, monkeypatch, kept) as bench:
        await bench.server.serve()
        await serves_1(bench)
        assert bench.router.states == {"main-0": "serving", "main-1": "fenced"}


async def test_if_every_engine_fails_to_load_the_gate_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offloaded_at_1(tmp_path, monkeypatch, Kept(1)) as bench:
        for engine in bench.engines:
            engine.fail_next("update_weights_from_disk", EngineRejected("no room", status=500))
        with pytest.raises(PhaseFailed, match=r"main-0: update_weights failed after"):
            await bench.server.serve()
        assert bench.router.gate == "closed"
        assert "serving" not in bench.router.states.values()


async def test_engines_that_get_nothing_and_have_not_failed_take_the_next_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(1)
    async with offloaded_at_1(tmp_path, monkeypatch, kept) as bench:
        kept.refusing = ("main-0", "main-1")
        with pytest.raises(WeightsUnavailable, match="no source has given it weight version 1"):
            await bench.server.serve()
        status = await bench.server.status()
        assert (status.phase, status.gate) == ("weights_onloaded", "closed")
        kept.refusing = ()
        await bench.server.serve()
        await serves_1(bench)
        kept.refusing = ("main-0", "main-1")
        await bench.server.offload()
        with pytest.raises(WeightsUnavailable):
            await bench.server.serve()
        await bench.server.push(push(2))
        assert set(bench.router.states.values()) == {"serving"}
        assert not any(engine.weights_are_garbage for engine in bench.engines)


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("has_fingerprints", [True, False])
async def test_other_weights_under_the_same_number_do_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_fingerprints: bool, num_engines: int
) -> None:
    kept = Kept(1, has_fingerprints=has_fingerprints)
    kept.contents[1] = 7
    groups = {"main": {"num_engines": num_engines}}
    async with offloaded_at_1(tmp_path, monkeypatch, kept, groups=groups) as bench:
        with pytest.raises(PhaseFailed, match=r"main-0 .*weight version 1, but (its )?tensor"):
            await bench.server.serve()
        assert bench.router.gate == "closed"
        assert set(bench.router.states.values()) == {"fenced"}
        with pytest.raises(LifecycleError, match="weight version 1 failed their verification"):
            await bench.server.serve()


@virtual_time
async def test_a_load_has_the_deadline_of_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offloaded_at_1(
        tmp_path, monkeypatch, Kept(1), lifecycle={"update_timeout_s": 20.0}
    ) as bench:
        bench["main-0"].hold("update_weights_from_disk")
        started = asyncio.get_running_loop().time()
        report = await bench.server.serve()
        assert asyncio.get_running_loop().time() - started == pytest.approx(20, abs=1)
        (failed,) = [one for part in report.reports for one in part.failures]
        assert "main-0: update_weights took longer than 20 s" in failed.failure
        await serves_1(bench)


@virtual_time
async def test_engines_that_came_back_meanwhile_get_the_version_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offloaded_at_1(tmp_path, monkeypatch, Kept(1), health=HEALTH) as bench:
        for engine in bench.engines:
            engine.die("killed -9")
        await pass_time(10)
        await bench.server.serve()
        await serves_1(bench)
        assert set(bench.router.states.values()) == {"serving"}


class Writing:
    """A store that has not written the last push yet, or never will."""

    def __init__(self, kept: Kept, after_s: float | None) -> None:
        self._kept = kept
        self._after_s = after_s
        self.asked: list[tuple[int, float]] = []

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def status(self) -> None: ...
    def offer(self, _: Any) -> None: ...

    async def why_not_kept(self, version: int, timeout_s: float) -> str:
        self.asked.append((version, timeout_s))
        if self._after_s is None or self._after_s > timeout_s:
            await pass_time(timeout_s)
            return "it is late"
        await pass_time(self._after_s)
        self._kept.contents[version] = version
        return ""


@pytest.mark.parametrize("after_s", [5.0, None])
@virtual_time
async def test_serve_waits_for_the_write_of_the_store_for_as_long_as_a_push_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_s: float | None
) -> None:
    kept = Kept()
    async with offloaded_at_1(
        tmp_path, monkeypatch, kept, lifecycle={"update_timeout_s": 20.0}
    ) as bench:
        store: Any = Writing(kept, after_s)
        bench.server._phase_runner._store = store
        if after_s is None:
            with pytest.raises(LifecycleError, match=r"the store lacks 1 \(it is late\); so push"):
                await bench.server.serve()
            assert resumed(bench) == []
        else:
            await bench.server.serve()
            await serves_1(bench)
        assert store.asked == [(1, 20.0)]
        await bench.server.push(push(2))
        await bench.server.serve()
        assert len(store.asked) == 1  # nothing was released


async def test_a_transaction_restores_the_servers_that_it_does_not_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    kept = Kept(1)
    async with offloaded_at_1(tmp_path, monkeypatch, kept) as bench:
        other = make_server(tmp_path / "other", {"other": {"num_engines": 1}})
        await other.server.start()
        try:
            both = Deployment({"policy": bench.server, "other": other.server})
            await both.offload()
            with pytest.raises(LifecycleError, match="the store lacks 0"):
                await both.serve({})
            assert resumed(bench) == []
            reports = await both.serve({"other": push(1)})
            assert {report.weight_version for report in reports.values()} == {1}
            assert kept.given == ["main-0", "main-1"]
            await serves_1(bench)
            await serves_1(other)
        finally:
            await other.server.stop()
