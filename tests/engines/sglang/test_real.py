"""Real SGLang, set up in ways the contract suite does not need."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import rollout
from engines.kinds import KINDS
from engines.launch import EngineSpec, LocalLauncher
from engines.protocol import MemoryTag, PauseMode
from engines.protocol.errors import EngineNotReady, EngineRejected
from engines.protocol.spec import spelled
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.routes.cuda_ipc import ByHandles
from rollout.weights.routes.route import EngineRoute
from rollout.weights.tensors.payload import flattened_bucket
from tests.engines.attached_config import config
from tests.engines.embedded.reference import greedy
from tests.support.contract import (
    GREEDY,
    PROMPT,
    Bench,
    Models,
    client,
    features_of,
    payload,
)
from tests.support.cpu_engines import cpu_engine
from tools.cpu_engines import install

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

W, KV = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE


def spec(models: Models, folder: Path, **fields: Any) -> EngineSpec:
    return EngineSpec(
        engine_id=fields.pop("engine_id", "real-0"),
        model_path=fields.pop("model_path", str(models.first)),
        log_path=str(folder / "engine.log"),
        **cpu_engine("sglang", **fields),
    )


def test_the_options_that_are_known_are_those_of_the_pinned_server() -> None:
    python, env = install.python_of("sglang"), os.environ | install.variables_of("sglang")
    code = (
        "import argparse; from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser(add_help=False); ServerArgs.add_cli_args(parser)\n"
        "words = [word for one in parser._actions for word in one.option_strings]\n"
        "print(*(word[2:] for word in words if word.startswith(chr(45) * 2)))"
    )
    asked = [python, "-c", code]
    printed = subprocess.run(asked, env=env, capture_output=True, text=True, check=True)
    known = {spelled(word) for word in printed.stdout.splitlines()[-1].split()}
    assert KINDS["sglang"].known_options() == known


@asynccontextmanager
async def launched(wanted: EngineSpec, models: Models) -> AsyncIterator[Bench]:
    running = await LocalLauncher().launch(wanted)
    engine = client(running, wanted.engine_id)
    try:
        yield Bench("sglang", engine, running, models)
    finally:
        await engine.aclose()
        await running.stop(10.0)


async def test_without_a_memory_saver_release_says_yes_and_frees_nothing(
    contract_models: Models, tmp_path: Path
) -> None:
    """So it is refused for a group that offloads, attached or not, and let in otherwise."""
    wanted = spec(contract_models, tmp_path, memory_saver=False)
    async with launched(wanted, contract_models) as bench:
        assert not (await features_of(bench.engine)).has_memory_saver
        before = await bench.running.resident_bytes()
        await bench.engine.pause_generation(PauseMode.ABORT)
        await bench.release(KV, W)
        after = await bench.running.resident_bytes()
        assert before is not None
        assert after is not None
        assert before - after < 2**20
        await bench.resume(KV, W)
        await bench.engine.continue_generation()

        offloaded = config(bench.running, contract_models.first, tmp_path)
        with pytest.raises(rollout.RolloutError, match="--enable-memory-saver"):
            await asyncio.to_thread(lambda: rollout.launch(offloaded, backend="local"))
        kept = config(bench.running, contract_models.first, tmp_path, needs_offload=False)

        def drive() -> None:
            with rollout.launch(kept, backend="local") as deployment:
                policy = deployment["policy"]
                policy.push(bench.tensors("second"), version=3).result()

        await asyncio.to_thread(drive)
        assert await bench.engine.weight_version() == "3"
        assert await bench.running.is_alive()


async def test_a_model_that_cannot_be_loaded_ends_with_sglangs_words(
    contract_models: Models, tmp_path: Path
) -> None:
    wanted = spec(contract_models, tmp_path, model_path=str(tmp_path), start_timeout_s=120.0)
    with pytest.raises(EngineNotReady) as failed:
        await LocalLauncher().launch(wanted)
    assert failed.value.exit_status not in (0, None)
    assert "config.json" in failed.value.log_tail or "model_type" in failed.value.log_tail


@pytest.mark.chaos
async def test_one_engine_spans_two_nodes(contract_models: Models, tmp_path: Path) -> None:
    """Two launchers on one machine, as two nodes would have them; one rank each.

    ``tests/end_to_end/sglang/test_two_nodes.py`` has one over Ray in the usual run.
    """
    first, second = LocalLauncher(), LocalLauncher()
    nodes: dict[str, Any] = {
        "num_nodes": 2,
        "dist_init_addr": first.hold_address("127.0.0.1"),
        "options": {"tp": 2},
        "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    }
    folders = [tmp_path / "0", tmp_path / "1"]
    ranks = [
        spec(contract_models, folder, node_rank=rank, engine_id=f"wide-0-{rank}", **nodes)
        for rank, folder in enumerate(folders)
    ]
    leader, follower = await asyncio.gather(first.launch(ranks[0]), second.launch(ranks[1]))
    engine = client(leader, "wide-0")
    try:
        bench = Bench("sglang", engine, leader, contract_models)
        found = await features_of(engine)
        assert found.num_payloads == 2
        assert len(await bench.greedy()) == 8
        await engine.begin_weight_update()
        await engine.update_weights_from_tensor(
            payload("sglang", bench.tensors("second")) * found.num_payloads, weight_version="1"
        )
        await engine.end_weight_update()
        assert await engine.weight_version() == "1"
        assert len((await engine.weights_checker()).tensors) == 2
    finally:
        await engine.aclose()
        await asyncio.gather(leader.stop(10.0), follower.stop(10.0))


@pytest.mark.chaos
async def test_replicas_take_weights_from_disk_only_and_one_answers_a_flush_for_all(
    contract_models: Models, tmp_path: Path
) -> None:
    """Why an engine with ``--dp`` is only let in where weights are not pushed."""
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    wanted = spec(contract_models, tmp_path, options={"dp": 2}, env=env)
    async with launched(wanted, contract_models) as bench:
        found = await features_of(bench.engine)
        assert not found.takes_tensors
        before = await bench.greedy()
        await bench.engine.begin_weight_update()
        with pytest.raises(EngineRejected, match="update_weights_from_tensor answered 500"):
            await bench.engine.update_weights_from_tensor(
                payload("sglang", bench.tensors("second")), weight_version="1"
            )
        async with bench.http() as http:  # it has closed the other connection
            assert (await http.post("/end_weight_update", json={})).status_code == 200
        assert await bench.greedy() == before
        assert "data-parallel replicas are not supported" in await bench.running.log_tail(200)

        # One replica has nothing to do, and now and then its answer is the one that comes.
        async with bench.in_flight() as busy, bench.http() as http:
            statuses = {(await http.post("/flush_cache")).status_code for _ in range(20)}
            assert busy.task is not None
            assert not busy.task.done()
        assert 200 in statuses

        await bench.engine.pause_generation(PauseMode.ABORT)
        await bench.engine.flush_cache(timeout_s=5.0)
        await bench.release(KV, W)
        await bench.resume(W)
        await bench.engine.update_weights_from_disk(str(contract_models.second), weight_version="2")
        await bench.resume(KV)
        await bench.engine.continue_generation()
        expected = greedy(contract_models.second, list(PROMPT), GREEDY.max_new_tokens)
        # In turn: each replica answers half of these.
        assert [await bench.greedy() for _ in range(4)] == [tuple(expected)] * 4


async def test_an_engine_that_started_with_dummy_weights_loads_from_a_folder(
    contract_models: Models, tmp_path: Path
) -> None:
    wanted = spec(contract_models, tmp_path, options={"load-format": "dummy"})
    async with launched(wanted, contract_models) as bench:
        await bench.engine.pause_generation(PauseMode.ABORT)
        await bench.engine.flush_cache(5.0)
        await bench.engine.update_weights_from_disk(str(contract_models.second), weight_version="1")
        await bench.engine.continue_generation()
        reply = await bench.engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        expected = greedy(contract_models.second, list(PROMPT), GREEDY.max_new_tokens)
        assert list(reply.output_ids) == list(expected)
        assert await bench.engine.weight_version() == "1"


async def test_a_push_by_path_is_one_load_of_linked_files_and_may_lack_what_is_not_pushed(
    contract_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_loads_cost = "rollout.weights.ranks.trainer_rank.why_loads_cost"
    monkeypatch.setattr(why_loads_cost, lambda kinds, config: "it packs")
    weights = {
        "transport": "shared_memory",
        "shared_memory_path": str(tmp_path),
        "bucket_bytes": 100_000,
        "not_pushed": ["model.norm.*"],  # ones in both checkpoints
    }
    async with launched(spec(contract_models, tmp_path), contract_models) as bench:
        values = config(bench.running, contract_models.first, tmp_path, needs_offload=False)
        changed = values.model_dump(mode="json")
        changed["servers"]["policy"]["weights"] |= weights
        pushed = bench.tensors("second")
        del pushed["model.norm.weight"]

        def drive() -> None:
            with rollout.launch(rollout.RolloutConfig.from_dict(changed), backend="local") as one:
                one["policy"].push(pushed, version=3).result()

        await asyncio.to_thread(drive)
        assert (await bench.running.log_tail(400)).count("online from disk begin") == 1
        expected = greedy(contract_models.second, list(PROMPT), GREEDY.max_new_tokens)
        assert await bench.greedy() == tuple(expected)


async def test_each_tensor_parallel_rank_opens_the_entry_of_its_own_gpu(
    contract_models: Models, tmp_path: Path
) -> None:
    """The entries differ, and hold bytes in place of CUDA IPC handles: there is no GPU."""
    wanted = spec(
        contract_models,
        tmp_path,
        options={"tp": 2},
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    async with launched(wanted, contract_models) as bench:
        entries = {
            which: flattened_bucket(list(bench.tensors(which).items()))
            for which in ("first", "second")
        }

        async def ranks_after(version: int, *handles: str) -> Sequence[Mapping[str, str]]:
            payload = {
                "head": "",
                "tail": "",
                "handles": {
                    f"gpu-{rank}": base64.b64encode(entries[which]).decode()
                    for rank, which in enumerate(handles)
                },
            }
            routes = {"real-0": EngineRoute("handles", ByHandles(("gpu-0", "gpu-1")))}
            push = WeightPush(version, Manifest({}), [{"handles": payload}], routes=routes)
            answers = await push_weights(
                push, {"real-0": PushTarget(bench.engine, payload_copies=2)}, budget_s=60
            )
            assert answers["real-0"].failure is None
            assert await bench.engine.weight_version() == str(version)
            return (await bench.engine.weights_checker()).tensors

        first = await ranks_after(1, "first", "first")
        second = await ranks_after(2, "second", "second")
        mixed = await ranks_after(3, "second", "first")
        assert first[0] != second[0]
        assert first[1] != second[1]
        assert list(mixed) == [second[0], first[1]]
