"""An error must arrive on the other side of a process boundary as it left."""

import pickle

import pytest

import engines.protocol.errors
import rollout.core.errors
from engines.protocol.errors import (
    EngineError,
    EngineHung,
    EngineNotReady,
    EngineRejected,
    EngineUnreachable,
    NotEncodable,
    PortTaken,
)
from rollout.core.errors import (
    ActorLost,
    ConfigError,
    EngineFailure,
    GenerationAborted,
    GenerationFailed,
    LifecycleError,
    LogprobMismatch,
    PhaseFailed,
    PhaseTimeout,
    PlacementError,
    RankFailure,
    RolloutError,
    VersionUnavailable,
    WeightError,
    WeightMismatch,
    WeightsUnavailable,
)
from rollout.core.samples import Sample

FAILURE = EngineFailure("late", engine_id="main-0", operation="pause_generation", elapsed_s=2.5)
ERRORS = [
    RolloutError("text"),
    ConfigError("text", setting="servers.policy", value={"a": 1}),
    PlacementError("text", requested={"GPU": 16.0}, available={"GPU": 8.0}),
    LifecycleError(
        "text",
        command="release_memory_occupation",
        phase="paused",
        legal=("flush_cache", "continue_generation"),
    ),
    FAILURE,
    PhaseFailed("text", phase="pause_generation", failures=(FAILURE,)),
    PhaseTimeout("text", phase="flush_cache", budget_s=60.0, late={"main-0": "flush_cache"}),
    WeightError("text"),
    WeightMismatch("text", tensor="lm_head.weight", engine_id="main-1"),
    WeightsUnavailable("text"),
    RankFailure("text", ranks=(0, 3)),
    LogprobMismatch("text", engine_id="main-1", weight_version="3", gap=0.5),
    GenerationAborted("text", sample=Sample([1, 2], [3], [-0.5])),
    GenerationFailed("text", failures={1: "HTTP 400"}, replies=[None]),
    VersionUnavailable("text", weight_version=4, failures={0: "HTTP 409"}, replies=[None]),
    ActorLost("text", actor="group-main", may_have_executed=False),
    EngineError("text", engine="main-0", operation="flush_cache"),
    EngineUnreachable("text", engine="main-0", operation="generate", maybe_executed=False),
    EngineRejected("text", engine="main-0", operation="flush_cache", status=400, body="busy"),
    EngineNotReady("text", engine="main-0", log_tail="Traceback", exit_status=-9),
    EngineHung("text", engine="main-0", operation="pause_generation", budget_s=60.0),
    PortTaken("text", engine="main-0", port=20000),
    NotEncodable("text"),
]


def plain(value: object) -> object:
    """Errors are equal only to themselves, so what they say is compared."""
    if isinstance(value, BaseException):
        return type(value), str(value), {name: plain(field) for name, field in vars(value).items()}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_fields(error: Exception) -> None:
    assert plain(pickle.loads(pickle.dumps(error))) == plain(error)


@pytest.mark.parametrize("module", [rollout.core.errors, engines.protocol.errors])
def test_every_error_kind_is_in_the_table_above(module) -> None:
    kinds = {
        error
        for error in vars(module).values()
        if isinstance(error, type)
        and issubclass(error, Exception)
        and error.__module__ == module.__name__
    }
    assert kinds <= {type(error) for error in ERRORS}


def test_errors_are_also_what_a_caller_without_this_library_would_catch() -> None:
    assert isinstance(ConfigError("text"), ValueError)
    assert isinstance(PhaseTimeout("text"), TimeoutError)
    assert isinstance(EngineHung("text"), TimeoutError)
    assert str(EngineHung("text")) == "text"
