"""OpenTelemetry export, as a collector receives it: decoded by the official protocol classes."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import ConfigError
from rollout.observability.timeline import otel_provider
from rollout.observability.timeline.otel import OtelSink
from rollout.observability.timeline.span import Kind, Outcome, Span
from rollout.runtime.local import launch_local
from tests.support.otel_program import Collector, bare_program, collecting, keep_spans
from tests.support.paged import step
from tests.support.served_fakes import engines_of, launched

pytest.importorskip("opentelemetry.sdk.trace")
trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
trace = pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with bare_program(monkeypatch):
        yield


def phase(traceparent: str = "") -> Span:
    return Span(
        *(Kind.PHASE, "pause_generation", "policy", 1.0, 1.0, Outcome.OK),
        span_id=1,
        traceparent=traceparent,
    )


def exported(*spans: Span) -> None:
    """Export these as a timeline does, to the end."""
    sink = OtelSink()
    for span in spans:
        sink.put(span)
    sink.close()


def test_a_step_of_a_server_reaches_a_collector_as_a_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with launched(launch_local, tmp_path, server={"timeline": {"otel": True}}) as handle:
            policy = handle["policy"]
            with engines_of(policy) as engines:
                engines["shared-1"].fail_next("flush_cache", "a planned fault")
            step(policy, 1)
    received = collector.spans
    assert collector.services == {"ray-rollout"}
    by_id = {span.span_id: span for span, _ in received}
    names = {span.name for span, _ in received}
    assert {
        "phase pause_generation",
        "group pause_generation",
        "engine pause_generation",
        "call pause_generation",
    } <= names
    for span, known in received:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        if span.parent_span_id:
            parent = by_id[span.parent_span_id]
            assert parent.trace_id == span.trace_id
            assert parent.start_time_unix_nano <= span.start_time_unix_nano
            # Unix seconds as a float are exact to less than a microsecond.
            assert span.end_time_unix_nano - parent.end_time_unix_nano < 1_000
        if span.name.startswith("call "):
            assert by_id[span.parent_span_id].name.startswith("engine ")
            assert known["rollout.engine_id"]
        if span.name.startswith("engine "):
            assert by_id[span.parent_span_id].name.startswith("group ")
    pushed = [known for span, known in received if span.name == "engine update_weights"]
    assert all(known["rollout.num_bytes"] > 0 for known in pushed)
    failed = [span for span, _ in received if span.status.code == trace.Status.STATUS_CODE_ERROR]
    assert any("a planned fault" in span.status.message for span in failed)


def test_a_collector_that_does_not_answer_delays_no_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK alone would try for ten seconds."""
    monkeypatch.setattr("rollout.observability.timeline.otel_provider.CLOSE_S", 0.2)
    monkeypatch.setattr("rollout.observability.timeline.otel.CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        exported(phase())
        (trying,) = [thread for thread in threading.enumerate() if thread.name == "otel-end"]
        trying.join(5)
        assert not trying.is_alive()
    assert "the collector has not taken all spans within 0.2 s" in caplog.text


def in_a_program(code: str, **environ: str) -> tuple[str, float]:
    """What a program of its own prints, and its seconds behind the word ``end``."""
    begin = (
        "import time\n"
        "from rollout.observability.timeline.otel import OtelSink\n"
        "from rollout.observability.timeline.span import Kind, Outcome, Span\n"
        "span = Span(Kind.PHASE, 'verify', 'policy', 1.0, 1.0, Outcome.OK, span_id=1)\n"
    )
    program = subprocess.run(
        [sys.executable, "-c", begin + code + "\nprint('end', time.time(), flush=True)"],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    printed, _, ended = program.stdout.rpartition("end ")
    return printed, time.time() - float(ended.split()[0])


def test_a_collector_that_does_not_answer_delays_no_exit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code = (
            "from rollout.observability.timeline import otel_provider\n"
            "otel_provider.CLOSE_S = 0.2\n"
            "sink = OtelSink()\nsink.put(span)\nsink.close()"
        )
        _, exit_s = in_a_program(code, OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert exit_s < 8, "the SDK tries for ten seconds"


def test_the_console_is_an_exporter_and_so_is_none() -> None:
    code = "sink = OtelSink()\nsink.put(span)\nsink.close()"
    printed, _ = in_a_program(code, OTEL_TRACES_EXPORTER="console")
    assert '"name": "phase verify"' in printed
    assert in_a_program(code, OTEL_TRACES_EXPORTER="none")[0] == ""


def test_the_service_name_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "night-run")
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        exported(Span(Kind.EVENT, "gate", "policy", 1.0, 0.0, Outcome.OK, span_id=1, said="open"))
    ((span, known),) = collector.spans
    assert (span.name, known["rollout.said"], collector.services) == (
        "event gate",
        "open",
        {"night-run"},
    )


def test_attributes_and_batches_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=night")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        exported(*[phase()] * 6)
    assert len(collector.spans) == 6
    assert len(collector.requests) == 3
    (resource,) = {str(one.resource_spans[0].resource) for one in collector.requests}
    assert "deployment.environment" in resource
    assert "ray-rollout" in resource


@pytest.mark.parametrize(
    ("sampler", "argument", "caller", "is_exported"),
    [
        ("always_off", "", "", False),
        ("traceidratio", "0.0", "", False),
        ("parentbased_always_on", "", f"{CALLER[:-2]}00", False),
        ("parentbased_always_off", "", CALLER, True),
    ],
)
def test_the_sampler_of_the_environment_decides(
    sampler: str,
    argument: str,
    caller: str,
    is_exported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        exported(phase(caller))
    assert bool(collector.spans) is is_exported


def test_a_span_with_a_caller_belongs_to_the_trace_of_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as (url, collector):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        exported(phase(CALLER))
    ((span, _),) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(CALLER.split("-")[1:3])


def test_a_disabled_sdk_exports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "no such one")
    exported(phase())


def test_grpc_reaches_a_grpc_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

    collector = Collector()

    class Service(services.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collector.requests.append(request)
            return trace_service.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    services.add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        exported(phase(CALLER))
    finally:
        server.stop(None).wait(10)
    ((span, _),) = collector.spans
    assert span.name == "phase pause_generation"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "pip install opentelemetry-exporter-otlp-proto-grpc, or set "
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
        ),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "pip install opentelemetry-exporter-otlp-proto-grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "udp"}, "'udp' is none of grpc, http/protobuf"),
        ({"OTEL_TRACES_EXPORTER": "carrier-pigeon"}, "'carrier-pigeon' not found"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "cannot be configured: max_queue_size"),
        ({"OTEL_PYTHON_CONFIGURATOR": "mine"}, "no installed package has this configurator"),
    ],
)
def test_what_the_environment_names_and_nothing_has_is_refused(
    environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.sdk import _configuration as sdk

    installed = sdk.entry_points

    def without_grpc(**where: str) -> Any:
        return [] if where.get("name") == "otlp_proto_grpc" else installed(**where)

    monkeypatch.setattr(sdk, "entry_points", without_grpc)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        OtelSink()
    assert said in str(refused.value)


def test_the_provider_of_the_program_is_used_and_goes_on_after_the_close() -> None:
    from opentelemetry import trace as api

    kept = keep_spans()
    with api.get_tracer("trainer").start_as_current_span("step"):
        exported(phase())
        assert [span.name for span in kept.get_finished_spans()] == ["phase pause_generation"]
        assert kept.get_finished_spans()[0].parent is None
    exported(phase(CALLER))
    assert [span.name for span in kept.get_finished_spans()][1:] == [
        "step",
        "phase pause_generation",
    ]


class Configurator:
    """That of a vendor's package."""

    def configure(self) -> None:
        from opentelemetry import trace as api
        from opentelemetry.sdk.trace import TracerProvider

        api.set_tracer_provider(TracerProvider(shutdown_on_exit=False))
        CONFIGURED.append(api.get_tracer_provider())


CONFIGURED: list[Any] = []


def test_the_configurator_of_the_environment_configures_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CONFIGURED.clear()
    entry = EntryPoint("vendor", f"{__name__}:Configurator", "opentelemetry_configurator")
    monkeypatch.setattr(EntryPoint, "load", lambda _: Configurator)
    monkeypatch.setattr(otel_provider, "entry_points", lambda group: [entry])
    monkeypatch.setenv("OTEL_PYTHON_CONFIGURATOR", "vendor")
    assert otel_provider.tracer_provider() is otel_provider.tracer_provider() is CONFIGURED[0]
    assert len(CONFIGURED) == 1
