"""What the kinds of engine do each in a way of its own: facts, each with a source and with the test
of what the library makes of it.

A source is a file of the real engine and a text in it: ``sglang/...: text``.  The text is looked up
in the engine that is installed (``test_differences.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.contract import Bench

CONTRACT = "tests/engines/contract/test_contract.py"
REQUESTS = "tests/engines/contract/test_contract_requests.py"
LONG_STREAMS = "tests/end_to_end/sglang/test_long_streams.py"


@dataclass(frozen=True)
class Difference:
    """What SGLang does and another kind does not.

    Attributes:
        instead: what a kind does in its place.
        source: where SGLang does it.
        library: the test that runs the library over each real kind that has the difference.
        others: where another real kind does its own.
    """

    instead: Mapping[str, str]
    source: str
    library: str
    others: tuple[str, ...] = ()


DIFFERENCES: dict[str, Difference] = {
    "an abort by id ends every id that begins with it": Difference(
        {"embedded": "ends exactly that id", "vllm": "ends exactly that id"},
        "sglang/srt/managers/scheduler.py: .rid.startswith(recv_req.rid)",
        f"{CONTRACT}::test_a_router_in_front_ends_what_an_abort_names_and_no_neighbour",
        ("vllm/v1/engine/output_processor.py: self.external_req_ids.pop(request_id, [])",),
    ),
    "a request frozen in place ends aborted when the pause does": Difference(
        {"embedded": "ends at once", "vllm": "ends at once"},
        "sglang/srt/managers/scheduler.py: self._engine_paused = True",
        f"{CONTRACT}::test_a_router_in_front_answers_what_is_aborted_within_half_a_second",
    ),
    "an abort of a request that came in a pause ends nothing": Difference(
        {"embedded": "ends it", "vllm": "ends it"},
        "sglang/srt/managers/tokenizer_manager.py: await self.is_pause_cond.wait_for(",
        f"{REQUESTS}::test_a_router_in_front_ends_what_came_in_a_pause_of_its_engine",
    ),
    "the id of a stream is aborted some time after its end": Difference(
        {"embedded": "forgets the id with the stream", "vllm": "forgets the id with the stream"},
        "sglang/srt/managers/tokenizer_manager.py: background_tasks.add_task(abort_request)",
        f"{REQUESTS}::test_a_router_in_front_serves_an_id_again_at_once",
    ),
    "a stream that is refused for its id aborts the one that has it": Difference(
        {"embedded": "refuses it, and the other goes on", "vllm": "streams both"},
        "sglang/srt/managers/tokenizer_manager.py: rids = [obj.rid] if obj.is_single",
        f"{REQUESTS}::test_a_router_in_front_keeps_a_request_whose_id_comes_twice",
        ("vllm/v1/engine/input_processor.py: in order to ensure uniqueness",),
    ),
    "unknown names and tags are passed over in silence": Difference(
        {"embedded": "refused with 400, since a typo would otherwise look like success"},
        "sglang/srt/models/llama.py: not found in params_dict",
        "tests/end_to_end/sglang/test_push_path.py"
        "::test_a_right_path_is_proved_and_a_wrong_name_map_never_serves",
    ),
    "an update that cannot flush says no after it was done": Difference(
        {"embedded": "refused with 409 before anything has changed"},
        "sglang/srt/managers/scheduler_components/weight_updater.py: def flush_cache_after",
        "tests/end_to_end/real/test_old_state.py"
        "::test_equal_requests_before_and_after_a_push_are_each_of_their_own_weights",
    ),
    "an update without a pause waits for what runs": Difference(
        {"vllm": "our client pauses it, and what runs goes on with the new weights"},
        "sglang/srt/managers/tokenizer_control_mixin.py: self.model_update_lock.writer_lock",
        "tests/end_to_end/real/test_old_state.py"
        "::test_equal_requests_before_and_after_a_push_are_each_of_their_own_weights",
    ),
    "aborts after a retract cut off what was not streamed": Difference(
        {
            "embedded": "keeps every token",
            "fake": "keeps every token",
            "vllm": "keeps every token",
        },
        "sglang/srt/managers/scheduler_components/output_streamer.py: FORCE_STREAM_INTERVAL",
        f"{REQUESTS}::test_a_router_in_front_keeps_every_token_of_what_is_retracted_and_aborted",
    ),
    "an update from disk renames the model": Difference(
        {"vllm": "goes on under the name it was started with"},
        "sglang/srt/managers/tokenizer_manager.py: self.model_path = model_path",
        "tests/engines/test_attached.py::test_weights_that_another_program_loads_fence_the_engine",
    ),
    "loads are of before while it is frozen": Difference(
        {"embedded": "counts what is there now", "vllm": "counts what is there now"},
        "sglang/srt/managers/load_snapshot.py: Each scheduler periodically publishes",
        "tests/end_to_end/real/test_under_load.py::test_offload_under_load",
    ),
    "a prompt that is too long is refused inside the stream": Difference(
        {"embedded": "refused with 400 before a stream begins"},
        'sglang/srt/entrypoints/http_server.py: "type": "invalid_request_error"',
        f"{REQUESTS}::test_a_router_in_front_refuses_a_prompt_that_is_too_long",
    ),
    "what ignores the end token ignores the tokens that are to stop it": Difference(
        {
            "embedded": "ends at a token of stop_token_ids",
            "vllm": "ends at a token of stop_token_ids",
        },
        "sglang/srt/managers/schedule_batch.py: if self.sampling_params.ignore_eos:",
        f"{REQUESTS}::test_a_router_in_front_gives_each_parameter_what_the_engine_gives_it",
    ),
    "an unknown sampling parameter is refused": Difference(
        {"vllm": "passes over it in silence"},
        "sglang/srt/entrypoints/api_contract.py: GenerateRequest.from_json_value(body)",
        f"{REQUESTS}::test_a_router_in_front_refuses_an_unknown_sampling_parameter",
    ),
}
"""What SGLang does -> what the others do, where that stands, and what the library does with it."""


def differs(bench: Bench, what: str) -> bool:
    """Whether this kind does it otherwise; ``what`` must be in the table."""
    return bench.kind in DIFFERENCES[what].instead
