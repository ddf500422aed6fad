"""The kinds of engines, one row each: ask ``kind_of(name)``, not for a kind by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from engines.protocol import Engine
from engines.protocol.kind import Kind
from engines.vllm import routes as vllm_routes
from engines.vllm.features import why_open


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is loaded with its first call: a configuration needs none."""

    def call(*args: Any, **named: Any) -> Any:
        return getattr(import_module(module), name)(*args, **named)

    return call


def _sglang_client(*args: Any, weights_cpu_backup: bool = False, **named: Any) -> Engine:
    """Whether weights outlive a release is decided at the start of an engine that takes these."""
    from engines.http.client import EngineClient

    return EngineClient(*args, **named)


_SGLANG = Kind(
    name="sglang",
    client=_sglang_client,
    invocation=_late("engines.sglang.invocation", "invocation"),
)
_VLLM = Kind(
    name="vllm",
    client=_late("engines.vllm.client", "VllmClient"),
    invocation=_late("engines.vllm.invocation", "invocation"),
    resume_path=vllm_routes.RESUME,
    is_numbered_at_start=False,
    why_open=why_open,
)
_EMBEDDED = Kind(
    name="embedded",
    client=_sglang_client,
    invocation=_late("engines.embedded.command", "invocation"),
)
_FAKE = Kind(
    name="fake",
    client=_sglang_client,
    invocation=_late("engines.fake.command", "invocation"),
)
# SGLang that another program launched.
_ATTACHED = replace(_SGLANG, name="attached", invocation=None)

KINDS = {kind.name: kind for kind in (_EMBEDDED, _SGLANG, _VLLM, _FAKE, _ATTACHED)}
"""All of them, by name; one more is one more row."""


def kind_of(name: str) -> Kind:
    """The row of a kind.

    Raises:
        ValueError: there is none.
    """
    if name not in KINDS:
        raise ValueError(f"engine kind {name!r} is not known; known: {', '.join(KINDS)}")
    return KINDS[name]
