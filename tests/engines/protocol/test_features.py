"""Answers of engines into what they can do."""

from __future__ import annotations

from typing import Any

import pytest

from engines.http.sglang_json import read_server_info
from engines.kinds import KINDS
from engines.protocol import WorkerType
from engines.protocol.features import Features, read_features
from engines.sglang.features import NEEDED

WITH_SESSION = NEEDED | {"/begin_weight_update"}


def features(paths: frozenset[str] = WITH_SESSION, **info: Any) -> Features:
    read = read_server_info({"version": "0.5.23", **info})
    return read_features(read, paths, KINDS.get(read.engine))


def test_todays_sglang_is_driven_with_all_it_has() -> None:
    found = features(enable_memory_saver=True, enable_weights_cpu_backup=True, tp_size=4, dp_size=1)
    assert not found.undrivable
    assert found.has_weight_session
    assert found.is_retract_safe
    assert found.has_memory_saver
    assert found.has_weights_cpu_backup
    assert (found.num_payloads, found.takes_tensors) == (4, True)
    assert found.streams_are_cumulative


def test_0_5_20_has_no_session_and_is_not_safe_to_retract() -> None:
    found = features(NEEDED, version="0.5.20.post1")
    assert not found.undrivable
    assert not found.has_weight_session
    assert not found.is_retract_safe


@pytest.mark.parametrize("version", ["0.4.9", "0.5.19", "0.6.0", "1.0.0", "0.0.0.dev0", "main"])
def test_a_version_that_cannot_be_driven_says_which_can(version: str) -> None:
    why = features(version=version).undrivable
    assert version in why
    assert "SGLang 0.5.20 and later, below 0.6" in why


def test_a_front_end_without_the_control_endpoints_says_which_it_lacks() -> None:
    why = features(WITH_SESSION - {"/release_memory_occupation", "/ready"}).undrivable
    assert "lacks /ready, /release_memory_occupation" in why


def test_the_memory_saver_is_not_on_under_ray() -> None:
    assert not features(enable_memory_saver=True, use_ray=True).has_memory_saver


def test_pipeline_stages_take_no_broadcast() -> None:
    assert "it has 2 pipeline stages" in features(pp_size=2).why_no_groups
    assert features(pp_size=1).why_no_groups == features().why_no_groups == ""
    assert features().why_no_handles == ""


def test_replicas_refuse_tensors() -> None:
    assert not features(dp_size=2).takes_tensors


@pytest.mark.parametrize(
    ("info", "worker_type"),
    [
        ({"disaggregation_mode": "null"}, WorkerType.REGULAR),
        ({"disaggregation_mode": "decode"}, WorkerType.DECODE),
        ({"encoder_only": True}, WorkerType.ENCODER),
    ],
)
def test_the_worker_type_is_discovered(info: dict[str, Any], worker_type: WorkerType) -> None:
    assert features(**info).worker_type is worker_type


def test_the_embedded_engine_is_of_this_package_and_needs_no_version() -> None:
    found = features(frozenset({"/begin_weight_update"}), version="0.1.0", engine="embedded")
    assert not found.undrivable
    assert found.has_weight_session
    assert found.is_retract_safe


def test_an_engine_of_no_known_kind_cannot_be_driven() -> None:
    assert "engine 'toy' is of no known kind" in features(engine="toy").undrivable


def sglang_info(num_states: int = 1, **more: Any) -> dict[str, Any]:
    """``/server_info`` of SGLang 0.5.23, as far as memory goes."""
    usage = {"weight": 2.0, "kvcache": 10.5, "graph": {"decode": 0.5}, "token_capacity": 9}
    states = [{"memory_usage": usage, "world_size": 8}] * num_states
    return {
        "version": "0.5.23",
        "device": "cuda",
        "tp_size": 8,
        "pp_size": 1,
        "internal_states": states,
        **more,
    }


@pytest.mark.parametrize("num_states", [1, 8])  # 8: attention data parallelism
def test_sglangs_memory_is_that_of_all_its_ranks(num_states: int) -> None:
    memory = read_server_info(sglang_info(num_states)).resident_bytes
    assert memory == {"weights": 16 * 2**30, "kv_cache": 84 * 2**30}


def test_an_older_sglang_without_a_world_size_counts_its_own_ranks() -> None:
    usage = {"weight": 1.0, "kvcache": 1.0}
    info = sglang_info(internal_states=[{"memory_usage": usage}], tp_size=2)
    assert read_server_info(info).resident_bytes["weights"] == 2 * 2**30


def test_on_a_cpu_sglang_reports_the_memory_of_the_host_which_does_not_count() -> None:
    assert read_server_info(sglang_info(device="cpu")).resident_bytes == {}


@pytest.mark.parametrize(
    ("change", "is_another"),
    [
        ({}, False),
        ({"random_seed": 8}, True),
        ({"startup_time": {"total": 4.25}}, True),
        ({"random_seed": 8, "startup_time": {"total": 4.25}}, True),
        ({"weight_version": "9", "internal_states": [{"load": 3}]}, False),
    ],
)
def test_a_start_of_sglang_is_known_by_what_it_drew_and_how_long_it_took(
    change: dict[str, Any], is_another: bool
) -> None:
    info = {"version": "0.5.23", "random_seed": 7, "startup_time": {"total": 4.5}}
    before, after = read_server_info(info).start, read_server_info(info | change).start
    assert before
    assert after
    assert (before != after) is is_another


def test_each_of_several_front_ends_of_sglang_reports_the_same_start() -> None:
    info = {"version": "0.5.23", "random_seed": 7, "tokenizer_worker_num": 2}
    first, second = ({**info, "startup_time": {"total": took}} for took in (4.5, 4.25))
    assert read_server_info(first).start == read_server_info(second).start
    assert read_server_info({"version": "0.5.23"}).start == ""
