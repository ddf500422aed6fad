"""The lifecycle over fakes with SGLang's calls, and over stubs with vLLM's."""

from __future__ import annotations

import pytest

from tests.support import builders

OVER_BOTH = frozenset(
    {
        "test_drain",
        "test_memory",
        "test_monitor",
        "test_restored_weights",
        "test_server",
        "test_server_group",
        "test_weight_update",
    }
)
OF_SGLANG = frozenset(
    {
        "test_a_step_sends_each_engine_its_calls_in_the_order_that_works",
        "test_requests_in_flight_are_aborted_before_the_memory_goes",
        "test_a_command_that_is_not_legal_reaches_no_engine",
        "test_a_stale_order_is_refused",
        "test_the_engine_itself_waits_a_little_less_than_its_first_half_of_the_phase",
        "test_a_fenced_engine_gets_no_further_call",
        "test_below_the_fewest_engines_the_phase_fails_and_the_group_is_where_the_others_are",
        "test_a_group_that_keeps_its_gpus_goes_along_without_release_and_resume",
        "test_engines_that_start_at_another_version_are_refused",
        "test_new_weights_reach_groups_that_were_only_paused",
        "test_an_engine_whose_connection_broke_comes_back_after_probe_and_weight_check",
        "test_a_flush_that_is_refused_twice_ends_the_engine",
    }
)
"""Tests that list SGLang's own calls, arguments or texts; ``test_vllm_steps`` has vLLM's."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module = metafunc.module.__name__.rpartition(".")[2]
    if module in OVER_BOTH and metafunc.function.__name__ not in OF_SGLANG:
        metafunc.parametrize("protocol", list(builders.LAUNCHERS), indirect=True)


@pytest.fixture(autouse=True)
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines that the test does not launch itself speak this kind's."""
    chosen = getattr(request, "param", "sglang")
    monkeypatch.setattr(builders, "protocol", chosen)
    return str(chosen)
