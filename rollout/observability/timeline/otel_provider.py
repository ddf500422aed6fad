"""The tracer provider of this process: the program's own, or one as the ``OTEL_*`` variables say.

Always true: a provider that the program has set is used as it is; without one the SDK is configured
once, by the configurator that ``opentelemetry-instrument`` would use; a collector that does not
answer delays the end of the process by a few seconds at most.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import wait
from importlib.metadata import entry_points
from typing import Any

from engines.process.background import in_own_thread
from rollout.core.errors import ConfigError
from rollout.core.optional_deps import optional_import

SCOPE = "ray-rollout"
CLOSE_S = 3.0

# The variables' values -> names of the SDK's entry points.
_EXPORTERS = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
_DEFAULT_PROTOCOL = "http/protobuf"
_LOCK = threading.Lock()


def tracer_provider() -> Any:
    """The provider of this process, which is configured if the program has set none.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the ``OTEL_*`` variables name an exporter
            that is not, or have wrong values.
    """
    with optional_import("otel", "OpenTelemetry is not installed"):
        import opentelemetry.sdk.trace  # noqa: F401  the API alone records nothing
        from opentelemetry import trace
    with _LOCK:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, trace.ProxyTracerProvider):
            return provider
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return trace.NoOpTracerProvider()
        _configure()
        provider = trace.get_tracer_provider()
        if (shutdown := getattr(provider, "shutdown", None)) is not None:
            _shut_down_at_exit(shutdown)
        return provider


def ends_in_time(end: Callable[[], object]) -> bool:
    """Whether a flush or shutdown of a provider has ended within a few seconds; else it goes on."""
    return bool(wait([in_own_thread(end, "otel-end")], CLOSE_S).done)


def _shut_down_at_exit(shutdown: Callable[[], object]) -> None:
    """In the place of the SDK, which waits for as long as the exporter tries."""
    process, is_exit = os.getpid(), threading.Event()

    def run() -> None:
        is_exit.wait()
        shutdown()

    # Started now: at its exit, Python starts no threads.
    ended = in_own_thread(run, "otel-exit")

    def exit_soon() -> None:
        if os.getpid() == process:  # a fork has no such thread
            is_exit.set()
            wait([ended], CLOSE_S)

    atexit.unregister(shutdown)
    atexit.register(exit_soon)


def _configure() -> None:
    """Run the configurator of the environment, or the SDK's."""
    from opentelemetry.sdk._configuration import _OTelSDKConfigurator

    name = os.environ.get("OTEL_PYTHON_CONFIGURATOR", "").strip()
    installed = [
        entry
        for entry in entry_points(group="opentelemetry_configurator")
        if name in ("", entry.name)
    ]
    if name and not installed:
        raise ConfigError(
            f"OTEL_PYTHON_CONFIGURATOR = {name!r}: no installed package has this configurator"
        )
    try:
        configurator = installed[0].load() if installed else _OTelSDKConfigurator
        is_sdk = issubclass(configurator, _OTelSDKConfigurator)
        configurator().configure(**(_defaults() if is_sdk else {}))
    except (RuntimeError, ImportError, ValueError) as error:
        raise ConfigError(f"OpenTelemetry cannot be configured: {error}{_advice(error)}") from error


def _defaults() -> dict[str, Any]:
    """What the SDK gets where the environment is silent: a name, and OTLP as the exporter."""
    environ = os.environ
    if environ.get("OTEL_CONFIG_FILE"):
        return {}
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector

    named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME)
    defaults: dict[str, Any] = {} if named else {"resource_attributes": {SERVICE_NAME: SCOPE}}
    if not environ.get("OTEL_TRACES_EXPORTER"):
        protocol = (
            environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
            or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            or _DEFAULT_PROTOCOL
        ).strip()
        if protocol not in _EXPORTERS:
            known = ", ".join(_EXPORTERS)
            raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL = {protocol!r} is none of {known}")
        defaults["trace_exporter_names"] = [_EXPORTERS[protocol]]
    return defaults


def _advice(error: Exception) -> str:
    """The command that installs a missing exporter, or empty for another error."""
    missing = re.search(r"otlp_proto_(grpc|http)", str(error))
    if missing is None:
        return ""
    other = f", or set OTEL_EXPORTER_OTLP_PROTOCOL={_DEFAULT_PROTOCOL}"
    package = f"opentelemetry-exporter-otlp-proto-{missing[1]}"
    return f"; pip install {package}{other if missing[1] == 'grpc' else ''}"
