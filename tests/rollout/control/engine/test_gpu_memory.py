"""Engines with GPUs: a release is measured on the GPU, and a resume has to find room there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engines.fake import FakeEngine, FakeLauncher
from engines.launch import EngineSpec
from engines.protocol import Endpoint, GpuMemory, MemoryTag, ServerInfo
from rollout.control.group.server_group import ServerGroup
from rollout.core.errors import LifecycleError, PhaseFailed
from rollout.rules.lifecycle import Command
from tests.support.builders import make_group, push

MIB = 2**20
PER_TAG = 300 * MIB
TO_RELEASED = (Command.PAUSE_GENERATION, Command.FLUSH_CACHE, Command.RELEASE_MEMORY_OCCUPATION)


class Hoarder(FakeEngine):
    """It replies to a release with success, and frees nothing."""

    @property
    def resident_bytes(self) -> int:
        return len(MemoryTag) * PER_TAG


class GpuGroup:
    """A started group with one engine on two GPUs."""

    def __init__(self, group: ServerGroup, launcher: FakeLauncher) -> None:
        self.group = group
        self.launcher = launcher

    @classmethod
    async def start(
        cls, folder: Path, kind: type[FakeEngine] = FakeEngine, *, reports_memory: bool = True
    ) -> GpuGroup:
        with (folder / "model.safetensors").open("wb") as checkpoint:
            checkpoint.truncate(PER_TAG)

        def make(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
            return kind(
                spec.engine_id,
                endpoint=endpoint,
                memory_bytes=len(MemoryTag) * PER_TAG,
                reports_memory=reports_memory,
            )

        launcher = FakeLauncher(make)
        group, _ = make_group(
            1, launcher=launcher, model_path=str(folder), engine={"kind": "fake", "gpus": 2}
        )
        await group.start()
        return cls(group, launcher)

    async def run(self, *commands: Command) -> int:
        """Run them; returns the bytes that the last one freed."""
        freed = 0
        for command in commands:
            freed = (await self.group.run(command)).freed_bytes
        return freed

    @property
    def others(self) -> Callable[[int], None]:
        """Sets what other programs hold on each of its GPUs."""
        gpus = self.launcher.processes["main-0"].gpus

        def hold(num_bytes: int) -> None:
            gpus.others = num_bytes

        return hold


@pytest.mark.parametrize("reports_memory", [True, False])
async def test_a_release_counts_what_the_gpus_got_back(
    tmp_path: Path, reports_memory: bool
) -> None:
    held = await GpuGroup.start(tmp_path, reports_memory=reports_memory)
    held.others(100 * MIB)  # the trainer is beside it all the time
    assert await held.run(*TO_RELEASED) == 3 * PER_TAG


async def test_an_engine_that_keeps_its_gpu_memory_is_fenced(tmp_path: Path) -> None:
    held = await GpuGroup.start(tmp_path, Hoarder)
    with pytest.raises(PhaseFailed, match="freed 0 B, at least 688 MiB must be freed"):
        await held.run(*TO_RELEASED)
    assert held.launcher.processes["main-0"].is_stopped


async def test_without_nvml_a_release_is_not_measured_and_goes_on(tmp_path: Path) -> None:
    held = await GpuGroup.start(tmp_path)
    held.launcher.processes["main-0"].gpus.is_measured = False
    assert await held.run(*TO_RELEASED) == 0
    (engine,) = (await held.group.status()).engines
    assert engine.state == "offloaded"
    await held.run(Command.ONLOAD_WEIGHTS)


async def test_weights_without_room_are_refused_before_any_engine_is_called(
    tmp_path: Path,
) -> None:
    held = await GpuGroup.start(tmp_path)
    await held.run(*TO_RELEASED)
    gpus = held.launcher.processes["main-0"].gpus
    held.others(gpus.total_bytes - 100 * MIB)
    with pytest.raises(LifecycleError) as caught:
        await held.run(Command.ONLOAD_WEIGHTS)
    said = str(caught.value)
    assert "engine main-0: GPU GPU-0 has 100 MiB free, weights need 150 MiB" in said
    assert "GPU GPU-1 has 100 MiB free" in said
    assert "pid 77 (trainer) holds 1.66 GiB, free it (in PyTorch: torch.cuda.empty_cache())" in said
    engine = held.launcher["main-0"]
    assert "resume_memory_occupation" not in engine.operations()
    assert not engine.is_dead
    # The trainer frees it, and the same command goes on.
    held.others(0)
    await held.run(Command.ONLOAD_WEIGHTS)
    assert MemoryTag.WEIGHTS not in engine.released


async def test_a_holder_of_an_unknown_number_of_bytes_is_named_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await GpuGroup.start(tmp_path)
    await held.run(*TO_RELEASED)
    gpus = held.launcher.processes["main-0"].gpus
    held.others(gpus.total_bytes - 100 * MIB)
    measured = gpus.memory

    def memory(engine_bytes: int) -> Sequence[GpuMemory]:
        return [
            replace(gpu, holders={"pid 78 (unknown)": None, **gpu.holders})
            for gpu in measured(engine_bytes) or ()
        ]

    monkeypatch.setattr(gpus, "memory", memory)
    with pytest.raises(LifecycleError) as caught:
        await held.run(Command.ONLOAD_WEIGHTS)
    said = "pid 77 (trainer) holds 1.66 GiB, pid 78 (unknown) holds memory, free it"
    assert said in str(caught.value)


async def test_the_kv_cache_without_room_is_refused_after_the_push(tmp_path: Path) -> None:
    held = await GpuGroup.start(tmp_path)
    await held.run(*TO_RELEASED, Command.ONLOAD_WEIGHTS)
    await held.group.run(Command.UPDATE_WEIGHTS, push=push(1))
    await held.group.run(Command.VERIFY, version=1)
    gpus = held.launcher.processes["main-0"].gpus
    # The weights are back, 150 MiB on each; the KV cache and the graphs need 300 MiB more.
    held.others(gpus.total_bytes - 449 * MIB)
    with pytest.raises(LifecycleError, match="kv_cache and cuda_graph need 300 MiB"):
        await held.run(Command.ONLOAD_KV)
    held.others(gpus.total_bytes - 450 * MIB)
    await held.run(Command.ONLOAD_KV, Command.CONTINUE_GENERATION)
    (engine,) = (await held.group.status()).engines
    assert (engine.state, engine.weight_version) == ("serving", 1)


OTHERS = 20 << 30


class Inflated(FakeEngine):
    """SGLang counts as weights what the free memory of the GPU fell by while it loaded them."""

    async def server_info(self) -> ServerInfo:
        info = await super().server_info()
        said = {
            tag: num + OTHERS * (tag == MemoryTag.WEIGHTS)
            for tag, num in info.resident_bytes.items()
        }
        return replace(info, resident_bytes=said, released=None)


@pytest.mark.parametrize("names_own", [True, False])
async def test_what_others_took_while_it_loaded_neither_ends_an_engine_nor_keeps_it_asleep(
    tmp_path: Path, names_own: bool
) -> None:
    held = await GpuGroup.start(tmp_path, Inflated)
    held.launcher.processes["main-0"].gpus.names_own = names_own
    assert await held.run(*TO_RELEASED) == 3 * PER_TAG
    await held.run(Command.ONLOAD_WEIGHTS)
    assert MemoryTag.WEIGHTS not in held.launcher["main-0"].released


class Slow(FakeEngine):
    """While it releases, the trainer beside it allocates."""

    held: GpuGroup

    async def release_memory_occupation(self, tags: Sequence[MemoryTag]) -> None:
        await super().release_memory_occupation(tags)
        self.held.others(OTHERS)


@pytest.mark.parametrize("names_own", [True, False])
async def test_a_trainer_that_allocates_during_a_release_does_not_end_the_engine(
    tmp_path: Path, names_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    held = await GpuGroup.start(tmp_path, Slow)
    engine = held.launcher["main-0"]
    assert isinstance(engine, Slow)
    engine.held = held
    held.launcher.processes["main-0"].gpus.names_own = names_own
    freed = await held.run(*TO_RELEASED)
    assert freed == (3 * PER_TAG if names_own else 0)
    assert not engine.is_dead
    assert ("by all programs on its GPUs together" in caplog.text) is not names_own


class Liar(Hoarder):
    """It replies to a release with success, and reports itself that it holds all."""

    async def server_info(self) -> ServerInfo:
        return replace(await super().server_info(), released=frozenset())


async def test_what_the_engine_itself_reports_as_held_is_proof_without_the_drivers_word(
    tmp_path: Path,
) -> None:
    held = await GpuGroup.start(tmp_path, Liar)
    held.launcher.processes["main-0"].gpus.names_own = False
    with pytest.raises(PhaseFailed, match="freed 0 B, at least 688 MiB must be freed"):
        await held.run(*TO_RELEASED)
