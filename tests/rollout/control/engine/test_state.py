"""Where an engine is, as far as it is known."""

from types import SimpleNamespace
from typing import Any

from engines.protocol import TensorInfo
from rollout.control.engine.state import EngineState
from rollout.core.types import EngineSlot, NodeShare

SLOT = EngineSlot("main-0", "main", 0, "a", (0,), (0, 1), more=(NodeShare("b", (1,), (2, 3)),))


def member(*node_ids: str) -> EngineState:
    process: Any = SimpleNamespace(node_ids=node_ids)
    engine: Any = None
    return EngineState(SLOT, process, engine, has_session=False, weight_version=None)


def test_its_place_is_its_slot_where_there_is_but_one_node() -> None:
    assert member().current_slot is SLOT


def test_its_place_is_where_it_runs_after_its_node_was_lost() -> None:
    assert member("a", "b").current_slot == SLOT
    place = member("a", "c").current_slot
    assert [(one.node_id, one.gpu_ids) for one in place.shares] == [("a", (0, 1)), ("c", (2, 3))]
    assert place.engine_id == "main-0"


def test_only_tensors_that_an_engine_lists_are_compared_with_the_sent_ones() -> None:
    """One whose ranks have shards of them lists none."""
    engine = member()
    engine.pushed, engine.pushed_dtypes = {"a": "xxh3:1"}, {"a": "float32"}
    assert engine.comparable_fingerprints() == {}
    engine.tensors = (TensorInfo("a", "float32", (2,)),)
    assert engine.comparable_fingerprints() == {"a": "xxh3:1"}
