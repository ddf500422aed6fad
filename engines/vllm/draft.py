"""The draft model of a vLLM engine, by its options or its own report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engines.protocol.spec import spelled

_CONFIG = "speculative_config"
_SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
# They draft from the tokens alone.
_WITHOUT_WEIGHTS = ("ngram", "[ngram]", "ngram_gpu", "suffix")


def draft_of(options: Mapping[str, Any]) -> str:
    """The path of its draft model, or the method that has one; empty if it has none.

    One that cannot be read counts as a draft: a copy of weights too many harms less.
    """
    config = _config(options)
    model, method = str(config.get("model") or ""), str(config.get("method") or "")
    if not any(config.values()) or (method or model) in _WITHOUT_WEIGHTS:
        return ""
    return model or method or _CONFIG.replace("_", "-")


def _config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Its speculative configuration, however it is given."""
    found: dict[str, Any] = {}
    for option, value in options.items():
        name, _, key = spelled(option).partition(".")
        if name in _SHORT:
            found[_SHORT[name]] = value
        elif name == _CONFIG and key:
            found[key] = value
        elif name == _CONFIG:
            found.update(_read(value))
    return found


def _read(value: Any) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {"unreadable": value}
    return value if isinstance(value, Mapping) else {"unreadable": value}
