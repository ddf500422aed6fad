"""The route of each engine, from where ranks and engines run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rollout.config import Transport
from rollout.core.errors import ConfigError
from rollout.weights.routes.adapter import ADAPTER
from rollout.weights.routes.choice import (
    MOST_BYTES_BY_VALUE,
    ROUTES,
    by_value_note,
    check_reach,
    choose,
)
from rollout.weights.routes.route import Chosen, EnginePlace, RankPlace

AUTO = Transport.AUTO
IPC, PATH, BROADCAST, VALUE = (
    Transport.CUDA_IPC,
    Transport.SHARED_MEMORY,
    Transport.DISTRIBUTED,
    Transport.BY_VALUE,
)
# Two hosts with two ranks each; torch's names of their GPUs.
RANKS = [
    RankPlace("n0", 0, "aa-0"),
    RankPlace("n0", 0, "aa-1"),
    RankPlace("n1", 2, "bb-0"),
    RankPlace("n1", 2, "bb-1"),
]
ON_CPU = [RankPlace(rank.node, rank.host) for rank in RANKS]


def engine(node: str = "n0", *gpus: str, joins: bool = True, payloads: int = 0) -> EnginePlace:
    return EnginePlace("e", node, gpus, payloads or max(1, len(gpus)), joins)


def vllm(node: str = "n0", *gpus: str) -> EnginePlace:
    return replace(engine(node, *gpus), why_no_groups="no groups", why_no_handles="no handles")


def chosen(one: EnginePlace, ranks: list[RankPlace] = RANKS, no_room: str = "") -> Chosen:
    ranks = [replace(rank, why_no_room="" if rank.host else no_room) for rank in ranks]
    return choose(AUTO, ranks, [one])["e"]


def test_an_engine_on_the_ranks_gpus_gets_their_handles_in_the_order_of_its_ranks() -> None:
    assert chosen(engine("n0", "GPU-aa-1", "GPU-aa-0")) == Chosen(IPC, gpus=("aa-1", "aa-0"))
    assert chosen(engine("", "GPU-AA-0", "GPU-bb-1")) == Chosen(IPC, gpus=("aa-0", "bb-1"))
    assert chosen(engine("n1", "MIG-bb-0")) == Chosen(IPC, gpus=("bb-0",))


def test_no_order_of_ranks_changes_which_gpu_gets_which_handle() -> None:
    for ranks in itertools.permutations(RANKS):
        found = chosen(engine("n0", "GPU-aa-1", "GPU-bb-0"), list(ranks))
        assert found == Chosen(IPC, gpus=("aa-1", "bb-0"))


@pytest.mark.parametrize(
    "one",
    [
        engine("n0"),
        engine("n0", "GPU-cc-0"),
        engine("n0", "GPU-aa-0", "GPU-cc-0"),
        engine("n0", "GPU-aa-0", "GPU-aa-1", payloads=1),
    ],
    ids=["on the CPU", "another GPU", "one of two GPUs", "pipeline stages"],
)
def test_an_engine_beside_ranks_gets_shared_memory(one: EnginePlace) -> None:
    assert chosen(one) == Chosen(PATH, host=0)


def test_tensors_in_host_memory_have_no_handles() -> None:
    assert chosen(engine("n0", "GPU-aa-0"), ON_CPU) == Chosen(PATH, host=0)
    assert chosen(engine("n1", "GPU-bb-0"), ON_CPU) == Chosen(PATH, host=2)


def test_each_host_has_writers_of_its_own() -> None:
    payloads = {chosen(engine(node)).payload for node in ("n0", "n1")}
    assert payloads == {"shared_memory 0", "shared_memory 2"}
    # Ranks of one node in two containers, with a tmpfs each.
    assert chosen(engine("n0"), [RankPlace("n0", 1), RankPlace("n0", 0)]) == Chosen(PATH, host=0)


def test_an_engine_on_another_host_gets_a_broadcast() -> None:
    assert chosen(engine("n9")) == Chosen(BROADCAST)
    assert chosen(engine("n9", "GPU-cc-0")) == Chosen(BROADCAST)
    assert chosen(engine("")) == Chosen(BROADCAST)


def test_a_host_without_room_gets_a_broadcast() -> None:
    assert chosen(engine("n0"), no_room="/dev/shm is full") == Chosen(BROADCAST)
    assert chosen(engine("n1"), no_room="/dev/shm is full") == Chosen(PATH, host=2)
    assert chosen(engine("n0", "GPU-aa-0"), no_room="full") == Chosen(IPC, gpus=("aa-0",))
    two = [RankPlace("n0", 0, why_no_room="full"), RankPlace("n0", 1)]  # two containers
    assert choose(AUTO, two, [engine("n0")])["e"] == Chosen(PATH, host=1)


def test_an_engine_gets_no_route_that_it_does_not_take() -> None:
    assert chosen(vllm("n0", "GPU-aa-0")) == Chosen(PATH, host=0)
    far = chosen(vllm("n9", "GPU-cc-0"))
    assert far.transport is VALUE
    assert far.why == "no handles; it runs on another host than all ranks; no groups"
    full = chosen(vllm("n0", "GPU-aa-0"), no_room="/dev/shm is full")
    assert full.transport is VALUE
    assert full.why == "no handles; /dev/shm is full; no groups"


def test_by_value_is_last_and_says_why() -> None:
    found = chosen(engine("n9", joins=False))
    assert found.transport is VALUE
    assert "no GPUs" in found.why
    assert "another host" in found.why
    assert "cannot join" in found.why
    full = chosen(engine("n0", joins=False), no_room="/dev/shm is full")
    assert full.transport is VALUE
    assert "/dev/shm is full" in full.why


def test_every_engine_gets_exactly_one_route_and_the_best_that_reaches_it() -> None:
    nodes = ("n0", "n9", "")
    gpus: tuple[tuple[str, ...], ...] = ((), ("aa-0",), ("aa-0", "cc-0"))
    for node, held, joins, ranks, no_room in itertools.product(
        nodes, gpus, (True, False), (RANKS, ON_CPU), ("", "full")
    ):
        found = chosen(engine(node, *held, joins=joins), ranks, no_room)
        if held == ("aa-0",) and ranks is RANKS:
            wanted = IPC
        elif node == "n0" and not no_room:
            wanted = PATH
        else:
            wanted = BROADCAST if joins else VALUE
        assert found.transport is wanted, (node, held, joins, no_room)


def test_engines_of_one_push_have_their_own_routes() -> None:
    engines = [
        EnginePlace("gpu", "n0", ("GPU-aa-0",)),
        EnginePlace("beside", "n0"),
        EnginePlace("far", "n9"),
        EnginePlace("out of reach", "n9", is_reached=False),
    ]
    found = choose(AUTO, RANKS, engines)
    assert {name: one.transport for name, one in found.items()} == {
        "gpu": IPC,
        "beside": PATH,
        "far": BROADCAST,
        "out of reach": VALUE,
    }


@pytest.mark.parametrize("wanted", [BROADCAST, VALUE])
@pytest.mark.parametrize("one", [engine("n0", "GPU-aa-0"), engine("n9", joins=False)])
def test_a_broadcast_and_a_push_by_value_that_are_named_are_for_all(
    wanted: Transport, one: EnginePlace
) -> None:
    assert choose(wanted, RANKS, [one]) == {"e": Chosen(wanted)}


@pytest.mark.parametrize(
    ("wanted", "one", "why"),
    [
        (IPC, engine("n0"), "no GPUs"),
        (IPC, vllm("n0", "GPU-aa-0"), "no handles; leave weights.transport out"),
        (BROADCAST, vllm("n0", "GPU-aa-0"), "no groups; leave weights.transport out"),
        (IPC, engine("n0", "GPU-aa-0", "GPU-cc-0"), "no rank has its tensors on GPU GPU-cc-0"),
        (IPC, engine("n0", "GPU-aa-0", "GPU-aa-1", payloads=1), "2 GPUs and 1 tensor-parallel"),
        (PATH, engine("n9"), "runs on another host"),
        (PATH, engine(""), "several hosts"),
    ],
)
def test_a_route_that_is_named_and_does_not_reach_an_engine_is_refused(
    wanted: Transport, one: EnginePlace, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"{wanted}: engine e.*{why}") as failed:
        choose(wanted, RANKS, [one])
    assert failed.value.setting == "weights.transport"
    ranks = [replace(rank, why_no_room="the estimate says no") for rank in RANKS]
    full = choose(PATH, ranks, [engine("n0")])
    assert full == {"e": Chosen(PATH)}


def test_cuda_ipc_with_tensors_in_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rank has its tensors on GPU GPU-aa-0"):
        choose(IPC, ON_CPU, [engine("n0", "GPU-aa-0")])


def test_a_push_by_value_that_was_not_named_warns_with_its_bytes() -> None:
    slow = {"a": Chosen(VALUE, why="it is far"), "b": Chosen(VALUE, why="it is far")}
    note = by_value_note(AUTO, {**slow, "c": Chosen(PATH)}, 1000)
    assert note == "engine a and 1 more: the weights go by value, 2000 bytes, because it is far"
    assert by_value_note(AUTO, {"c": Chosen(PATH)}, 1 << 60) == ""
    assert by_value_note(VALUE, slow, 1 << 60) == ""


def test_a_large_push_by_value_is_refused_unless_it_was_named() -> None:
    half = {"a": Chosen(VALUE, why="it is far")}
    assert by_value_note(AUTO, half, MOST_BYTES_BY_VALUE)
    with pytest.raises(ConfigError, match=r"transport = by_value; or let a rank"):
        by_value_note(AUTO, half, MOST_BYTES_BY_VALUE + 1)


@pytest.mark.parametrize("wanted", [PATH, IPC])
def test_memory_of_one_host_does_not_reach_another_and_that_is_known_before_the_offload(
    wanted: Transport,
) -> None:
    check_reach(wanted, ["n0"], [engine("n0")])
    with pytest.raises(ConfigError, match=rf"{wanted}: engine e runs on another host.*use dist"):
        check_reach(wanted, ["n0"], [engine("n1")])
    with pytest.raises(ConfigError, match=rf"{wanted}: engine e has several hosts"):
        check_reach(wanted, ["n0"], [engine("")])
    check_reach(AUTO, ["n0"], [engine("n1")])


def test_a_copy_goes_by_routes_that_send_copies() -> None:
    copied = {
        one: choose(AUTO, RANKS, [engine(one, "GPU-aa-0")], is_copy=True)["e"].transport
        for one in ("n0", "n9")
    }
    assert copied == {"n0": PATH, "n9": VALUE}
    for wanted in (IPC, BROADCAST):
        with pytest.raises(ConfigError, match="reads the tensors while engines load them"):
            choose(wanted, RANKS, [engine("n0", "GPU-aa-0")], is_copy=True)
    for wanted in (PATH, VALUE, Transport.DISK):
        assert choose(wanted, RANKS, [engine("n0")], is_copy=True)["e"].transport is wanted


def test_each_transport_has_one_row() -> None:
    assert set(ROUTES) == set(Transport) - {AUTO} | {ADAPTER}
    assert all(row.transport == name for name, row in ROUTES.items())
