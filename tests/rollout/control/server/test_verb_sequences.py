"""Random sequences of a server's verbs over fakes, in virtual time (``support/verb_walk.py``)."""

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engines.fake import FakeTensor, faults
from engines.fake.engine.fake_weights import fingerprint_of
from rollout.control.server.server import RolloutServer
from rollout.core.types import ServerStatus
from rollout.rules.lifecycle import Command
from rollout.weights.format.manifest import Manifest
from rollout.weights.push.weight_push import WeightPush
from tests.explore.steered import CONTROL
from tests.support import builders
from tests.support.builders import ServerBench, make_server
from tests.support.verb_walk import VerbWalk
from tests.support.virtual_time import pass_time, virtual_time

NUM_BATCHES, PER_BATCH, NUM_STEPS = 20, 100, 12
GROUPS: tuple[dict[str, dict[str, Any]], ...] = (
    {"main": {"num_engines": 2}},
    {"main": {"num_engines": 2, "needs_offload": False}},
    {"shared": {"num_engines": 2}, "apart": {"num_engines": 1, "needs_offload": False}},
    {"main": {"num_engines": 3}},
)
HEALTH = {
    "probe_interval_s": 5.0,
    "probe_timeout_s": 1.0,
    "max_restarts": 1000,
    "backoff_s": 0.001,
    "max_backoff_s": 0.001,
}
LIFECYCLE = {"command_timeout_s": 10.0}
FAULTS = (faults.reject(), faults.lose(), faults.lose(executed=True), faults.die(), faults.hang())
OPERATIONS = sorted(CONTROL - {"canary"})
CALLS: Mapping[str, Any] = {
    "offload": RolloutServer.offload,
    "serve": RolloutServer.serve,
    "pause_generation": lambda server: server.run(Command.PAUSE_GENERATION),
    "flush_cache": lambda server: server.run(Command.FLUSH_CACHE),
    "release_memory_occupation": lambda server: server.run(Command.RELEASE_MEMORY_OCCUPATION),
    "onload_weights": lambda server: server.run(Command.ONLOAD_WEIGHTS),
    "verify": lambda server: server.run(Command.VERIFY),
    "onload_kv": lambda server: server.run(Command.ONLOAD_KV),
    "continue_generation": lambda server: server.run(Command.CONTINUE_GENERATION),
}
PUSHES: Mapping[str, Any] = {
    "push": RolloutServer.push,
    "update_weights": RolloutServer.update_weights,
}


class FakeRig:
    """A server over fakes in memory; pushes with and without fingerprints."""

    def __init__(self, bench: ServerBench, has_fingerprints: bool) -> None:
        self._bench = bench
        self._has_fingerprints = has_fingerprints

    async def call(self, verb: str, push: Any = None, engine_id: str = "") -> None:
        server = self._bench.server
        if verb in PUSHES:
            await PUSHES[verb](server, push)
        elif verb == "remove":
            await server.remove_engine(engine_id)
        elif verb == "add":
            await server.add_engine(engine_id)
        else:
            await CALLS[verb](server)

    def push(self, version: int, contents: int) -> WeightPush:
        made = builders.push(contents)
        tensors = made.manifest.tensors
        prints = {
            name: fingerprint_of(FakeTensor(spec.shape, contents)) for name, spec in tensors.items()
        }
        manifest = Manifest(tensors, prints if self._has_fingerprints else {})
        return WeightPush(version, manifest, made.buckets)

    async def status(self) -> ServerStatus:
        return await self._bench.server.status()

    async def kill(self, engine_ids: Collection[str]) -> None:
        for engine_id in engine_ids:
            self._bench[engine_id].die("killed -9")

    def plan_fault(self, engine_id: str, random: Random) -> str:
        operation, fault = random.choice(OPERATIONS), random.choice(FAULTS)
        self._bench[engine_id].faults.strike(operation, fault)
        return f"{engine_id} {operation} {fault.kind}"

    def clear_faults(self) -> None:
        for engine in self._bench.engines:
            engine.faults.clear()

    async def wait(self) -> None:
        await pass_time(20.0)

    async def held(self, contents: int) -> dict[str, bool]:
        tensors = builders.manifest().tensors
        expected = {
            name: fingerprint_of(
                FakeTensor(spec.shape, contents) if contents else ("checkpoint", name)
            )
            for name, spec in tensors.items()
        }
        return {
            engine_id: self._bench[engine_id].weights.digests == expected
            and not self._bench[engine_id].weights_are_garbage
            for engine_id, state in self._bench.router.states.items()
            if state == "serving" and not self._bench[engine_id].is_dead
        }


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def walk(folder: Path, seed: int, num_steps: int = NUM_STEPS) -> VerbWalk:
    """One sequence; the same for the same seed."""
    random = Random(seed)
    walks: list[VerbWalk] = []

    @virtual_time
    async def run() -> None:
        groups = random.choice(GROUPS)
        on_failure = random.choice(("fence", "fence", "raise"))
        bench = make_server(
            folder, groups, health=HEALTH, lifecycle=LIFECYCLE | {"on_failure": on_failure}
        )
        await bench.server.start()
        try:
            made = VerbWalk(FakeRig(bench, random.random() < 0.5), random)
            made.log.append(f"seed {seed}: {list(groups)}, on_failure: {on_failure}")
            walks.append(made)
            await made.run(num_steps)
        finally:
            await bench.server.stop()

    run()
    return walks[0]


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_what_serves_holds_what_was_pushed_and_there_is_no_dead_end(
    tmp_path: Path, batch: int
) -> None:
    for number in range(PER_BATCH):
        walk(tmp_path, batch * PER_BATCH + number)


def test_a_few_sequences(tmp_path: Path) -> None:
    for seed in range(5):
        walk(tmp_path, 1_000_000 + seed)


def test_a_sequence_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    assert walk(tmp_path, 7).log == walk(tmp_path, 7).log
