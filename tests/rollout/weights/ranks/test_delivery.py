"""How a push is delivered, for each combination of facts that can be."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from rollout.config import WeightUpdate
from rollout.weights.ranks.delivery import Delivery, PushFacts, StoreFiles, plan_delivery
from rollout.weights.routes.choice import ROUTES
from rollout.weights.routes.route import Chosen

NEAR, FAR = Chosen("shared_memory"), Chosen("shared_memory", host=2)
DELTA = Chosen("shared_memory", encoding="delta", is_full=False)
BEFORE_DELTA = Chosen("shared_memory", encoding="delta")
HANDLES, BROADCAST = Chosen("cuda_ipc"), Chosen("distributed")
DISK, BY_VALUE, ADAPTER = Chosen("disk"), Chosen("by_value"), Chosen("adapter", adapter="a")
ALL = (NEAR, FAR, DELTA, BEFORE_DELTA, HANDLES, BROADCAST, DISK, BY_VALUE)

COPIED, STREAMED, ONE_LOAD = Delivery
NONE, PUSHED, OFFERED = StoreFiles

# Delivery if the push streams, if it streams and loads cost, if it does not, if it does not and
# loads cost.
DELIVERIES = {
    (NEAR,): (STREAMED, ONE_LOAD, COPIED, ONE_LOAD),
    (BEFORE_DELTA,): (STREAMED, ONE_LOAD, COPIED, ONE_LOAD),
    (FAR,): (STREAMED, STREAMED, COPIED, COPIED),
    (DELTA,): (STREAMED, STREAMED, COPIED, COPIED),
    (BY_VALUE,): (STREAMED, STREAMED, COPIED, COPIED),
    (HANDLES,): (STREAMED, STREAMED, STREAMED, STREAMED),
    (BROADCAST,): (STREAMED, STREAMED, STREAMED, STREAMED),
    (DISK,): (COPIED, COPIED, COPIED, COPIED),
    (NEAR, FAR): (STREAMED, STREAMED, COPIED, COPIED),
    (NEAR, DELTA): (STREAMED, STREAMED, COPIED, COPIED),
    (NEAR, BY_VALUE): (STREAMED, STREAMED, COPIED, COPIED),
    (NEAR, DISK): (COPIED, COPIED, COPIED, COPIED),
    (NEAR, BROADCAST): (STREAMED, STREAMED, STREAMED, STREAMED),
    (HANDLES, DISK): (STREAMED, STREAMED, STREAMED, STREAMED),
    (BROADCAST, FAR, DISK): (STREAMED, STREAMED, STREAMED, STREAMED),
}

# Routes, with streams: the host that hashes, whether files are written, what the store reads.
FILES = {
    (NEAR,): (True, 0, True, OFFERED),
    (DELTA,): (False, None, False, OFFERED),
    (HANDLES,): (False, None, False, OFFERED),
    (FAR, NEAR): (False, 0, True, OFFERED),
    (FAR, BY_VALUE): (False, 2, True, OFFERED),
    (DISK, BROADCAST): (True, None, True, OFFERED),
    (NEAR, DELTA): (False, 0, True, OFFERED),
    # Complete before the server is called, and one for all: the store reads the push itself.
    (FAR,): (False, 2, True, PUSHED),
    (BEFORE_DELTA,): (False, 0, True, PUSHED),
    (DISK,): (True, None, True, NONE),
    (BY_VALUE,): (False, None, False, NONE),
}


@pytest.mark.parametrize("routes", DELIVERIES, ids=lambda routes: "+".join(r.text for r in routes))
def test_each_push_is_delivered_in_one_of_three_forms(routes: tuple[Chosen, ...]) -> None:
    cases = product((True, False), (False, True))
    for expected, (streams, costs) in zip(DELIVERIES[routes], cases, strict=True):
        for is_stored, can_check, order in product((True, False), (True, False), (1, -1)):
            facts = PushFacts(
                routes[::order],
                WeightUpdate.FULL,
                streams=streams,
                loads_at_once=costs,
                is_stored=is_stored,
                can_check_copies=can_check,
            )
            assert plan_delivery(facts).delivery is expected, facts


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("costs", [True, False])
def test_an_adapter_is_copied(streams: bool, costs: bool) -> None:
    facts = PushFacts((ADAPTER,), WeightUpdate.LORA, streams=streams, loads_at_once=costs)
    assert plan_delivery(facts).delivery is COPIED


@pytest.mark.parametrize("routes", FILES, ids=lambda routes: "+".join(r.text for r in routes))
def test_what_is_written_and_what_the_store_reads(routes: tuple[Chosen, ...]) -> None:
    streams, host, writes_files, store = FILES[routes]
    for is_stored in (True, False):
        plan = plan_delivery(PushFacts(routes, streams=streams, is_stored=is_stored))
        assert (plan.hashing_host, plan.writes_files) == (host, writes_files)
        assert plan.store is (store if is_stored else NONE)


def test_what_is_loaded_in_one_call_is_what_the_store_reads() -> None:
    plan = plan_delivery(PushFacts((NEAR,), loads_at_once=True, is_stored=True))
    assert (plan.delivery, plan.store) == (ONE_LOAD, PUSHED)


@pytest.mark.parametrize(
    ("routes", "streams", "checks"),
    [
        ((NEAR,), False, True),
        ((NEAR, FAR), False, True),
        ((NEAR,), True, False),
        ((DELTA,), False, False),
        ((BEFORE_DELTA,), False, False),
        ((NEAR, BY_VALUE), False, False),
        ((DISK,), False, False),
        ((HANDLES,), False, False),
    ],
)
def test_values_are_checked_in_the_copies_if_all_are_copied_to_files_first(
    routes: tuple[Chosen, ...], streams: bool, checks: bool
) -> None:
    for can_check in (True, False):
        facts = PushFacts(routes, streams=streams, can_check_copies=can_check)
        assert plan_delivery(facts).checks_values is (checks and can_check)


def test_what_holds_of_every_combination() -> None:
    sets = [routes for size in (1, 2, 3) for routes in combinations(ALL, size)]
    booleans = (False, True)
    for routes, *flags in product(sets, booleans, booleans, booleans, booleans):
        streams, costs, is_stored, can_check = flags
        facts = PushFacts(routes, WeightUpdate.FULL, streams, costs, is_stored, can_check)
        plan = plan_delivery(facts)
        if any(not ROUTES[route.transport].is_copy for route in routes):
            assert plan.delivery is STREAMED, facts
        elif not streams or DISK in routes:
            assert plan.delivery is not STREAMED, facts
        if plan.delivery is ONE_LOAD:
            assert len(routes) == 1, facts
        if plan.checks_values or plan.store is PUSHED:
            assert plan.delivery is not STREAMED, facts
        assert (plan.store is NONE) or is_stored, facts
