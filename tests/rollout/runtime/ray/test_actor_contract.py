"""What a training loop may rely on when servers are actors: the same over the stub and over Ray.

The engines are fakes that listen, so that a test can hold one and see what the others do.
"""

import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.fake.http_fake import HttpFakeLauncher
from rollout.config import LifecycleConfig, WeightUpdate
from rollout.control.group.server_group import GroupSettings
from rollout.control.server.server import RolloutServer
from rollout.core.errors import ActorLost, ConfigError, LifecycleError, PhaseFailed
from rollout.core.pending import Pending
from rollout.rules.lifecycle import Command
from rollout.runtime.handle import DeploymentHandle, ServerHandle
from tests.support.builders import push, server_config
from tests.support.processes import wait_until
from tests.support.ray_worlds import NUM_CPUS, World
from tests.support.served_fakes import (
    TIMEOUT_S,
    ServedEngine,
    config,
    engines_of,
    fail_to_make,
    launched,
)

ONE_ENGINE = {"main": {"num_engines": 1}}
UNWATCHED = {"recover": False}


@pytest.fixture(scope="module")
def deployment(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle]:
    """Two groups behind one router; each test hands them back serving."""
    with launched(world.load("launch").launch_ray, tmp_path_factory.mktemp("run")) as handle:
        yield handle


@pytest.fixture
def policy(deployment: DeploymentHandle) -> ServerHandle:
    return deployment["policy"]


@pytest.fixture
def engines(policy: ServerHandle) -> Iterator[dict[str, ServedEngine]]:
    with engines_of(policy) as found:
        yield found


def next_push(policy: ServerHandle) -> Any:
    return push(policy.status().result(TIMEOUT_S).weight_version + 1, num_buckets=2)


def window(policy: ServerHandle) -> None:
    """One offload and onload."""
    policy.offload().result(TIMEOUT_S)
    policy.push(next_push(policy)).result(TIMEOUT_S)


# -- calls ----------------------------------------------------------------------------------


def test_every_verb_returns_its_object_ref_before_its_work_is_done(
    world: World,
    deployment: DeploymentHandle,
    policy: ServerHandle,
    engines: dict[str, ServedEngine],
) -> None:
    def update() -> Pending[Any]:
        shipped = policy._caller.ship(next_push(policy))
        return policy._caller.call(RolloutServer.update_weights, shipped)

    verbs: dict[str, tuple[Callable[[], Pending[Any]], str]] = {
        "pause_generation": (policy.phases.pause_generation, "pause_generation"),
        "flush_cache": (policy.phases.flush_cache, "flush_cache"),
        "release_memory_occupation": (
            policy.phases.release_memory_occupation,
            "release_memory_occupation",
        ),
        "onload_weights": (policy.phases.onload_weights, "resume_memory_occupation"),
        "update_weights": (update, "update_weights_from_tensor"),
        "verify": (policy.phases.verify, "model_info"),
        "onload_kv": (policy.phases.onload_kv, "resume_memory_occupation"),
        "continue_generation": (policy.phases.continue_generation, "continue_generation"),
    }
    for command, (verb, operation) in verbs.items():
        engines["shared-1"].hold(operation)
        pending = verb()
        assert isinstance(pending.object_ref, world.ray.ObjectRef)
        engines["shared-1"].wait_entered(operation)
        assert not pending.done(), command
        engines["shared-1"].open(operation)
        assert list(pending.result(TIMEOUT_S).phase_s) == [command]
    assert policy.status().result(TIMEOUT_S).phase == "serving"


def test_whole_transitions_have_an_object_ref_too(world: World, policy: ServerHandle) -> None:
    calls: list[Callable[[], Pending[Any]]] = [
        policy.status,
        policy.offload,
        lambda: policy.push(next_push(policy)),
        policy.serve,
    ]
    for call in calls:
        pending = call()
        assert isinstance(pending.object_ref, world.ray.ObjectRef)
        pending.result(TIMEOUT_S)


def test_a_push_that_differs_from_the_checkpoint_is_named_across_actors(
    world: World, tmp_path: Path
) -> None:
    launch_ray = world.load("launch").launch_ray
    with launched(launch_ray, tmp_path, ONE_ENGINE, health=UNWATCHED, run_id="path") as deployment:
        policy = deployment["policy"]
        sent = policy._caller.ship(push(1))
        with pytest.raises(PhaseFailed, match=r"weights differ .*lm_head\.weight"):
            policy._caller.call(RolloutServer.check_push_path, sent).result(TIMEOUT_S)
        assert policy.status().result(TIMEOUT_S).gate == "closed"


def test_an_engine_leaves_and_comes_back_while_the_others_serve(
    policy: ServerHandle,
) -> None:
    removed = policy.engines.remove("shared-1").result(TIMEOUT_S)
    assert removed.engine_id == "shared-1"
    with pytest.raises(LifecycleError, match="no engine shared-1 to remove"):
        policy.engines.remove("shared-1").result(TIMEOUT_S)
    window(policy)
    assert policy.engines.add("shared-1").result(TIMEOUT_S).state == "stale"
    window(policy)
    engines = policy.status().result(TIMEOUT_S).groups[0].engines
    assert [(one.engine_id, one.state) for one in engines] == [
        ("shared-0", "serving"),
        ("shared-1", "serving"),
    ]


async def test_a_call_may_be_awaited_on_any_loop(policy: ServerHandle) -> None:
    assert (await policy.phases.pause_generation()).reports[0].phase == "paused"
    assert (await policy.phases.continue_generation()).reports[0].phase == "serving"


def test_status_answers_while_a_command_runs(
    policy: ServerHandle, engines: dict[str, ServedEngine]
) -> None:
    engines["apart-0"].hold("pause_generation")
    pausing = policy.phases.pause_generation()
    engines["apart-0"].wait_entered("pause_generation")
    status = policy.status().result(TIMEOUT_S)
    assert (status.lock_owner, status.gate) == ("pause_generation", "holding")
    engines["apart-0"].open("pause_generation")
    pausing.result(TIMEOUT_S)
    policy.phases.continue_generation().result(TIMEOUT_S)


def test_giving_up_on_a_call_does_not_stop_it(
    policy: ServerHandle, engines: dict[str, ServedEngine]
) -> None:
    engines["shared-0"].hold("pause_generation")
    pausing = policy.phases.pause_generation()
    with pytest.raises(TimeoutError, match="the call goes on"):
        pausing.result(timeout_s=0.01)
    engines["shared-0"].wait_entered("pause_generation")
    engines["shared-0"].open("pause_generation")
    assert pausing.result(TIMEOUT_S).phase_s.keys() == {"pause_generation"}
    policy.phases.continue_generation().result(TIMEOUT_S)


# -- phases are barriers --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("pause_generation", "flush_cache"),
        ("flush_cache", "release_memory_occupation"),
        ("resume_memory_occupation", "continue_generation"),
    ],
)
def test_no_group_begins_a_phase_before_every_group_has_ended_the_one_before(
    policy: ServerHandle, engines: dict[str, ServedEngine], earlier: str, later: str
) -> None:
    slow = engines["shared-0" if earlier.startswith("resume") else "apart-0"]
    before = {name: len(one.requests(f"/{later}")) for name, one in engines.items()}
    slow.hold(earlier)
    if earlier.startswith("resume"):
        policy.offload().result(TIMEOUT_S)
        transition = policy.push(next_push(policy))
    else:
        transition = policy.offload()
    slow.wait_entered(earlier)
    policy.status().result(TIMEOUT_S)
    assert {name: len(one.requests(f"/{later}")) for name, one in engines.items()} == before
    slow.open(earlier)
    transition.result(TIMEOUT_S)
    ends = [answered for one in engines.values() for _, answered in one.requests(f"/{earlier}")]
    begins = [came for one in engines.values() for came, _ in one.requests(f"/{later}")[-1:]]
    assert max(ends) <= min(begins)
    if not earlier.startswith("resume"):
        policy.push(next_push(policy)).result(TIMEOUT_S)


def test_a_deployment_goes_on_from_where_its_server_is(
    deployment: DeploymentHandle, policy: ServerHandle
) -> None:
    policy.phases.pause_generation().result(TIMEOUT_S)
    done = deployment.offload().result(TIMEOUT_S)["policy"].phase_s
    assert {"flush_cache", "release_memory_occupation"} <= done.keys()
    policy.push(next_push(policy)).result(TIMEOUT_S)
    assert deployment.status().result(TIMEOUT_S)["policy"].phase == "serving"


def test_a_group_that_keeps_its_gpus_is_paused_and_updated_but_not_released(
    policy: ServerHandle, engines: dict[str, ServedEngine]
) -> None:
    window(policy)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert engines["apart-0"].requests(path) == []
        assert engines["shared-0"].requests(path) != []
    assert engines["apart-0"].checksum() == engines["shared-0"].checksum()


def test_buckets_travel_by_object_ref_and_every_engine_gets_them_all(
    world: World, policy: ServerHandle, engines: dict[str, ServedEngine]
) -> None:
    shipped = policy._caller.ship(next_push(policy))
    assert [type(bucket) for bucket in shipped.buckets] == [world.ray.ObjectRef] * 2
    before = {
        name: len(one.requests("/update_weights_from_tensor")) for name, one in engines.items()
    }
    policy.offload().result(TIMEOUT_S)
    policy._caller.call(RolloutServer.push, shipped).result(TIMEOUT_S)
    for name, one in engines.items():
        assert len(one.requests("/update_weights_from_tensor")) == before[name] + 2
    assert len({one.checksum() for one in engines.values()}) == 1


# -- errors ---------------------------------------------------------------------------------


async def test_an_error_arrives_as_it_was_raised(policy: ServerHandle) -> None:
    await policy.phases.pause_generation()
    with pytest.raises(LifecycleError) as caught:
        policy.phases.release_memory_occupation().result(TIMEOUT_S)
    with pytest.raises(LifecycleError) as awaited:
        await policy.phases.release_memory_occupation()
    await policy.phases.continue_generation()
    for error in (caught.value, awaited.value):
        assert type(error) is LifecycleError
        assert str(error) == (
            "cannot release_memory_occupation while paused; "
            "legal now: flush_cache, continue_generation"
        )
        assert (error.command, error.phase, error.legal) == (
            "release_memory_occupation",
            "paused",
            ("flush_cache", "continue_generation"),
        )
        told = "".join(traceback.format_exception(error))
        assert "RayTaskError" not in told
        assert "shells.py" not in told


def test_a_failed_engine_is_named_with_its_own_words(
    policy: ServerHandle, world: World, tmp_path: Any
) -> None:
    launch = world.load("launch").launch_ray
    with (
        launched(launch, tmp_path, ONE_ENGINE, run_id="failing") as handle,
        engines_of(handle["policy"]) as engines,
    ):
        for _ in range(2):  # after the first it is aborted, and asked again
            engines["main-0"].fail_next("flush_cache", "3 requests still run")
        with pytest.raises(PhaseFailed, match=r"main-0.*3 requests still run") as caught:
            handle["policy"].offload().result(TIMEOUT_S)
        assert [one.engine_id for one in caught.value.failures] == ["main-0"]
        assert handle["policy"].status().result(TIMEOUT_S).gate == "closed"


def test_an_order_older_than_one_already_seen_is_refused(world: World) -> None:
    group = _engineless_group(world)
    group.run(Command.PAUSE_GENERATION, 5).object_ref.future().result(TIMEOUT_S)
    with pytest.raises(LifecycleError, match="command 3 came after command 5"):
        _result(world, group.run(Command.CONTINUE_GENERATION, 3))
    assert _result(world, group.status()).phase == "paused"
    world.ray.kill(group._actor)


def test_orders_that_overtake_one_another_never_undo_a_later_one(world: World) -> None:
    group = _engineless_group(world)
    for first in range(1, 60, 3):
        calls = [
            group.run(Command.PAUSE_GENERATION, first),
            group.run(Command.CONTINUE_GENERATION, first + 1),
            group.run(Command.PAUSE_GENERATION, first + 2),
        ]
        outcomes = [_outcome(world, call) for call in calls]
        assert outcomes[-1] == "paused", outcomes
        assert _result(world, group.status()).phase == "paused", outcomes
    world.ray.kill(group._actor)


def _outcome(world: World, call: Any) -> str:
    try:
        return str(_result(world, call).phase)
    except LifecycleError as error:
        return str(error)


def _engineless_group(world: World) -> Any:
    lifecycle = LifecycleConfig()
    groups = server_config(ONE_ENGINE).groups
    settings = GroupSettings(
        "main", "groups.main", "/none", "/none", groups["main"], WeightUpdate.FULL, lifecycle
    )
    actor_class = world.ray.remote(num_cpus=0)(world.load("group_actor").ServerGroupActor)
    actor = actor_class.remote(settings, [], None)
    group = world.load("handles").remote_group(actor, "policy/main")
    _result(world, group.start())
    return group


def _result(world: World, call: Any) -> Any:
    future = call.object_ref.future()
    return Pending(
        future, translate=lambda error: world.load("remote_call").peel(error, call.actor)
    ).result(TIMEOUT_S)


# -- the end --------------------------------------------------------------------------------


def test_a_lost_server_is_named_and_stop_ends_the_rest(world: World, tmp_path: Any) -> None:
    before = world.live_actors()
    handle = world.load("launch").launch_ray(
        config(tmp_path, ONE_ENGINE, run_id="lost"), launcher=HttpFakeLauncher()
    )
    world.ray.kill(world.ray.get_actor("rollout-lost-policy", namespace="rollout"))
    with pytest.raises(ActorLost, match=r"rollout-lost-policy: The actor died.* again") as caught:
        handle["policy"].status().result(TIMEOUT_S)
    assert caught.value.actor == "rollout-lost-policy"
    # Groups and engines are its own, and end with it; routers serve until the stop.
    assert wait_until(lambda: set(world.live_actors()) <= {*before, "RouterActor"}, TIMEOUT_S), (
        world.live_actors()
    )
    handle.stop()
    assert wait_until(lambda: world.live_actors() == before, TIMEOUT_S), world.live_actors()


def test_a_lost_group_is_named_with_what_to_do(world: World, tmp_path: Any) -> None:
    before = sorted(world.live_actors())
    launch = world.load("launch").launch_ray
    with launched(launch, tmp_path, ONE_ENGINE, health=UNWATCHED, run_id="halved") as handle:
        world.crash_newest("ServerGroupActor")
        with pytest.raises(ActorLost, match=r"policy/main.*with health\.recover") as caught:
            handle["policy"].offload().result(TIMEOUT_S)
        assert (caught.value.actor, caught.value.is_dead) == ("policy/main", True)
        assert handle["policy"].status().result(TIMEOUT_S).gate == "closed"
    assert wait_until(lambda: sorted(world.live_actors()) == before, TIMEOUT_S)


def test_stop_leaves_no_actor_no_name_and_no_reserved_cpu(world: World, tmp_path: Any) -> None:
    before = sorted(world.live_actors())
    free = world.ray.available_resources().get("CPU")
    with launched(world.load("launch").launch_ray, tmp_path, ONE_ENGINE, run_id="brief"):
        assert len(world.live_actors()) == len(before) + 4
        assert world.ray.available_resources().get("CPU") < NUM_CPUS
    assert wait_until(lambda: sorted(world.live_actors()) == before, TIMEOUT_S)
    # More may come free meanwhile: what the test before reserved is given back in its own time.
    assert wait_until(lambda: world.ray.available_resources().get("CPU", 0) >= free, TIMEOUT_S)
    with pytest.raises(ValueError, match="rollout-brief-policy"):
        world.ray.get_actor("rollout-brief-policy", namespace="rollout")


def test_a_run_of_the_same_id_that_lives_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = world.load("launch").launch_ray
    monkeypatch.setattr(world.load("engine_handle"), "_NAME_TIMEOUT_S", 0.2)
    with launched(launch, tmp_path / "one", ONE_ENGINE, run_id="twice") as handle:
        with pytest.raises(ConfigError, match=r"run_id = 'twice': the actor rollout-twice-policy"):
            launch(
                config(tmp_path / "two", ONE_ENGINE, run_id="twice"), launcher=HttpFakeLauncher()
            )
        assert handle["policy"].status().result(TIMEOUT_S).gate == "open"


def test_a_run_waits_for_its_name_that_is_free_a_moment_later(world: World, tmp_path: Path) -> None:
    """Ray frees the name of a killed actor late when the host is busy."""
    actor_class = world.ray.remote(num_cpus=0)(HasTheName)
    before = actor_class.options(name="rollout-next-policy", namespace="rollout").remote()
    timer = threading.Timer(0.5, world.ray.kill, [before])
    timer.start()
    with launched(world.load("launch").launch_ray, tmp_path, ONE_ENGINE, run_id="next") as handle:
        assert handle["policy"].status().result(TIMEOUT_S).gate == "open"
    timer.join()


class HasTheName:
    """An actor of a run before."""


def test_an_engine_that_does_not_start_is_told_and_nothing_is_left(
    world: World, tmp_path: Any
) -> None:
    before = sorted(world.live_actors())
    with pytest.raises(PhaseFailed, match=r"main-0.*no such model layer"):
        world.load("launch").launch_ray(
            config(tmp_path, ONE_ENGINE, run_id="stillborn"),
            launcher=HttpFakeLauncher(fail_to_make),
        )
    assert wait_until(lambda: sorted(world.live_actors()) == before, TIMEOUT_S)


def test_a_launch_that_fails_leaves_nothing_of_its_weight_store(
    world: World, tmp_path: Path
) -> None:
    before = sorted(world.live_actors())
    run_id = f"unkept-{uuid.uuid4().hex[:8]}"
    weights = {"store": {"spare_bytes": 0}}
    with pytest.raises(PhaseFailed, match="no such model layer"):
        world.load("launch").launch_ray(
            config(tmp_path, ONE_ENGINE, run_id=run_id, server={"weights": weights}),
            launcher=HttpFakeLauncher(fail_to_make),
        )
    assert wait_until(lambda: sorted(world.live_actors()) == before, TIMEOUT_S)
    assert not list(Path("/dev/shm").glob(f"rollout-store-*/{run_id}.*"))
