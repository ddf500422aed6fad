"""Every process of the store may be killed at any of its steps: what counts stays whole."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from rollout.core.errors import WeightsUnavailable
from rollout.weights.format.manifest import Manifest, TensorSpec
from tests.support.store_worlds import Crash, DyingFiles, World

# Few tensors, but several units, segments and dtypes: each step is another world.
SMALL = Manifest.of(
    [
        TensorSpec("embed.weight", "bfloat16", (8, 8)),
        TensorSpec("layers.0.norm.weight", "float32", (3,)),
        *(
            TensorSpec(f"layers.0.experts.{expert}.weight", "bfloat16", (5, 7))
            for expert in range(3)
        ),
    ]
)


def world(base: Path, replicas: int = 2) -> World:
    made = World(base, 2, manifest=SMALL, unit_bytes=200, segment_bytes=300, replicas=replicas)
    made.write(1)
    made.write(2)
    return made


def check_and_go_on(made: World, *, wrote: bool) -> None:
    """Exactly one version can be had, the new one if its write had returned; life goes on."""
    found = made.restorable(range(5))
    assert found in ([2], [3])
    assert found == [3] or not wrote
    made.write(4)
    assert made.restorable(range(6)) == [4]
    made.close()


def steps_of(
    die: Callable[[World, int], DyingFiles], base: Path, replicas: int = 2
) -> Iterator[tuple[World, bool]]:
    """Worlds in which the third write met its death, at one step after the other."""
    for step in count(1):
        made = world(base / str(step), replicas)
        dying = die(made, step)
        wrote = True
        try:
            made.write(3)
        except (WeightsUnavailable, Crash):
            wrote = False
        if not dying.is_dead:
            made.new_coordinator()
            made.close()
            assert step > 10
            return
        yield made, wrote


def kill_agent(name: str) -> Callable[[World, int], DyingFiles]:
    def die(made: World, step: int) -> DyingFiles:
        files = made.nodes[name].files
        files.die_at = files.num_steps + step
        return files

    return die


@pytest.mark.parametrize("name", ["node-0", "node-1"])
def test_an_agent_may_be_killed_at_any_step_of_a_write(name: str, shared_memory: Path) -> None:
    for made, _ in steps_of(kill_agent(name), shared_memory):
        # With a replica elsewhere the write has gone through without it.
        assert made.restorable(range(5)) in ([2], [3])
        made.nodes[name].start()
        check_and_go_on(made, wrote=False)


# What one node alone keeps is copied there by another way.
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("name", ["node-0", "node-1"])
def test_everything_may_be_killed_when_an_agent_is(
    name: str, replicas: int, shared_memory: Path
) -> None:
    for made, wrote in steps_of(kill_agent(name), shared_memory, replicas):
        made.restart_all()
        check_and_go_on(made, wrote=wrote)


class DyingAgents(DyingFiles):
    """The coordinator's process: it dies between two of its messages."""

    def around(self, made: World) -> dict[str, object]:
        return {name: _Messages(self, node) for name, node in made.nodes.items()}


class _Messages:
    def __init__(self, dying: DyingAgents, target: object) -> None:
        self._dying = dying
        self._target = target

    def __getattr__(self, name: str) -> object:
        def call(*args: object, **more: object) -> object:
            if self._dying._step():
                raise Crash
            answer = getattr(self._target, name)(*args, **more)
            return _Messages(self._dying, answer) if name == "sink" else answer

        return call


@pytest.mark.parametrize("all_die", [False, True])
def test_the_coordinator_may_be_killed_between_any_two_messages(
    all_die: bool, shared_memory: Path
) -> None:
    def die(made: World, step: int) -> DyingFiles:
        dying = DyingAgents(step)
        made.new_coordinator(dying.around(made))
        return dying

    for made, wrote in steps_of(die, shared_memory):
        if all_die:
            made.restart_all()
        made.new_coordinator()
        check_and_go_on(made, wrote=wrote)


def test_a_second_death_while_the_next_version_is_written_changes_nothing(
    shared_memory: Path,
) -> None:
    for made, wrote in steps_of(kill_agent("node-0"), shared_memory):
        made.restart_all()
        kept = made.restorable(range(5))
        assert kept == [3] or not wrote
        files = made.nodes["node-1"].files
        files.die_at = files.num_steps + 7
        made.write(4)  # its other replica is enough
        assert files.is_dead
        made.restart_all()
        assert made.restorable(range(6)) == [4]
        made.close()
