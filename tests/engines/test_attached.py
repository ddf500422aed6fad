"""Engines that somebody else launched: attached, driven, refused, never ended."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

import rollout
from engines.fake import FakeEngine
from engines.fake.engine.fake_weights import write_checkpoint
from engines.fake.http_fake import FakeHttpApp, HttpFakeLauncher
from engines.launch import EngineSpec, LocalLauncher, RunningEngine, attach
from engines.process.tcp_ports import reserve_port
from engines.protocol import Endpoint, PauseMode, ServerInfo
from engines.protocol.errors import EngineNotReady
from engines.sglang.features import NEEDED
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from tests.engines.attached_config import config
from tests.support.contract import CPU_OPTIONS, Bench, Models, client
from tests.support.processes import program, wait_until

pytestmark = pytest.mark.timeout(300)
THEIRS = [
    pytest.param("embedded", marks=pytest.mark.embedded),
    pytest.param("sglang", marks=pytest.mark.sglang),
]


@pytest.mark.parametrize("kind", THEIRS, indirect=True)
async def test_an_attached_engine_is_driven_and_runs_on_when_we_go(
    bench: Bench, tmp_path: Path
) -> None:
    if bench.kind == "sglang":  # whose own default is no number
        await bench.engine.update_weight_version("default")
    whole = config(bench.running, bench.models.first, tmp_path)

    def drive() -> None:
        with rollout.launch(whole, backend="local") as deployment:
            policy = deployment["policy"]
            (group,) = policy.status().result().groups
            assert group.engines[0].weight_version == 0
            assert group.engines[0].pid is None
            with policy.offloaded() as window:
                window.push(bench.tensors("second"), version=1)
            assert policy.status().result().weight_version == 1

    await asyncio.to_thread(drive)
    assert await bench.running.is_alive()
    assert await bench.engine.weight_version() == "1"
    assert len(await bench.greedy()) == 8


@pytest.mark.parametrize("num_sent", [1, 2])
@pytest.mark.parametrize("kind", THEIRS, indirect=True)
async def test_half_a_push_whose_launcher_is_gone_is_served_by_no_launch(
    bench: Bench, tmp_path: Path, num_sent: int
) -> None:
    """Its owner resumes the engine, which cannot know what it holds."""
    tensors, names = bench.tensors("second"), list(bench.tensors("second"))
    await bench.engine.update_weight_version("7")
    await bench.engine.pause_generation(PauseMode.ABORT)
    buckets = [
        pickle.dumps([(name, tensors[name]) for name in names[part::3]]) for part in (0, 1, 2)
    ]

    async def lost() -> bytes:
        raise rollout.WeightsUnavailable("the trainer is gone")

    push = WeightPush(8, Manifest({}), [*buckets[:num_sent], lost()])
    with pytest.raises(rollout.WeightsUnavailable, match="the trainer is gone"):
        await push_weights(push, {"a": PushTarget(bench.engine, weight_version=7)}, budget_s=60)
    await bench.engine.continue_generation()
    assert len(await bench.greedy()) == 8
    whole = config(bench.running, bench.models.first, tmp_path)

    def launched() -> int:
        with rollout.launch(whole, backend="local") as deployment:
            return deployment["policy"].status().result().weight_version

    with pytest.raises(rollout.WeightMismatch, match=r"theirs-0 at .*ended early"):
        await asyncio.to_thread(launched)
    assert await bench.engine.weight_version() == "unverified-8-over-7"
    await bench.engine.pause_generation(PauseMode.ABORT)
    healing = WeightPush(9, Manifest({}), buckets)
    (reply,) = (await push_weights(healing, {"a": PushTarget(bench.engine)}, budget_s=60)).values()
    assert reply.failure is None
    await bench.engine.continue_generation()
    assert await asyncio.to_thread(launched) == 9


@pytest.mark.parametrize("kind", THEIRS, indirect=True)
async def test_an_attached_engine_that_fails_is_fenced_and_not_killed(
    bench: Bench, tmp_path: Path
) -> None:
    whole = config(bench.running, bench.models.first, tmp_path)

    def drive() -> None:
        with rollout.launch(whole, backend="local") as deployment:
            policy = deployment["policy"]
            with pytest.raises(rollout.RolloutError):
                push_into_another_update(policy)
            (group,) = policy.status().result().groups
            assert group.engines[0].fence_reason

    def push_into_another_update(policy: Any) -> None:
        asyncio.run(begin_another_update())
        with policy.offloaded() as window:
            window.push(bench.tensors("second"), version=1)

    async def begin_another_update() -> None:
        async with aclosing(client(bench.running, "behind-our-back")) as other:
            await other.begin_weight_update()

    await asyncio.to_thread(drive)
    assert await bench.running.is_alive()


def state_of(policy: Any) -> str:
    (group,) = policy.status().result().groups
    return str(group.engines[0].state)


def fence_reason(policy: Any) -> str:
    (group,) = policy.status().result().groups
    return str(group.engines[0].fence_reason)


@pytest.mark.parametrize(
    "kind", [*THEIRS, pytest.param("vllm", marks=pytest.mark.vllm)], indirect=True
)
async def test_weights_that_another_program_loads_fence_the_engine(
    bench: Bench, tmp_path: Path
) -> None:
    of_kind: dict[str, Any] = {"needs_offload": False}
    if bench.kind == "vllm":
        of_kind["kind"] = "vllm"
    whole = config(bench.running, bench.models.first, tmp_path, **of_kind)
    others = config(bench.running, bench.models.first, tmp_path / "others", **of_kind)

    def drive() -> None:
        with rollout.launch(whole, backend="local") as deployment:
            policy = deployment["policy"]
            policy.push(bench.tensors("second"), version=1).result()
            assert not fence_reason(policy)
            with pytest.raises(rollout.RolloutError, match=r"is in use: process .*takeover"):
                rollout.launch(others, backend="local")
            asyncio.run(load_another_model())
            assert wait_until(lambda: bool(fence_reason(policy)), 120)
            assert "another program has changed its weights" in fence_reason(policy)
            assert "when weight version 1 was verified" in fence_reason(policy)
            with pytest.raises(rollout.RolloutError):
                policy.generate([1, 2, 3]).result(20)
        with rollout.launch(others, backend="local") as deployment:
            policy = deployment["policy"]
            with pytest.raises(rollout.RolloutError, match=r"push\(weights, version=2\)"):
                policy.generate([1, 2, 3]).result(20)
            policy.push(bench.tensors("second"), version=2).result()
            assert len(policy.generate([1, 2, 3]).result(20).output_ids)
            asyncio.run(load_another_model(weight_version="0"))
        if bench.kind == "vllm":  # it does not report what it has loaded
            return
        at_0 = config(bench.running, bench.models.second, tmp_path / "at-0", **of_kind)
        why = f"has the weights of {bench.models.first}, and model_path is"
        with pytest.raises(rollout.RolloutError, match=why):
            rollout.launch(at_0, backend="local")

    async def load_another_model(weight_version: str | None = None) -> None:
        async with aclosing(client(bench.running, "behind-our-back", bench.kind)) as other:
            path = str(bench.models.first)
            await other.update_weights_from_disk(path, weight_version=weight_version)

    await asyncio.to_thread(drive)
    assert await bench.running.is_alive()


@pytest.mark.parametrize("kind", THEIRS[:1], indirect=True)
async def test_a_run_that_takes_an_engine_over_makes_the_first_one_fence_it(
    bench: Bench, tmp_path: Path
) -> None:
    whole = config(bench.running, bench.models.first, tmp_path, needs_offload=False)
    path = tmp_path / "others"
    others = config(bench.running, bench.models.first, path, needs_offload=False, takeover=True)

    def drive() -> None:
        with rollout.launch(whole, backend="local") as first:
            with rollout.launch(others, backend="local") as second:
                second["policy"].push(bench.tensors("second"), version=1).result()
                assert wait_until(lambda: bool(fence_reason(first["policy"])), 120)
                assert "weight version '1', not '0'" in fence_reason(first["policy"])
                assert not fence_reason(second["policy"])
            # It left with its claim, and the first one has given up the engine.
            third = config(
                bench.running, bench.models.first, tmp_path / "third", needs_offload=False
            )
            with rollout.launch(third, backend="local") as last:
                status = last["policy"].status().result()
                assert (status.weight_version, status.gate) == (1, "closed")

    await asyncio.to_thread(drive)


def listening(module: str, port: int, model: Path, *options: str) -> Any:
    """An engine of somebody else's at a port of its own choice."""
    flags = ("--port", str(port), "--model-path", str(model), *options)
    return program("-m", module, *flags)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.embedded
@pytest.mark.parametrize("version", ["0", "1"])
async def test_another_process_on_the_port_serves_nothing_as_the_weights_of_the_first(
    contract_models: Models, tmp_path: Path, version: str
) -> None:
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port
    url = f"http://127.0.0.1:{port}"
    whole = config(url, contract_models.first, tmp_path, needs_offload=False)
    from safetensors.torch import load_file

    tensors = load_file(contract_models.first / "model.safetensors")

    def drive() -> None:
        with listening("engines.embedded", port, contract_models.first) as theirs:
            assert wait_until(lambda: is_ready(url), 120)
            with rollout.launch(whole, backend="local") as deployment:
                policy = deployment["policy"]
                policy.push(tensors, version=1).result()
                theirs.process.kill()
                theirs.process.wait(30)
                changed = ("--weight-version", version)
                with listening("engines.embedded", port, contract_models.second, *changed):
                    assert wait_until(lambda: is_ready(url), 120)
                    assert wait_until(lambda: state_of(policy) in ("fenced", "stale"), 30)
                    with pytest.raises(rollout.RolloutError):
                        policy.generate([1, 2, 3]).result(20)

    await asyncio.to_thread(drive)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
async def test_what_its_owner_restarts_and_changes_is_not_served(
    tmp_path: Path, number: int
) -> None:
    model = write_checkpoint(tmp_path / "model")
    with reserve_port("127.0.0.1") as reservation:
        port = reservation.port
    url = f"http://127.0.0.1:{port}"
    whole = config(url, model, tmp_path, needs_offload=False)
    flags = ("--weight-version", "7")

    def drive() -> None:
        with listening("engines.fake", port, model, *flags) as theirs:
            assert wait_until(lambda: is_ready(url), 60)
            with rollout.launch(whole, backend="local") as deployment:
                policy = deployment["policy"]
                assert state_of(policy) == "serving"
                theirs.process.kill()
                theirs.process.wait(30)
                with listening("engines.fake", port, model, *flags):
                    assert wait_until(lambda: is_ready(url), 60)
                    # A fake begins with equal weights; its owner changes them at once.
                    other = {"model_path": "/models/other", "load_format": "auto"}
                    answer = httpx.post(f"{url}/update_weights_from_disk", json=other)
                    assert answer.json()["success"]
                    assert wait_until(lambda: state_of(policy) in ("fenced", "stale"), 30)
                    with pytest.raises(rollout.RolloutError):
                        policy.generate([1, 2, 3]).result(20)

    await asyncio.to_thread(drive)


@pytest.mark.slow
@pytest.mark.embedded
async def test_an_engine_without_a_memory_saver_is_not_offloaded(
    contract_models: Models, tmp_path: Path
) -> None:
    spec = EngineSpec(
        engine_id="plain-0",
        kind="embedded",
        model_path=str(contract_models.first),
        log_path=str(tmp_path / "plain.log"),
        memory_saver=False,
        options=CPU_OPTIONS["embedded"],
    )
    theirs = await LocalLauncher().launch(spec)
    try:
        offloaded = config(theirs, contract_models.first, tmp_path)
        with pytest.raises(rollout.RolloutError, match="--enable-memory-saver"):
            await asyncio.to_thread(lambda: rollout.launch(offloaded, backend="local"))
        kept = config(theirs, contract_models.first, tmp_path, needs_offload=False)

        def drive() -> None:
            with rollout.launch(kept, backend="local") as deployment:
                assert deployment["policy"].status().result().phase == "serving"

        await asyncio.to_thread(drive)
        assert await theirs.is_alive()
    finally:
        await theirs.stop(10.0)


async def sglang_that_reports(raw: dict[str, Any], folder: Path) -> RunningEngine:
    """A fake with SGLang's name and what SGLang would report."""

    class Theirs(FakeEngine):
        async def server_info(self) -> ServerInfo:
            return replace(await super().server_info(), engine="sglang", raw=raw)

        async def endpoints(self) -> frozenset[str]:
            return await super().endpoints() | NEEDED

    def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        return Theirs(spec.engine_id, endpoint=endpoint, model_path=spec.model_path)

    model = str(write_checkpoint(folder / "model"))
    return await HttpFakeLauncher(make).launch(EngineSpec("theirs-0", "fake", model, "/nowhere"))


@pytest.mark.parametrize(
    ("reported", "settings", "refusal"),
    [
        (
            {"enable_return_routed_experts": True},
            {"lifecycle": {"drain": "retract"}},
            "engine: .*enable-return-routed-experts with lifecycle.drain = retract: .* finish",
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/draft"},
            {},
            "needs_offload: .* its draft /draft, .* --enable-draft-weights-cpu-backup",
        ),
    ],
)
async def test_a_server_of_sglang_is_refused_by_what_it_reports(
    reported: dict[str, Any],
    settings: dict[str, Any],
    refusal: str,
    tmp_path: Path,
) -> None:
    theirs = await sglang_that_reports(reported, tmp_path)
    whole = config(theirs, tmp_path / "model", tmp_path, **settings)
    try:
        with pytest.raises(rollout.RolloutError, match=f"groups.theirs.{refusal}"):
            await asyncio.to_thread(lambda: rollout.launch(whole, backend="local"))
        assert await theirs.is_alive()
    finally:
        await theirs.kill()


async def test_a_launch_logs_the_draft_that_an_attached_server_reports(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reported = {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": "/draft",
        "enable_draft_weights_cpu_backup": True,
    }
    theirs = await sglang_that_reports(reported, tmp_path)
    whole = config(theirs, tmp_path / "model", tmp_path)

    def drive() -> None:
        with rollout.launch(whole, backend="local") as deployment:
            (group,) = deployment["policy"].status().result().groups
            drafts = group.engines[0].drafts
            assert drafts is not None
            assert (drafts.draft, drafts.share) == ("/draft", None)

    try:
        await asyncio.to_thread(drive)
    finally:
        await theirs.kill()
    (logged,) = [one for one in caplog.messages if "accepted drafts fall" in one]
    kept = "draft /draft: over an offload its weights are kept by enable-draft-weights-cpu-backup;"
    assert logged.startswith(f"engine theirs-0: {kept}")


async def test_an_engine_that_is_not_there_is_an_error_in_time() -> None:
    with reserve_port("127.0.0.1") as reservation:
        url = f"http://127.0.0.1:{reservation.port}"
    spec = EngineSpec("theirs-0", "attached", "", "", url=url, start_timeout_s=0.8)
    with pytest.raises(
        EngineNotReady, match=r"theirs-0 at http.* not ready after 0.8 s: .*connect"
    ):
        await attach(spec)


async def test_a_launch_that_waits_for_a_paused_engine_says_so_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])

    async def is_ready(self: FakeEngine) -> bool:
        return next(answers)

    monkeypatch.setattr(FakeEngine, "is_ready", is_ready)
    monkeypatch.setattr("engines.launch._PROBE_INTERVAL_S", 0.001)
    theirs = await HttpFakeLauncher().launch(EngineSpec("theirs-0", "fake", "/nowhere", "/nowhere"))
    url = theirs.endpoint.url
    try:
        spec = EngineSpec(
            "theirs-0", "attached", "", "", url=url, start_timeout_s=20, access=theirs.access
        )
        assert (await attach(spec)).endpoint.url == url
    finally:
        await theirs.kill()
    assert caplog.text.count("theirs-0: waits up to 20 s for it: it answers 503") == 1
    assert f"if it is paused and its weights are whole, send POST {url}/continue" in caplog.text


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_claim_that_is_taken_while_its_launch_is_cancelled_is_ended(
    is_refused: bool,
) -> None:
    began, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def claim() -> Callable[[], None]:
        began.set()
        assert may_end.wait(30)
        if is_refused:
            ended.set()
            raise ValueError("in use")
        return ended.set

    spec = EngineSpec("theirs-0", "attached", "", "", url="http://127.0.0.1:1", claim=claim)
    attaching = asyncio.create_task(attach(spec))
    assert await asyncio.to_thread(began.wait, 30)
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    assert not ended.is_set()
    may_end.set()
    assert await asyncio.to_thread(ended.wait, 30)


async def test_the_first_call_to_another_process_at_the_address_is_refused_with_both_names(
    tmp_path: Path,
) -> None:
    """Before any probe: it is not driven as the one that was attached."""
    model = tmp_path / "model"
    write_checkpoint(model)
    with reserve_port("127.0.0.1") as reservation:
        address = Endpoint("127.0.0.1", reservation.port)
    first = await _serve_at(address, model)
    whole = config(address.url, model, tmp_path, needs_offload=True)
    health = whole.servers["policy"].health.model_copy(update={"probe_interval_s": 600.0})
    server = whole.servers["policy"].model_copy(update={"health": health})
    unprobed = whole.model_copy(update={"servers": {"policy": server}})
    deployment = await asyncio.to_thread(lambda: rollout.launch(unprobed, backend="local"))
    try:
        policy = deployment["policy"]
        await first.cleanup()
        second = await _serve_at(address, model)
        with pytest.raises(rollout.RolloutError) as refused:
            await asyncio.to_thread(lambda: policy.phases.pause_generation().result(60))
        await second.cleanup()
    finally:
        await asyncio.to_thread(deployment.stop)
    said = str(refused.value)
    assert "is for process random_seed" in said
    assert "and this is random_seed" in said
    assert said.count("another engine has its address") == 1


async def _serve_at(address: Endpoint, model: Path) -> web.AppRunner:
    served = FakeHttpApp()
    served.engine = FakeEngine("theirs", endpoint=address, model_path=str(model))
    runner = web.AppRunner(served.app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address.host, address.port).start()
    return runner
