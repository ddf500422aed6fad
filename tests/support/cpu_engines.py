"""Settings of engines on the CPU, as tests start them; real ones in interpreters of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.contract import CPU_OPTIONS
from tools.cpu_engines import install


def cpu_config(kind: str, **settings: Any) -> dict[str, Any]:
    """Settings of an ``EngineConfig``, with more of them."""
    return cpu_engine(kind, **({"gpus": 0} | settings))


def cpu_engine(kind: str, **settings: Any) -> dict[str, Any]:
    """Settings of an ``EngineSpec``, with more of them."""
    settings = {"kind": kind, **settings}
    settings["options"] = CPU_OPTIONS.get(kind, {}) | settings.get("options", {})
    return install.launch_settings(**settings) if kind in install.KINDS else settings


def installed(kind: str, package: str) -> Path:
    """A package or a module in the interpreter of a real engine."""
    site = install.python_of(kind).parents[1] / "lib"
    (found,) = site.glob(f"python3*/site-packages/{package}")
    return found
