"""Nodes that cannot be written to directly get deltas, and keep whole tensors.  Needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rollout.config import StoreConfig  # noqa: E402
from rollout.core.errors import WeightsUnavailable  # noqa: E402
from rollout.weights.format.encoding import BegunPush, EncodedPush  # noqa: E402
from rollout.weights.format.manifest import Manifest  # noqa: E402
from rollout.weights.push.weight_push import WeightPush  # noqa: E402
from rollout.weights.store.agents import StoreTerms  # noqa: E402
from rollout.weights.store.delta_chain import DeltaChain  # noqa: E402
from rollout.weights.store.node.agent import StoreAgent  # noqa: E402
from rollout.weights.store.store import WeightStore  # noqa: E402
from rollout.weights.tensors.delta_base import DeltaBase, DeltaEncoder  # noqa: E402
from rollout.weights.tensors.payload import flattened_bucket  # noqa: E402
from rollout.weights.tensors.push_plan import specs_of  # noqa: E402
from rollout.weights.tensors.sources import Pairs  # noqa: E402
from tests.support.random_deltas import Tensors, changed  # noqa: E402
from tests.support.store_worlds import Served, flip  # noqa: E402

pytestmark = pytest.mark.embedded


def model() -> Tensors:
    """Several units, dtypes and layers, and a tensor without elements."""
    return {
        "model.embed.weight": torch.randn(400, 64).to(torch.bfloat16),
        "model.layers.0.norm.weight": torch.randn(300),
        "model.layers.0.experts.0.up.weight": torch.randn(100, 64).to(torch.bfloat16),
        "model.layers.0.experts.1.up.weight": torch.randn(100, 64).to(torch.bfloat16),
        "model.layers.1.scale": torch.randn(90, 100).to(torch.float8_e4m3fn),
        "model.layers.1.empty": torch.empty(0, 8),
    }


def content_of(tensors: Tensors) -> dict[str, bytes]:
    return {
        name: one.contiguous().view(torch.uint8).numpy().tobytes() for name, one in tensors.items()
    }


class Trainer:
    """Makes pushes with deltas, as rank 0 does."""

    def __init__(self) -> None:
        torch.manual_seed(1)  # the share of changed elements differs by some percent
        self.tensors = model()
        self._base = DeltaBase()

    def push(self, version: int, share: float | None = 0.02) -> WeightPush:
        """Version 1 is of whole tensors."""
        if version > 1:
            self.tensors = changed(self.tensors, share)
        is_whole = self._base.version is None
        encoder = DeltaEncoder(self._base, BegunPush(version, {}, is_whole, is_stored=True))
        encoder.encode(Pairs.of(self.tensors.items()))
        encoder.succeed()
        buckets = (flattened_bucket(list(self.tensors.items())),)
        manifest = Manifest.of(specs_of(self.tensors.items()))
        return WeightPush(version, manifest, buckets, encoded=encoder.stored)


class Replicas:
    """Three nodes behind TCP, of which two keep each unit, and the pushes that are written."""

    def __init__(self, base: Path) -> None:
        self.trainer = Trainer()
        manifest = Manifest.of(specs_of(self.trainer.tensors.items()))
        options: Any = {"unit_bytes": 6000, "segment_bytes": 20_000}
        self.served = Served(base, shares_files=False, manifest=manifest, **options)
        self.world = self.served.world
        self.chain = DeltaChain()

    def write(self, push: WeightPush, tensors: Callable[[], Iterator[Any]] | None = None) -> int:
        """Returns the bytes that went to the nodes."""
        self.chain = self.chain.then(push)
        content = content_of(self.trainer.tensors).items() if tensors is None else tensors()
        coordinator = self.world.coordinator
        try:
            coordinator.write(push.version, push.manifest, [content], after=self.chain.after)
        finally:
            self.chain = self.chain.since(push.version)
        return coordinator.sent_bytes

    def check(self, version: int) -> None:
        """An engine gets every bit of this version on each node, and nothing else."""
        for node in self.served.servers:
            assert self.world.restore(version, node) == content_of(self.trainer.tensors)


@pytest.fixture
def replicas(shared_memory: Path) -> Iterator[Replicas]:
    made = Replicas(shared_memory)
    yield made
    made.served.close()


def test_each_version_is_restored_whole_of_deltas(replicas: Replicas) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    assert whole == 2 * sum(map(len, content_of(replicas.trainer.tensors).values()))
    shares = [0.01, 0.0, 0.03, None, 0.9, 0.01]
    sent = []
    for version, share in enumerate(shares, 2):
        sent.append(replicas.write(replicas.trainer.push(version, share)))
        replicas.check(version)
    small, nothing, more, _, most, last = sent
    # Of bfloat16: 3 bytes for each changed element, and about 200 for the head of each tensor.
    assert max(small, last) < 0.05 * whole
    assert more < 0.08 * whole
    assert nothing < 0.01 * whole
    assert most == pytest.approx(whole, rel=0.01), "a delta would be larger"


def test_of_a_write_that_came_too_late_the_deltas_are_sent_with_the_next(
    replicas: Replicas,
) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    replicas.chain = replicas.chain.then(replicas.trainer.push(2))
    assert replicas.write(replicas.trainer.push(3)) < 0.1 * whole
    replicas.check(3)


def test_the_chain_is_bounded_and_begins_again_with_whole_tensors(replicas: Replicas) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    chain = replicas.chain
    longest = 0
    for version in range(2, 40):
        push = replicas.trainer.push(version, 0.03)
        chain = chain.then(push)
        longest = max(longest, len(chain.links))
    assert 5 < longest < 20
    replicas.chain = DeltaChain()
    assert replicas.write(push) == pytest.approx(whole, rel=0.01)
    replicas.check(39)
    assert replicas.write(replicas.trainer.push(40)) < 0.1 * whole
    replicas.check(40)


def test_another_coordinator_sends_whole_tensors(replicas: Replicas) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    replicas.world.new_coordinator(replicas.served.clients)
    assert replicas.write(replicas.trainer.push(2)) == whole
    replicas.check(2)


# -- faults -----------------------------------------------------------------------------------


def test_a_node_that_missed_a_version_gets_the_next_one_whole(replicas: Replicas) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    lost = replicas.served.servers["node-1"]
    lost.close()
    replicas.write(replicas.trainer.push(2))
    replicas.served.open(lost.agent)
    sent = replicas.write(replicas.trainer.push(3))
    # The units were on two nodes meanwhile, so those nodes get theirs whole, too.
    assert sent == whole
    replicas.check(3)
    assert replicas.write(replicas.trainer.push(4)) < 0.1 * whole
    replicas.check(4)


@pytest.mark.parametrize("is_killed", [False, True], ids=["cut off", "killed"])
def test_a_node_that_is_lost_in_mid_delta_keeps_nothing_of_it(
    replicas: Replicas, is_killed: bool
) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    push = replicas.trainer.push(2)
    lost = replicas.served.servers["node-1"]

    def tensors() -> Iterator[Any]:
        for number, one in enumerate(content_of(replicas.trainer.tensors).items()):
            if number == 2:
                lost.close()
            yield one

    replicas.write(push, tensors)
    assert replicas.world.restore(2, "node-0") == content_of(replicas.trainer.tensors)
    agent = lost.agent
    if is_killed:
        agent.close(clear=False)
        agent = StoreAgent(agent.settings)
    assert {write.version for write in agent.state().sealed} == {1}
    replicas.served.open(agent)
    replicas.check(2)
    assert replicas.write(replicas.trainer.push(3)) > 0.3 * whole
    replicas.check(3)
    assert replicas.write(replicas.trainer.push(4)) < 0.1 * whole
    replicas.check(4)


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 4])


def swapped(deltas: dict[str, bytes | None]) -> dict[str, bytes | None]:
    one, other = (f"model.layers.0.experts.{number}.up.weight" for number in (0, 1))
    return {**deltas, one: deltas[other], other: deltas[one]}


FAULTS: dict[str, Callable[[dict[str, bytes | None]], dict[str, bytes | None]]] = {
    "cut": lambda deltas: {name: one and cut(one) for name, one in deltas.items()},
    "flipped": lambda deltas: {name: one and flipped(one) for name, one in deltas.items()},
    "of another tensor": swapped,
    "lost": lambda deltas: {},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_delta_is_not_kept_and_whole_tensors_follow(replicas: Replicas, fault: str) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    first = content_of(replicas.trainer.tensors)
    push = replicas.trainer.push(2)
    assert push.encoded is not None
    wrong = replace(push, encoded=EncodedPush(1, FAULTS[fault](push.encoded.tensors)))
    with pytest.raises(WeightsUnavailable, match="delta"):
        replicas.write(wrong)
    for node in replicas.served.servers:
        assert replicas.world.restore(1, node) == first
    # As after any failure, the chain begins again.
    replicas.chain = DeltaChain()
    assert replicas.write(replicas.trainer.push(3)) == whole
    replicas.check(3)


def test_a_node_whose_copy_is_damaged_is_left_out_and_then_written_whole(
    replicas: Replicas,
) -> None:
    whole = replicas.write(replicas.trainer.push(1))
    agent = replicas.served.servers["node-1"].agent
    write = replicas.world.coordinator.current_write()
    assert write is not None
    segment = agent.record(write).segments_of("node-1")[0]
    with agent.pinned(write) as kept:
        flip(kept.folder / segment.file, len(segment.header) + 5)
    replicas.write(replicas.trainer.push(2))
    assert {one.version for one in agent.state().sealed} == {1}
    replicas.check(2)
    sent = replicas.write(replicas.trainer.push(3))
    assert 0.3 * whole < sent < whole
    replicas.check(3)
    assert replicas.world.coordinator.current_write() in agent.state().sealed


# -- the store of a server ------------------------------------------------------------------------


async def test_a_store_sends_deltas_and_whole_tensors_after_a_failure(replicas: Replicas) -> None:
    class Remote:
        def agents(self) -> Any:
            return replicas.served.clients

    settings = StoreConfig(spare_bytes=0, unit_bytes=6000, max_failures=2)
    terms = replace(StoreTerms.of(settings, "run", "policy"), run="run")
    store = WeightStore(terms, Remote())  # type: ignore[arg-type]
    await store.start()

    async def sent(push: WeightPush) -> int:
        store.offer(push)
        await store.is_idle()
        status = await store.status()
        assert status.version == push.version, status.reason
        await asyncio.to_thread(replicas.check, push.version)
        return status.sent_bytes

    whole = await sent(replicas.trainer.push(1))
    assert await sent(replicas.trainer.push(2)) < 0.1 * whole
    dropped = replicas.trainer.push(3)
    store.offer(dropped)
    assert store.make_way() is None
    assert await sent(replicas.trainer.push(4)) < 0.15 * whole
    push = replicas.trainer.push(5)
    store.offer(replace(push, encoded=EncodedPush(4, {})))
    await store.is_idle()
    status = await store.status()
    assert status.version == 4
    assert "made of deltas, is not what the trainer has" in status.reason
    assert await sent(replicas.trainer.push(6)) == whole
    assert await sent(replicas.trainer.push(7)) < 0.1 * whole
    await store.stop()
