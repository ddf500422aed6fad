"""What a pusher calls on the engines, in which order: one rank, on fakes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ConfigError, RankFailure, RolloutError
from rollout.core.types import StepReport
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import LocalCaller, launch_local
from rollout.weights.push.weight_push import WITHOUT_KV
from rollout.weights.routes import buffers as shm_buffers
from rollout.weights.store import store as store_of_server
from tests.support.processes import wait_until
from tests.support.served_fakes import config
from tests.support.thread_ranks import Messages

torch = pytest.importorskip("torch")
from rollout.runtime.handle.pusher import Pusher  # noqa: E402
from rollout.weights.ranks import leader  # noqa: E402
from rollout.weights.ranks.link import RankLink  # noqa: E402
from rollout.weights.ranks.outgoing import OutgoingStream  # noqa: E402
from tests.support.cuda_double import CudaDouble, CurrentStream  # noqa: E402

pytestmark = pytest.mark.embedded


@contextmanager
def launched(
    folder: Path,
    *,
    lifecycle: dict[str, Any] | None = None,
    verify: dict[str, Any] | None = None,
    **weights: Any,
) -> Iterator[tuple[DeploymentHandle, FakeEngine]]:
    """One engine, with a bucket for each tensor."""
    launcher = FakeLauncher()
    settings = {"bucket_bytes": 300, "shared_memory_path": str(folder), **weights}
    groups = {"main": {"engine": {"kind": "fake"}}}
    server = {"weights": settings, "lifecycle": lifecycle or {}, "verify": verify or {}}
    chosen = config(folder, groups, server=server)
    with launch_local(chosen, launcher=launcher, connect=launcher.connect) as deployment:
        yield deployment, launcher["main-0"]


def tensors() -> dict[str, Any]:
    return {one.name: torch.randn(one.shape) for one in DEFAULT_TENSORS}


def loads(engine: FakeEngine) -> list[Path]:
    return [
        Path(call.arguments["model_path"])
        for call in engine.calls
        if call.operation == "update_weights_from_disk"
    ]


def test_a_silent_rank_is_named_before_the_engines_give_up(tmp_path: Path) -> None:
    """The engines wait less for a bucket than the ranks would for each other."""
    goes_on = threading.Event()
    made = tensors()

    def of_rank_1() -> Iterator[tuple[str, Any]]:
        pairs = iter(made.items())
        yield next(pairs)
        goes_on.wait(60)
        yield from pairs

    lifecycle = {"update_timeout_s": 4}
    with launched(tmp_path, lifecycle=lifecycle) as (deployment, _), ThreadPoolExecutor(2) as ranks:
        messages, server = Messages(), deployment["policy"]._pushes.server

        def push(rank: int) -> StepReport:
            with Pusher(server, RankLink(rank, 2, messages), timeout_s=60) as pusher:
                return pusher.push(of_rank_1() if rank else iter(made.items()))

        pushes = [ranks.submit(push, rank) for rank in range(2)]
        try:
            with pytest.raises(RankFailure, match=r"rank 1 did not report bucket 0 within 3\.6 s"):
                pushes[0].result(30)
        finally:
            goes_on.set()
        with pytest.raises(RankFailure, match="rank 1 did not report bucket 0"):
            pushes[1].result(30)


class EveryLoadCosts:
    is_at_once = True

    def log(self) -> None:
        """It is known."""


def test_engines_whose_loads_cost_get_one_folder_with_all_buckets(tmp_path: Path) -> None:
    with launched(tmp_path) as (deployment, engine), deployment["policy"].pusher() as pusher:
        pusher.push(tensors())
        assert len(loads(engine)) == len(DEFAULT_TENSORS)
        pusher.rank.loads = EveryLoadCosts()  # type: ignore[assignment]
        assert pusher.push(tensors()).weight_version == 2
        (folder,) = loads(engine)[len(DEFAULT_TENSORS) :]
        assert not folder.exists(), "the links go with the push"


@pytest.mark.parametrize(
    "weights",
    [
        {"transport": "shared_memory", "stream": True},
        {"transport": "by_value", "stream": True},
        {"transport": "by_value"},
        {"transport": "shared_memory"},
    ],
    ids=str,
)
def test_the_store_keeps_what_one_process_streams_or_copies(
    tmp_path: Path, weights: dict[str, Any]
) -> None:
    store = {"path": str(tmp_path), "spare_bytes": 0}
    with launched(tmp_path, **weights, store=store) as (deployment, _):
        policy = deployment["policy"]
        for version in (1, 2, 3):
            policy.push(tensors()).result(30)

            def is_kept(version: int = version) -> bool:
                found = policy.status().result(30).store
                return found is not None and found.version == version

            assert wait_until(is_kept, 20), policy.status().result(30).store


@pytest.mark.parametrize("how", ["handle", "pusher", "two ranks"])
@pytest.mark.parametrize(
    "weights",
    [
        {"transport": "shared_memory", "stream": True},
        {"transport": "by_value", "stream": True},
        {"transport": "shared_memory"},
    ],
    ids=str,
)
def test_the_store_keeps_the_last_push_of_a_trainer_that_closes_at_once(
    tmp_path: Path, weights: dict[str, Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing before all ranks have closed; and is offered it late."""
    may_read, has_closed = threading.Event(), threading.Event()
    read, offer = store_of_server.tensors_of, RolloutServer.offer_to_store

    def held(payload: Any) -> Any:
        assert may_read.wait(60)
        return read(payload)

    async def late(server: RolloutServer, push: Any) -> None:
        # A rank that does not wait for the offer closes meanwhile; the others do afterwards.
        await asyncio.to_thread(has_closed.wait, 0.5)
        await offer(server, push)

    monkeypatch.setattr(store_of_server, "tensors_of", held)
    monkeypatch.setattr(RolloutServer, "offer_to_store", late)
    store = {"path": str(tmp_path), "spare_bytes": 0}
    with (
        launched(tmp_path, **weights, store=store) as (deployment, _),
        ThreadPoolExecutor() as pool,
    ):
        policy, made, messages = deployment["policy"], tensors(), Messages()

        def trained(rank: int) -> None:
            if how == "handle":
                policy.push(made).result(30)
                policy.close()
                return
            link = RankLink(rank, 2, messages) if how == "two ranks" else RankLink()
            with Pusher(policy._pushes.server, link, timeout_s=60) as pusher:
                pusher.push(made)
            has_closed.set()

        try:
            list(pool.map(trained, range(2 if how == "two ranks" else 1)))
        finally:
            may_read.set()

        def is_kept() -> bool:
            found = policy.status().result(30).store
            return found is not None and found.version == 1

        assert wait_until(is_kept, 20), policy.status().result(30).store
        assert wait_until(lambda: not list(tmp_path.glob("rollout-push-*")), 20)


def test_the_turn_comes_after_the_weights_and_before_the_kv_cache(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    with launched(tmp_path) as (deployment, _), deployment["policy"].pusher() as pusher:
        policy = deployment["policy"]

        def turn() -> None:
            status = policy.status().result(30)
            seen.append((status.phase, status.gate))

        policy.offload().result(30)
        report = pusher.push(tensors(), before_kv=turn)
        assert seen == [("verified", "holding")]
        assert list(report.phase_s)[-2:] == ["onload_kv", "continue_generation"]
        assert "update_weights" in report.phase_s
        assert policy.status().result(30).gate == "open"
        # Engines that serve have their KV caches: the turn comes after the push.
        assert pusher.push(tensors(), before_kv=turn).weight_version == 2
        assert seen[1:] == [("serving", "open")]


def test_a_turn_that_fails_leaves_weights_without_kv_and_onload_goes_on(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("the optimizer does not fit on the host")

    with launched(tmp_path) as (deployment, _), deployment["policy"].pusher() as pusher:
        policy = deployment["policy"]
        policy.offload().result(30)
        with pytest.raises(RankFailure, match="rank 0: ValueError: the optimizer") as e:
            pusher.push(tensors(), before_kv=fail)
        assert WITHOUT_KV in str(e.value)
        status = policy.status().result(30)
        assert (status.phase, status.gate) == ("verified", "holding")
        policy.serve().result(30)
        status = policy.status().result(30)
        assert (status.phase, status.gate, status.weight_version) == ("serving", "open", 1)
        assert pusher.push(tensors()).weight_version == 2


def test_what_cannot_take_the_turn_is_refused_before_the_push(tmp_path: Path) -> None:
    with launched(tmp_path) as (deployment, engine), deployment["policy"].pusher() as pusher:
        with pytest.raises(TypeError, match="takes a plain function"):
            pusher.push(tensors(), before_kv=5)  # type: ignore[arg-type]
        assert not loads(engine)


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
def test_an_engine_out_of_reach_is_found_before_the_offload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    with launched(tmp_path, transport=transport) as (deployment, engine):
        policy = deployment["policy"]
        monkeypatch.setattr(LocalCaller, "node_of", lambda *arguments: "another")
        with (
            pytest.raises(ConfigError, match="main-0 runs on another host"),
            policy.offloaded(tensors),
        ):
            raise AssertionError("the trainer would train in vain")
        assert policy.status().result(30).gate == "open"
        assert "pause_generation" not in engine.operations()


@pytest.mark.parametrize("transport", ["distributed", "cuda_ipc"])
def test_a_window_that_only_streams_needs_a_function_or_a_pusher(
    tmp_path: Path, transport: str
) -> None:
    with launched(tmp_path, transport=transport) as (deployment, engine):
        policy = deployment["policy"]
        with pytest.raises(ConfigError, match="cannot copy them; use"):
            policy.offloaded()
        policy.offloaded(tensors)
        assert "pause_generation" not in engine.operations()
        with policy.pusher():  # pushes in the block: nothing is copied by the window
            policy.offloaded()


def test_without_room_for_copies_the_push_goes_on_and_the_log_says_what_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = {"path": str(tmp_path), "spare_bytes": 0}
    with launched(tmp_path, transport="by_value", store=store) as (deployment, _):
        policy = deployment["policy"]
        with policy.pusher() as pusher:
            with monkeypatch.context() as patched:
                patched.setattr(shm_buffers, "why_no_room", lambda *_, **__: "it is full")
                assert pusher.push(tensors()).weight_version == 1
            assert "version 1 is not kept: no room for a bucket" in caplog.text
            assert pusher.push(tensors()).weight_version == 2

            def is_kept() -> bool:
                found = policy.status().result(30).store
                return found is not None and found.version == 2

            assert wait_until(is_kept, 20)


def test_a_server_that_cannot_read_the_copies_is_found_before_the_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"path": str(tmp_path), "spare_bytes": 0}
    elsewhere = tmp_path / "of another host"
    with launched(tmp_path, store=store) as (deployment, engine):
        policy = deployment["policy"]
        monkeypatch.setattr(shm_buffers.ShmBufferPool, "made_folder", lambda self: elsewhere)
        refused = pytest.raises(ConfigError, match=r"weights.store: the process of server policy")
        with policy.pusher() as pusher, refused:
            pusher.push(tensors())
        with refused:
            policy.push(tensors())
        assert not loads(engine)
        assert policy.status().result(30).gate == "open"


def test_a_pusher_shows_its_rank_and_whether_it_is_closed(tmp_path: Path) -> None:
    with launched(tmp_path) as (deployment, _):
        pusher = deployment["policy"].pusher()
        assert repr(pusher) == "Pusher(rank 0 of 1)"
        pusher.close()
        assert repr(pusher) == "Pusher(rank 0 of 1, closed)"


def test_what_is_expected_goes_with_the_next_push_of_handle_or_pusher(tmp_path: Path) -> None:
    by_canary = {"by": "canary", "canary_prompts": [[1, 2, 3]]}
    one, other = tensors(), tensors()
    with (
        launched(tmp_path, verify=by_canary) as (deployment, engine),
        deployment["policy"].pusher() as pusher,
    ):
        policy = deployment["policy"]
        pusher.push(one)
        right = [engine.caches.logprobs(engine.weights, (1, 2, 3), 0)[0]]
        policy.checks.expect(right)
        assert pusher.push(one).weight_version == 2
        # A later push, of other weights, is not compared with it.
        assert policy.push(other).result(30).weight_version == 3
        policy.checks.expect(right)
        with pytest.raises(RolloutError, match="by the trainer's own model"):
            pusher.push(other)


def test_the_tensors_of_a_streamed_push_are_accepted_again_under_its_version(
    tmp_path: Path,
) -> None:
    with launched(tmp_path, transport="shared_memory", stream=True) as (deployment, _):
        policy, pushed = deployment["policy"], tensors()
        policy.push(pushed, version=1).result(30)
        again = policy.phases.make_push(pushed, version=1)
        assert policy.push(again).result(30).weight_version == 1


def test_engines_that_were_not_offloaded_serve_while_before_kv_runs(tmp_path: Path) -> None:
    seen: list[str] = []
    with launched(tmp_path) as (deployment, _):
        policy = deployment["policy"]

        def free() -> None:
            seen.append(policy.status().result(30).gate)

        policy.push(tensors(), before_kv=free).result(30)
    assert seen == ["open"]


def test_the_error_of_a_single_rank_goes_up_as_it_is(tmp_path: Path) -> None:
    def broken(name: str, tensor: Any) -> Any:
        if not tensor.is_meta:
            raise KeyError(name)
        yield name, tensor

    with launched(tmp_path) as (deployment, _), deployment["policy"].pusher() as pusher:
        with pytest.raises(KeyError) as caught:
            pusher.push(tensors(), name_map=broken)
        assert caught.value.args == (DEFAULT_TENSORS[0].name,)
        deployment["policy"].push(tensors(), 1).result(30)


def by_handle(policy: Any) -> None:
    policy.push(tensors()).result(30)


def by_pusher(policy: Any) -> None:
    with policy.pusher() as pusher:
        pusher.push(tensors())


@pytest.mark.parametrize("push", [by_handle, by_pusher])
def test_the_thread_of_a_stream_uses_the_callers_stream_on_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push: Callable[[Any], None]
) -> None:
    """A trainer may make its tensors on a stream of its own, on a GPU that is not the first."""
    double = CudaDouble(["GPU-0", "GPU-1"])
    double.install(monkeypatch.setattr)
    own = CurrentStream(torch.device("cuda", 1), "the trainer's")
    torch.cuda.set_stream(own)
    used: list[tuple[Any, str]] = []

    class Noted(OutgoingStream):
        def __iter__(self) -> Iterator[Any]:
            for bucket in super().__iter__():
                found = torch.cuda.current_device(), torch.cuda.current_stream()
                used.append((found, threading.current_thread().name))
                yield bucket

    monkeypatch.setattr(leader, "OutgoingStream", Noted)
    with launched(tmp_path, transport="shared_memory", stream=True) as (deployment, _):
        push(deployment["policy"])
    assert len(used) > 1
    assert set(used) == {((1, own), "push-stream-make")}
