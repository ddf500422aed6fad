"""Each behaviour of the fakes, and the tests that show the same of real engines.

A behaviour is a route of the fake, a place of its code that refuses a call or ends the engine, or a
row of its README.  ``test_facts.py`` reads them from the fake: one that is missing here fails, and
so does one that is gone.  A test of the contract is its name; another one is its whole id.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from engines.fake.http_fake import FakeHttpApp

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "engines/fake/engine"
# What a test plans is no behaviour of an engine.
_PLANNED = {"calls", "faults"}
_ENDS = {"_rejected", "_assert"}

LORA = (
    "tests/end_to_end/sglang/test_lora.py::test_the_lora_loop",
    "tests/engines/embedded/weights/test_lora_adapters.py"
    "::test_an_adapter_is_replaced_by_unloading_it_first",
)
NO_SUCH_ADAPTER = (
    "tests/end_to_end/sglang/test_lora.py::test_without_a_backup_it_is_refused_at_the_start",
    "tests/engines/embedded/weights/test_lora_adapters.py"
    "::test_what_does_not_fit_is_refused_and_not_loaded",
)
DEATHS = "test_what_kills_sglang"
GROUPS = "test_a_name_that_is_taken_is_refused_and_free_again_afterwards"

ROUTES: dict[str, tuple[str, ...]] = {
    "/model_info": ("test_an_engine_says_what_it_is",),
    "/server_info": ("test_an_engine_says_what_it_is",),
    "/v1/loads": ("test_loads_count_what_runs",),
    "/openapi.json": ("test_an_engine_says_what_it_is",),
    "/weights_manifest": ("test_only_the_embedded_engine_lists_its_tensors",),
    "/ready": ("test_a_pause_makes_it_unready_and_not_unhealthy",),
    "/health": ("test_a_stranger_neither_samples_nor_changes_anything",),
    "/health_generate": ("test_a_pause_makes_it_unready_and_not_unhealthy",),
    "/pause_generation": ("test_a_pause_ends_what_runs_and_holds_what_comes",),
    "/continue_generation": ("test_a_pause_that_is_repeated_changes_nothing",),
    "/flush_cache": ("test_flush_waits_for_requests_only_within_its_timeout",),
    "/abort_request": ("test_an_abort_of_no_live_id_ends_nothing",),
    "/release_memory_occupation": ("test_the_order_that_works",),
    "/resume_memory_occupation": ("test_tags_come_and_go_one_by_one",),
    "/begin_weight_update": ("test_tensors_are_taken_only_in_a_session",),
    "/end_weight_update": ("test_tensors_are_taken_only_in_a_session",),
    "/update_weights_from_tensor": ("test_pushed_weights_answer_under_their_version",),
    "/update_weights_from_distributed": (
        "test_one_tensor_brings_many_through_a_group_that_outlives_the_push",
    ),
    "/update_weights_from_disk": ("test_weights_come_from_disk_without_a_session",),
    "/update_weight_version": ("test_a_version_set_by_itself_aborts_only_on_request",),
    "/init_weights_update_group": (GROUPS,),
    "/destroy_weights_update_group": ("test_a_group_that_nobody_knows_is_refused",),
    "/load_lora_adapter": (
        "tests/end_to_end/sglang/test_lora.py::test_an_adapter_comes_from_disk_too",
        "tests/engines/embedded/weights/test_lora_adapters.py"
        "::test_an_adapter_on_disk_is_loaded_by_its_path",
    ),
    "/load_lora_adapter_from_tensors": LORA,
    "/unload_lora_adapter": LORA,
    "/weights_checker": ("test_the_checker_sees_what_changed",),
    "/generate": (
        "test_a_completion_has_all_that_a_trainer_needs",
        "test_a_stream_is_cumulative_and_ends_like_the_whole_answer",
        "test_a_sampling_parameter_has_its_effect_or_is_refused",
        "test_several_completions_of_a_prompt_are_a_list",
        "test_an_unknown_field_of_the_body_is_passed_over",
        "test_a_request_of_more_than_ten_seconds_is_whole",
    ),
}

REFUSALS: dict[str, tuple[str, ...]] = {
    "engine_state.release_memory_occupation: release while ": (DEATHS,),
    "engine_state.release_memory_occupation: release of a tag twice": (DEATHS,),
    "engine_state.resume_memory_occupation: resume of a tag that is not released": (DEATHS,),
    "engine_state.begin_weight_update: a weight update is already open": (
        "test_tensors_are_taken_only_in_a_session",
    ),
    "engine_state.end_weight_update: no weight update is open": (
        "test_tensors_are_taken_only_in_a_session",
    ),
    "engine_state.update_weights_from_tensor: too few payloads": (DEATHS,),
    "engine_state.init_weights_update_group: group ": (GROUPS,),
    "engine_state.update_weights_from_distributed: why": (
        "test_a_bucket_that_cannot_be_is_refused_before_it_is_waited_for",
    ),
    "engine_state.weights_checker: unknown action ": (
        "test_the_checker_refuses_what_it_cannot_do",
    ),
    "engine_state._compare: no snapshot to compare with": (
        "test_the_checker_refuses_what_it_cannot_do",
    ),
    "engine_state._compare: differing_text(different)": ("test_the_checker_sees_what_changed",),
    "engine_state.unload_lora_adapter: no adapter ": NO_SUCH_ADAPTER,
    "engine_state._require_session: weights are updated only after begin_weight_update": (
        "test_tensors_are_taken_only_in_a_session",
    ),
    "engine_state._require_group: no weight update group ": (
        "test_a_group_that_nobody_knows_is_refused",
    ),
    "engine_state._require_weights:  while weights are released": (DEATHS,),
    "engine_state._load_adapter: adapter ": LORA,
    "engine_state._write: weights changed, but the cache was not flushed": (
        "test_an_update_that_cannot_flush_says_no_after_it_was_done",
    ),
    "fake_engine.flush_cache: Flush cache failed: ": (
        "test_flush_waits_for_requests_only_within_its_timeout",
    ),
    "fake_engine.generate: no adapter ": NO_SUCH_ADAPTER,
    "fake_engine._admit: request id ": ("test_an_id_in_use_is_refused",),
    "fake_engine._admit: The input (": (
        "test_a_router_in_front_refuses_a_prompt_that_is_too_long",
    ),
    "fake_engine._admit: why": ("test_a_value_out_of_its_bounds_is_refused",),
    "fake_engine._admit: generate while memory is released": (DEATHS,),
    "fake_engine._admit: a token id outside the vocabulary": (DEATHS,),
    "fake_weights.unpack_tensors: unreadable payload: ": (DEATHS,),
    "fake_weights.write: tensor ": (DEATHS,),
    "fake_weights.tensors_in_file: str(error)": (DEATHS,),
}

README: dict[str, tuple[str, ...]] = {
    "release while a request runs and is not retracted": (DEATHS,),
    "generate with released weights or KV cache": (DEATHS,),
    "a tensor of another shape, a missing or unreadable payload": (DEATHS,),
    "a payload without tensors": (DEATHS,),
    "pause `abort` after pause `in_place` with requests in flight": (DEATHS,),
    "generate during a pause": ("test_a_pause_of_any_mode_holds_what_comes",),
    "generate, and disconnect before the reply": ("test_a_client_that_leaves_aborts_its_request",),
    "a stream of a prompt longer than `context_length`": (
        "test_an_error_in_a_stream_is_an_event_in_a_200",
    ),
    "flush with requests in flight": ("test_flush_waits_for_requests_only_within_its_timeout",),
    "update with `flush_cache` under `in_place`": (
        "test_an_update_that_cannot_flush_says_no_after_it_was_done",
    ),
    "a broadcast as `flattened_bucket` that is empty": (
        "test_a_bucket_that_cannot_be_is_refused_before_it_is_waited_for",
    ),
    "`init_weights_update_group` with a name in use": (
        GROUPS,
        "test_a_group_that_nobody_knows_is_refused",
    ),
    "release without a memory saver": (
        "tests/engines/sglang/test_real.py"
        "::test_without_a_memory_saver_release_says_yes_and_frees_nothing",
    ),
    "resume of weights without a CPU backup": ("test_weights_without_a_backup_are_lost",),
    "`logprob_start_len` with `return_logprob`": (
        "test_the_logprobs_of_a_prompt_differ_between_two_sets_of_weights",
    ),
    "`/health` during a pause": ("test_a_pause_makes_it_unready_and_not_unhealthy",),
    "`/v1/loads` during a pause": ("test_loads_are_of_before_while_it_is_frozen",),
    "abort of `p-1`": ("test_an_abort_by_id_ends_every_id_that_begins_with_it",),
    "abort of an id that is not in flight": (
        "test_an_abort_of_no_live_id_ends_nothing",
        "test_an_abort_of_an_id_that_has_ended_ends_nothing",
    ),
    "the id of a stream": (
        "test_the_id_of_a_stream_is_aborted_some_time_after_its_end",
        "test_a_stream_that_is_refused_for_its_id_aborts_the_one_that_has_it",
    ),
    "an id that is in flight": ("test_an_id_in_use_is_refused",),
    "abort of a request that came in a pause": (
        "test_an_abort_of_a_request_that_came_in_a_pause_ends_nothing",
    ),
    "abort of a request in a pause `in_place`": (
        "test_a_request_frozen_in_place_ends_aborted_when_the_pause_does",
        "test_a_retracted_request_that_is_aborted_ends_at_once",
    ),
    "sampling parameters": (
        "test_a_sampling_parameter_has_its_effect_or_is_refused",
        "test_a_value_out_of_its_bounds_is_refused",
        "test_what_ignores_the_end_token_ignores_the_tokens_that_are_to_stop_it",
    ),
    "an unknown sampling parameter": ("test_an_unknown_sampling_parameter_is_refused",),
    "an unknown field of the body": ("test_an_unknown_field_of_the_body_is_passed_over",),
    "SIGTERM while frozen": ("test_sigterm_does_not_end_what_is_paused_with_requests",),
}
"""By the first words of a row."""


def routes() -> set[str]:
    """The fake's, without those of a test."""
    app = FakeHttpApp()
    return {*app._queries(), *app._commands()}


def refusals() -> Iterator[str]:
    """The places where the fake refuses a call or ends: ``module.function: text``."""
    for file in sorted(FAKE.glob("*.py")):
        if file.stem in _PLANNED:
            continue
        tree = ast.parse(file.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in _ends_in(function):
                    yield f"{file.stem}.{function.name}: {_text_of(call.args[-1])}"


def _ends_in(function: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in _ENDS or name == "FatalCall":
                yield node


def _text_of(argument: ast.expr) -> str:
    """Its first words; of what is made elsewhere, the expression."""
    if isinstance(argument, ast.JoinedStr):
        words = [one.value for one in argument.values if isinstance(one, ast.Constant)]
        return str(words[0])
    return str(argument.value) if isinstance(argument, ast.Constant) else ast.unparse(argument)


def rows_of_readme() -> list[str]:
    """The calls of the table of behaviours in the README of the fake."""
    text = (FAKE.parent / "README.md").read_text()
    table = text.partition("## Behaviour")[2].partition("## Faults")[0]
    return re.findall(r"^\| (?!call|-)(.+?) \| ", table, re.M)
