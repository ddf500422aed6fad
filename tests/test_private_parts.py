"""The private parts of uvicorn, transformers and TRL that we subclass and call are still there.

A new release may move them.  Then these tests name the part, and ``pyproject.toml`` keeps users on
the releases that have it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.support.private_parts import Part, moved

ROOT = Path(__file__).parents[1]
_HTTPTOOLS = "uvicorn.protocols.http.httptools_impl"
_BATCHING = "transformers.generation.continuous_batching"

UVICORN = [
    Part(
        f"{_HTTPTOOLS}.HttpToolsProtocol",
        "rollout/router/proxy/client_connection.py",
        overrides={
            "__init__": "config server_state app_state _loop",
            "connection_made": "transport",
            "connection_lost": "exc",
            "data_received": "data",
            "eof_received": "",
            "on_message_begin": "",
            "on_url": "url",
            "on_header": "name value",
            "on_headers_complete": "",
            "on_body": "body",
            "on_message_complete": "",
            "on_response_complete": "",
            "pause_writing": "",
            "resume_writing": "",
            "shutdown": "",
        },
        calls={"_start_asgi_task": "cycle app"},
        attributes="parser flow loop transport app url headers scope expect_100_continue root_path "
        "logger access_logger server_state cycle timeout_keep_alive",
    ),
    Part(
        f"{_HTTPTOOLS}.RequestResponseCycle",
        "rollout/router/proxy/client_connection.py",
        calls={
            "__init__": "scope transport flow logger access_logger access_log default_headers "
            "message_event expect_100_continue keep_alive on_response"
        },
        attributes="keep_alive response_complete body message_event more_body disconnected "
        "waiting_for_100_continue",
    ),
    Part(
        "uvicorn.protocols.http.flow_control.FlowControl",
        "rollout/router/proxy/client_connection.py",
        calls=dict.fromkeys(
            ("pause_reading", "resume_reading", "pause_writing", "resume_writing"), ""
        ),
    ),
    Part(
        "uvicorn.server.ServerState",
        "rollout/router/proxy/client_connection.py",
        attributes="total_requests default_headers",
    ),
    Part(
        "uvicorn.server.Server",
        "engines/http/uvicorn_server.py",
        overrides={"startup": "sockets", "main_loop": "", "capture_signals": ""},
        calls={"__init__": "config", "serve": "sockets", "on_tick": "counter"},
        attributes="config",
    ),
    Part(
        "uvicorn.config.Config",
        "engines/http/uvicorn_server.py",
        attributes="timeout_graceful_shutdown",
    ),
]

TRANSFORMERS = [
    Part(
        f"{_BATCHING}.continuous_api.ContinuousBatchingManager",
        "engines/embedded/generation/batcher.py",
        overrides={
            "switch_to_cb_friendly_attn": "model auto_switch_to_flash",
            "_generation_loop_body": "batch_processor bootstrapping",
            "_run_generation_loop": "",
            "_create_batch_processor": "",
        },
        calls={
            "__init__": "model generation_config continuous_batching_config",
            "is_running": "",
            "start": "",
            "stop": "block timeout",
        },
        attributes="batch_processor output_router _wake_up_loop background_thread_status model "
        "generation_config continuous_batching_config distributed_helper logit_processor "
        "input_queue cancel_queue",
    ),
    Part(
        f"{_BATCHING}.continuous_api.ContinuousBatchProcessor",
        "engines/embedded/generation/batcher.py",
        calls={
            "__init__": "cache config generation_config continuous_batching_config logit_processor "
            "input_queue cancel_queue output_router background_thread_status model_device "
            "model_dtype scheduler distributed_helper",
            "prepare_next_batch": "",
            "update_batch": "",
            "has_pending_requests": "",
            "_generation_step": "model",
        },
        attributes="cache scheduler inputs_and_outputs model_runner",
    ),
    Part(
        f"{_BATCHING}.continuous_api.BackgroundThreadStatus",
        "engines/embedded/generation/batcher.py",
        attributes="local_status fatal_error HARD_STOP",
    ),
    Part(
        f"{_BATCHING}.continuous_api.OutputRouter",
        "engines/embedded/generation/batcher.py",
        overrides={"deliver_batch": "outputs", "fail_and_deliver": "state error"},
    ),
    Part(
        f"{_BATCHING}.scheduler.FIFOScheduler",
        "engines/embedded/generation/batcher.py",
        calls={
            "__init__": "cache safety_margin max_requests_per_batch",
            "reset": "",
            "add_waiting_request": "state",
            "set_request_cancellation": "request_id",
            "clear_cancelled_requests": "",
        },
        attributes="active_requests waiting_requests block_new_requests",
    ),
    Part(
        f"{_BATCHING}.model_runner.ModelRunner",
        "engines/embedded/generation/sampler.py",
        overrides={
            "maybe_pad_inputs": "num_q_tokens max_kv_read use_decode_fast_path",
            "_sample": "scores output_ids",
        },
        calls={
            "__init__": "logit_processor cb_config inputs_and_outputs cache do_sample "
            "return_logprobs"
        },
        attributes="cache inputs_and_outputs",
    ),
    Part(
        f"{_BATCHING}.cache.PagedAttentionCache",
        "engines/embedded/generation/kv_cache.py",
        overrides={
            "search_prefix_match": "request_id prompt_ids",
            "mark_complete_blocks": "state complete_blocks",
        },
        calls={
            "__init__": "config continuous_batching_config device distributed_helper dtype "
            "model_supports_logits_to_keep",
            "free_all_requests": "",
            "reset": "",
            "update": "key_states value_states layer_idx kwargs",
        },
        attributes="cache_tensor device pool num_sectors cache_allocators bytes_per_sector config "
        "layer_to_allocator",
    ),
    Part(
        f"{_BATCHING}.cache_allocators.CachePool",
        "engines/embedded/generation/kv_cache.py",
        calls={"__init__": "num_sectors num_allocators"},
    ),
    Part(
        f"{_BATCHING}.cache_allocators.FullAttentionCacheAllocator",
        "engines/embedded/generation/kv_cache.py",
        calls={
            "register_cache_tensor": "bytes_per_sector non_trash_bytes cache_tensor pool",
            "get_cache_for_block_table": "layer_idx",
        },
        attributes="block_table block_physical_stride tokens_per_page _copy_view",
    ),
    Part(
        f"{_BATCHING}.requests.RequestState",
        "engines/embedded/generation/batcher.py",
        overrides={
            "update_and_check_completion": "token_id logprob",
            "create_equivalent_initial_request": "",
            "to_generation_output": "",
        },
        calls={"__init__": "request_id initial_tokens max_new_tokens"},
        attributes="generated_tokens tokens_to_process status position_offset",
    ),
    Part(
        f"{_BATCHING}.requests.FutureRequestState",
        "engines/embedded/generation/kv_cache.py",
        attributes="state has_new_token query_length",
    ),
    Part(
        f"{_BATCHING}.requests.RequestStatus",
        "engines/embedded/generation/batcher.py",
        attributes="FINISHED",
    ),
    Part(
        "transformers.generation.configuration_utils.ContinuousBatchingConfig",
        "engines/embedded/generation/batcher.py",
        calls={
            "__init__": "page_size num_blocks max_batch_tokens max_requests_per_batch "
            "max_blocks_per_request max_memory_percent allow_block_sharing use_async_batching "
            "use_cuda_graph return_logprobs seed"
        },
        attributes="safety_margin",
    ),
]

TRL = [
    Part(
        "trl.trainer.grpo_trainer.GRPOTrainer",
        "rollout/adapters/trl/rollout_function.py",
        calls={"_tokenize_prompts": "prompts"},
        attributes="tools environment_factories eos_token_ids use_vllm vllm_generation "
        "vllm_importance_sampling_correction _last_loaded_step",
    ),
    Part(
        "trl.experimental.async_grpo.async_rollout_worker.RolloutSample",
        "rollout/adapters/trl/rollout_worker.py",
        calls={
            "__init__": "prompt completion input_ids completion_mask old_log_probs advantage "
            "model_version group_id metrics"
        },
    ),
    Part(
        "trl.experimental.async_grpo.async_grpo_trainer.RolloutWorkerProtocol",
        "rollout/adapters/trl/rollout_worker.py",
        overrides={
            "start": "",
            "stop": "",
            "update_model_version": "model_version",
            "check_health": "stale_after_s",
        },
    ),
    Part(
        "trl.experimental.async_grpo.async_grpo_trainer.WeightTransferProtocol",
        "rollout/adapters/trl/weight_transfer.py",
        overrides={
            "init_weight_transfer": "",
            "pause": "",
            "send_weights": "iterator",
            "resume": "",
            "destroy": "",
        },
    ),
]


def test_each_part_is_used_in_a_file_that_exists() -> None:
    files = {part.used_in for part in (*UVICORN, *TRANSFORMERS, *TRL)}
    assert sorted(name for name in files if not (ROOT / name).is_file()) == []


def test_uvicorn_has_what_the_router_uses() -> None:
    assert moved(UVICORN) == []


@pytest.mark.embedded
def test_transformers_has_what_the_embedded_engine_uses() -> None:
    assert moved(TRANSFORMERS) == []


@pytest.mark.slow  # imports TRL
def test_trl_has_what_the_adapter_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    assert moved(TRL) == []


def test_a_part_that_is_gone_is_named_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    monkeypatch.delattr(HttpToolsProtocol, "_start_asgi_task")
    (line,) = moved(UVICORN)
    assert line.startswith("uvicorn 0.")
    assert f": {_HTTPTOOLS}.HttpToolsProtocol._start_asgi_task is gone; used in rollout/" in line


def test_a_method_with_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    from uvicorn.server import Server

    def connection_lost(self: object, error: Exception | None, reason: str) -> None: ...
    def on_tick(self: object, counter: int, now: float) -> None: ...

    monkeypatch.setattr(HttpToolsProtocol, "connection_lost", connection_lost)
    monkeypatch.setattr(Server, "on_tick", on_tick)
    first, second = moved(UVICORN)
    assert "HttpToolsProtocol.connection_lost takes error, reason, not exc" in first
    assert "Server.on_tick cannot be called with counter: missing a required argument" in second


def test_a_class_a_module_and_an_attribute_that_are_gone_are_named() -> None:
    parts = [
        Part("uvicorn.server.NoServer", "here"),
        Part("uvicorn.no_module.Server", "here"),
        Part("uvicorn.server.ServerState", "here", attributes="total_requests no_attribute"),
    ]
    assert [line.partition(": ")[2] for line in moved(parts)] == [
        "uvicorn.server.NoServer is gone; used in here",
        "uvicorn.no_module.Server is gone; used in here",
        "uvicorn.server.ServerState.no_attribute is gone; used in here",
    ]


@pytest.mark.parametrize("library", ["uvicorn", "transformers", "trl"])
def test_a_library_whose_private_parts_we_use_is_bounded_below_its_next_minor(library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    ranges = [*project["dependencies"], *optional["embedded"], *optional["trl"]]
    (wanted,) = [one for one in ranges if one.startswith(f"{library}>=")]
    (pinned,) = [
        line.removeprefix(f"{library}==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith(f"{library}==")
    ]
    major, minor = pinned.split(".")[:2]
    assert wanted.endswith(f",<{major}.{int(minor) + 1}")
