"""The private parts of uvicorn, TRL and OpenTelemetry that we subclass and call are still there.

A new release may move them.  Then these tests name the part.  ``pyproject.toml`` keeps users on the
releases of TRL that have it; the router refuses a uvicorn without one, for the engines share it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rollout.core.errors import ConfigError
from tests.support.private_parts import Part, moved

ROOT = Path(__file__).parents[1]
_HTTPTOOLS = "uvicorn.protocols.http.httptools_impl"

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

OPENTELEMETRY = [
    Part(
        "opentelemetry.sdk._configuration._OTelSDKConfigurator",
        "rollout/observability/timeline/otel_provider.py",
        package="opentelemetry-sdk",
        calls={"configure": ""},
    ),
    Part(
        "opentelemetry.sdk._configuration",  # which gets the arguments of ``configure``
        "rollout/observability/timeline/otel_provider.py",
        package="opentelemetry-sdk",
        calls={"_initialize_components": "trace_exporter_names resource_attributes"},
    ),
]


def test_each_part_is_used_in_a_file_that_exists() -> None:
    files = {part.used_in for part in (*UVICORN, *TRL, *OPENTELEMETRY)}
    assert sorted(name for name in files if not (ROOT / name).is_file()) == []


def test_uvicorn_has_what_the_router_uses() -> None:
    assert moved(UVICORN) == []


def test_opentelemetry_has_what_the_export_uses() -> None:
    pytest.importorskip("opentelemetry.sdk")
    assert moved(OPENTELEMETRY) == []


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


def ranges_of(library: str) -> tuple[str, str]:
    """The range in ``pyproject.toml``, and the version in ``constraints.txt``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [*project["dependencies"], *project["optional-dependencies"]["trl"]]
    (wanted,) = [text for text in ranges if text.startswith(f"{library}>=")]
    (pinned,) = [
        line.removeprefix(f"{library}==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith(f"{library}==")
    ]
    return wanted, pinned


def next_minor(version: str) -> str:
    major, minor = version.split(".")[:2]
    return f"{major}.{int(minor) + 1}"


def test_trl_whose_private_parts_we_use_is_bounded_below_its_next_minor() -> None:
    wanted, pinned = ranges_of("trl")
    assert wanted.endswith(f",<{next_minor(pinned)}")


def test_the_router_refuses_a_uvicorn_that_has_moved_a_part() -> None:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from rollout.router.proxy import client_connection

    _, pinned = ranges_of("uvicorn")
    tried = f"pip install 'uvicorn<{next_minor(pinned)}'$"
    overridden = {*UVICORN[0].overrides, *UVICORN[0].calls} - {"__init__"}
    for name in sorted(overridden):
        moved_on = type("HttpToolsProtocol", (), dict.fromkeys(overridden - {name}))
        with pytest.raises(ConfigError, match=f"has no HttpToolsProtocol.{name}, .*{tried}"):
            client_connection.check_uvicorn(moved_on)
    client_connection.check_uvicorn(HttpToolsProtocol)
