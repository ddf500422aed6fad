"""What the actors count on Ray to do, and what they must not count on.

Run over the stub and over Ray, which is what keeps the stub honest.
"""

import asyncio
import os
import sys
import threading
from typing import Any

import pytest

from rollout.runtime.worker_process import is_own_process
from tests.support.notebook import Notebook
from tests.support.ray_worlds import World

TIMEOUT_S = 20


@pytest.fixture
def notebook(world: World) -> Any:
    actor = world.ray.remote(num_cpus=0)(Notebook).remote()
    yield actor
    world.ray.kill(actor)


def get(world: World, ref: Any) -> Any:
    return world.ray.get(ref, timeout=TIMEOUT_S)


def test_every_call_is_carried_out_once_in_whatever_order(world: World, notebook: Any) -> None:
    refs = [notebook.note.remote(number) for number in range(30)]
    assert get(world, refs) == list(range(30))
    assert sorted(get(world, notebook.read.remote())) == list(range(30))


def test_an_actor_knows_whether_its_process_is_its_own(world: World, notebook: Any) -> None:
    pid, is_its_own = get(world, notebook.where.remote())
    assert is_its_own == (pid != os.getpid())
    assert not is_own_process()


def test_turns_are_short_only_in_a_process_that_is_its_own(world: World, notebook: Any) -> None:
    before_s = sys.getswitchinterval()
    pid, _ = get(world, notebook.where.remote())
    expected_s = before_s if pid == os.getpid() else 0.0005
    assert get(world, notebook.turn_s.remote()) == pytest.approx(expected_s)
    assert sys.getswitchinterval() == before_s


def test_an_argument_is_a_copy(world: World, notebook: Any) -> None:
    mine = ["a"]
    theirs = get(world, notebook.note.remote(mine))
    mine.append("b")
    assert theirs == ["a"]
    assert get(world, notebook.read.remote()) == [["a"]]


def test_what_cannot_be_pickled_is_refused_where_it_is_sent(world: World, notebook: Any) -> None:
    with pytest.raises(TypeError, match="lock"):
        notebook.note.remote(threading.Lock())


def test_a_reference_among_the_arguments_arrives_as_its_value_and_a_nested_one_as_it_is(
    world: World, notebook: Any
) -> None:
    ref = world.ray.put("value")
    assert get(world, notebook.note.remote(ref)) == "value"
    (nested,) = get(world, notebook.note.remote([ref]))
    assert isinstance(nested, world.ray.ObjectRef)
    assert get(world, nested) == "value"


def test_an_error_is_of_its_own_class_and_of_rays(world: World, notebook: Any) -> None:
    with pytest.raises(ValueError, match="the book is full") as caught:
        get(world, notebook.fail.remote())
    assert isinstance(caught.value, world.ray.exceptions.RayTaskError)
    assert "in fail" in str(caught.value)
    assert str(caught.value.cause) == "the book is full"


def test_an_error_with_two_arguments_does_not_survive(world: World, notebook: Any) -> None:
    with pytest.raises(world.ray.exceptions.RayError, match="TwoArguments") as caught:
        get(world, notebook.fail_with_two.remote())
    assert type(caught.value).__name__ == "UnserializableException"


async def test_giving_up_does_not_stop_the_call(world: World, notebook: Any) -> None:
    ref = notebook.hang.remote()
    await notebook.hangs.remote()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ref, 0.01)
    await notebook.release.remote()
    assert await ref == "released"
    assert await notebook.read.remote() == []


def test_get_gives_up_with_a_timeout_error(world: World, notebook: Any) -> None:
    with pytest.raises(world.ray.exceptions.GetTimeoutError):
        world.ray.get(notebook.hang.remote(), timeout=0.01)


def test_a_cancel_is_delivered(world: World, notebook: Any) -> None:
    ref = notebook.hang.remote()
    get(world, notebook.hangs.remote())
    world.ray.cancel(ref)
    with pytest.raises(world.ray.exceptions.TaskCancelledError):
        get(world, ref)
    assert get(world, notebook.read.remote()) == ["cancelled"]


def test_wait_tells_what_is_ready_from_what_is_not(world: World, notebook: Any) -> None:
    hanging, quick = notebook.hang.remote(), notebook.note.remote(1)
    assert world.ray.wait([hanging, quick], timeout=TIMEOUT_S) == ([quick], [hanging])


def test_a_kill_fails_the_calls_under_way_and_all_later_ones(world: World, notebook: Any) -> None:
    ref = notebook.hang.remote()
    get(world, notebook.hangs.remote())
    world.ray.kill(notebook)
    # Ray kills after it returns: a call that is made before the death is known may be answered.
    with pytest.raises(world.ray.exceptions.ActorDiedError):
        get(world, ref)
    with pytest.raises(world.ray.exceptions.ActorDiedError):
        get(world, notebook.read.remote())


def test_a_constructor_that_fails_kills_the_actor(world: World) -> None:
    broken = world.ray.remote(num_cpus=0)(Notebook).remote(True)
    with pytest.raises(world.ray.exceptions.ActorDiedError, match="it is broken"):
        get(world, broken.read.remote())


def test_an_actor_dies_with_its_creator(world: World, notebook: Any) -> None:
    remote_class = world.ray.remote(num_cpus=0)(Notebook)
    (child,) = get(world, notebook.have_child.remote(remote_class))
    hanging = child.hang.remote()
    world.ray.kill(notebook)
    with pytest.raises(world.ray.exceptions.ActorDiedError, match="owner has died"):
        get(world, hanging)


def test_a_name_is_taken_once_and_found_in_its_namespace(world: World) -> None:
    named = world.ray.remote(num_cpus=0)(Notebook).options(name="diary", namespace="mine")
    actor = named.remote()
    get(world, actor.note.remote("found"))
    with pytest.raises(ValueError, match="already taken"):
        named.remote()
    found = world.ray.get_actor("diary", namespace="mine")
    assert get(world, found.read.remote()) == ["found"]
    with pytest.raises(ValueError, match="diary"):
        world.ray.get_actor("diary", namespace="yours")
    world.ray.kill(actor)
