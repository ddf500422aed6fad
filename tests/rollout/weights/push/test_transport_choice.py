"""Which transport a push takes."""

import re
from typing import Any

import pytest

from rollout.config import EngineKind, Transport, WeightsConfig, WeightUpdate
from rollout.core.errors import ConfigError
from rollout.weights.push.transport_choice import (
    check_window,
    choose_backend,
    choose_transport,
    loads_at_once,
    stream_note,
    why_cumem_differs,
    why_loads_cost,
)

AUTO, TENSOR, SHARED = Transport.AUTO, Transport.TENSOR, Transport.SHARED_MEMORY


@pytest.mark.parametrize(
    ("wanted", "remote", "why_no_room", "chosen"),
    [
        (AUTO, [], "", SHARED),
        (AUTO, ["e-1"], "", TENSOR),
        (AUTO, [], "64 MB", TENSOR),
        (TENSOR, [], "", TENSOR),
        (SHARED, [], "64 MB", SHARED),  # named in the settings: the refusal has the figures
        (Transport.DISTRIBUTED, ["e-1"], "64 MB", Transport.DISTRIBUTED),
        (Transport.DISK, ["e-1"], "", Transport.DISK),
    ],
)
def test_the_choice(
    wanted: Transport, remote: list[str], why_no_room: str, chosen: Transport
) -> None:
    assert choose_transport(wanted, remote, why_no_room) is chosen


@pytest.mark.parametrize("wanted", [SHARED, Transport.CUDA_IPC])
def test_memory_of_one_host_does_not_reach_another(wanted: Transport) -> None:
    with pytest.raises(ConfigError, match=rf"{wanted}: engine e-1 runs on another host.*use dist"):
        choose_transport(wanted, ["e-1"], "")


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
    ("wanted", "chosen", "why_cost", "streams", "at_once", "is_warned"),
    [
        (AUTO, SHARED, "it packs", False, True, False),
        (AUTO, SHARED, "it packs", True, True, False),
        (SHARED, SHARED, "it packs", False, True, False),
        (SHARED, SHARED, "it packs", True, False, True),
        (SHARED, SHARED, "", True, False, False),
        (AUTO, SHARED, "", True, False, False),
        (AUTO, TENSOR, "it packs", True, False, False),
    ],
)
def test_costly_loads_are_one_unless_the_settings_ask_for_a_stream_by_path(
    wanted: Transport,
    chosen: Transport,
    why_cost: str,
    streams: bool,
    at_once: bool,
    is_warned: bool,
) -> None:
    assert loads_at_once(wanted, chosen, why_cost, streams=streams) is at_once
    assert bool(stream_note(wanted, why_cost, streams=streams)) is is_warned


@pytest.mark.parametrize(
    ("wanted", "why_no_nccl", "is_on_cuda", "chosen"),
    [
        ("auto", "", True, "nccl"),
        ("auto", "", False, "gloo"),
        ("auto", "it shares GPUs", True, "gloo"),
        ("gloo", "", True, "gloo"),
        ("nccl", "", False, "nccl"),
    ],
)
def test_a_broadcast_is_by_nccl_only_where_each_process_has_a_gpu(
    wanted: str, why_no_nccl: str, is_on_cuda: bool, chosen: str
) -> None:
    assert choose_backend(wanted, why_no_nccl, is_on_cuda=is_on_cuda) == chosen


@pytest.mark.parametrize(
    ("own", "engines", "said"),
    [
        ("0", {"main": "0"}, ""),
        ("1", {"main": "1", "attached": None}, ""),
        ("1", {}, ""),
        (None, {}, ""),
        (None, {"main": "0"}, "not set in the trainer, and the engines of group main have 0: set "),
        ("1", {"main": "0"}, "is 1 in the trainer, .* have 0: set NCCL_CUMEM_ENABLE=0 in the env"),
        (
            "0",
            {"a": "0", "b": "1"},
            "group b have 1: set NCCL_CUMEM_ENABLE=1 .* before its process",
        ),
        (None, {"main": None}, "the value of their owner; SGLang takes 0"),
    ],
)
def test_nccl_has_the_same_memory_on_both_sides(
    own: str | None, engines: dict[str, str | None], said: str
) -> None:
    why = why_cumem_differs(own, engines)
    assert re.search(said, why)
    assert bool(why) is bool(said)


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
