"""The lifecycle under every order of events within stated bounds: I1-I7 hold after each."""

import gc
import logging
import time
from collections.abc import Iterator

import pytest

from tests.explore.plans import DEFAULT, Plan
from tests.explore.search import Explorer

# Minutes of CPU; the planted bugs, which the same searches must find, are in the default run.
pytestmark = pytest.mark.slow

# The plans that take longest, and how many schedules they have: ``make test-chaos
# PYTEST_ARGS=tests/explore``.  "a step by phases" has the same calls with two departures.
IN_CHAOS = {"short phases": 28_862, "flush": 25_641, "long phases": 16_521}
# Of the other plans; with those they are 100 000.
LEAST_SCHEDULES = 100_000 - sum(IN_CHAOS.values())
PLANS = [
    pytest.param(plan, marks=[pytest.mark.chaos] if plan.name in IN_CHAOS else [], id=plan.name)
    for plan in DEFAULT
]
_done: dict[str, float] = {}
_traces: set[int] = set()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A hundred thousand failures are not worth a log line each, nor the collector's every look."""
    thresholds = gc.get_threshold()
    gc.set_threshold(5000, 20, 50)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.set_threshold(*thresholds)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", PLANS)
def test_no_order_of_events_breaks_an_invariant(plan: Plan) -> None:
    explorer, started = Explorer(), time.process_time()
    plan.search(explorer)
    _done[plan.name] = time.process_time() - started
    _traces.update(explorer.tally.traces)
    assert not explorer.tally.found, f"{plan.bound}\n{explorer.tally.found[0]}"
    assert explorer.tally.num_distinct >= IN_CHAOS.get(plan.name, 1)


def test_so_many_distinct_schedules_were_run(capsys: pytest.CaptureFixture[str]) -> None:
    if len(_done) < len(DEFAULT) - len(IN_CHAOS):
        pytest.skip("not all plans were run")
    num_distinct, elapsed_s = len(_traces), sum(_done.values())
    with capsys.disabled():
        print(
            f"\n{num_distinct} distinct schedules in {elapsed_s:.0f} s of CPU, "
            f"{num_distinct / elapsed_s:.0f} per second"
        )
    assert num_distinct >= LEAST_SCHEDULES
