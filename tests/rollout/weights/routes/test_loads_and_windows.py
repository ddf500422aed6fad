"""How a push uses its transport."""

from typing import Any

import pytest

from rollout.config import EngineKind, Transport, WeightsConfig, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.weights.routes.choice import (
    check_window,
    loads_at_once,
    stream_note,
    why_loads_cost,
)

AUTO, SHARED = Transport.AUTO, Transport.SHARED_MEMORY
SGLANG, EMBEDDED = EngineKind.SGLANG, EngineKind.EMBEDDED
MIXTURE, QUANTISED = {"num_experts": 8}, {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("kinds", "checkpoint", "said"),
    [
        ({SGLANG}, MIXTURE, "experts"),
        ({SGLANG}, {"text_config": {"n_routed_experts": 8}}, "experts"),
        ({SGLANG}, QUANTISED, "quantised weights"),
        ({EngineKind.ATTACHED}, QUANTISED, "quantised weights"),
        ({SGLANG}, {"num_experts": None}, ""),
        ({SGLANG}, {}, ""),
        ({EMBEDDED, EngineKind.FAKE}, MIXTURE, ""),
    ],
)
def test_which_engines_do_more_at_a_load_than_copy(
    kinds: set[EngineKind], checkpoint: dict[str, Any], said: str
) -> None:
    why = why_loads_cost(kinds, checkpoint)
    assert said in why
    assert bool(why) is bool(said)


@pytest.mark.parametrize(
    ("wanted", "why_cost", "streams", "at_once", "is_warned"),
    [
        (AUTO, "it packs", False, True, False),
        (AUTO, "it packs", True, True, False),
        (SHARED, "it packs", False, True, False),
        (SHARED, "it packs", True, False, True),
        (SHARED, "", True, False, False),
        (AUTO, "", True, False, False),
    ],
)
def test_costly_loads_are_one_unless_the_settings_ask_for_a_stream_by_path(
    wanted: Transport,
    why_cost: str,
    streams: bool,
    at_once: bool,
    is_warned: bool,
) -> None:
    assert loads_at_once(wanted, why_cost, streams=streams) is at_once
    assert bool(stream_note(wanted, why_cost, streams=streams)) is is_warned


@pytest.mark.parametrize("transport", ["distributed", "cuda_ipc"])
@pytest.mark.parametrize("update", ["full", "partial"])
def test_a_window_that_could_not_copy_is_refused_before_the_offload(
    transport: str, update: str
) -> None:
    weights = WeightsConfig(transport=Transport(transport), update=WeightUpdate(update))
    with pytest.raises(ConfigError, match=r"window.push cannot copy them; use offloaded\(weights="):
        check_window(weights, is_copy=True)
    check_window(weights, is_copy=False)


@pytest.mark.parametrize("update", ["lora", "frozen"])
def test_a_window_without_tensors_of_the_model_takes_any_transport(update: str) -> None:
    weights = WeightsConfig(transport=Transport.DISTRIBUTED, update=WeightUpdate(update))
    check_window(weights, is_copy=True)


def test_a_frozen_server_refuses_weights_before_the_offload() -> None:
    with pytest.raises(ConfigError, match="is frozen"):
        check_window(WeightsConfig(update=WeightUpdate.FROZEN), is_copy=False)
