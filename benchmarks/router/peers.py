"""The Rust routers, in a virtual environment of their own in the user's cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {"sglang_router": "sglang-router", "smg": "smg", "vllm_router": "vllm-router"}
# It has none; the others serve with this one.
_SUBCOMMANDS: dict[str, list[str]] = {"vllm_router": []}
# Their cheapest settings: no affinity, no retries.
_COMMON = [
    *("--host", "127.0.0.1", "--policy", "round_robin", "--log-level", "error"),
    *("--disable-retries", "--disable-circuit-breaker", "--max-concurrent-requests", "16384"),
]
_INSTALL_TIMEOUT_S = 600.0


def environment() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "ray-rollout" / "router-peers"


def install() -> dict[str, str]:
    """Install each peer.

    Returns:
        By name the reason why it is not installed; empty if it is.
    """
    place = environment()
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    return {name: _install_one(python, package) for name, package in PACKAGES.items()}


def _install_one(python: Path, package: str) -> str:
    shown = subprocess.run([python, "-m", "pip", "show", "-q", package], capture_output=True)
    if shown.returncode == 0:
        return ""
    print(f"installing {package} into {python.parents[1]}", file=sys.stderr)
    command = [python, "-m", "pip", "install", "-q", "--only-binary", ":all:", package]
    try:
        installed = subprocess.run(
            command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"pip install {package} took longer than {_INSTALL_TIMEOUT_S:.0f} s"
    lines = installed.stderr.strip().splitlines()
    return "" if installed.returncode == 0 else (lines[-1] if lines else "pip failed")


def version(name: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({PACKAGES[name]!r}))"
    printed = subprocess.run(
        [environment() / "bin" / "python", "-c", code], capture_output=True, text=True
    )
    return printed.stdout.strip()


def command(name: str, port: int, metrics_port: int, engines: list[int]) -> list[str]:
    """The command line that serves on ``port``."""
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    binary = environment() / "bin" / PACKAGES[name]
    return [
        str(binary),
        *_SUBCOMMANDS.get(name, ["launch"]),
        *_COMMON,
        "--port",
        str(port),
        "--prometheus-port",
        str(metrics_port),
        "--worker-urls",
        *urls,
    ]
