"""Make an environment with SGLang or vLLM for a machine without a GPU, and print how it is used.

The environment is in the user's cache folder (``XDG_CACHE_HOME``).  pip installs into it what
``pins.txt`` names, and what is there already stays.  What is printed is the section ``engine`` of a
configuration, as JSON, which is YAML.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KINDS = ("sglang", "vllm")
TORCH = "torch==2.13.0"
"""The wheel of vLLM was built for this one."""
HERE = Path(__file__).resolve().parent
MEMORY_SAVER = HERE / "memory_saver"
"""The folder of the package ``torch_memory_saver``."""
# An engine that is given GPUs leaves them alone.
_SGLANG_OPTIONS = {"device": "cpu"}
_VLLM_OPTIONS = {
    "worker-cls": "tools.cpu_engines.vllm.worker.CpuWorker",
    # The worker is in the process of the engine core.  In processes of their own, as vLLM has them
    # on a CPU, both poll shared memory with ``sched_yield`` while requests run, and other processes
    # on the same cores wait for up to a second: a client had its first token after thousands had
    # been made, and its abort came too late.
    "distributed-executor-backend": "uni",
    # Without compiling, and with a KV cache of a known size, it starts without a warm-up.
    "enforce-eager": True,
    "dtype": "float32",
    "kv-cache-memory-bytes": 64 << 20,
    "max-num-seqs": 16,
}
_VLLM_VARIABLES = {
    "VLLM_NO_USAGE_STATS": "1",
    # Without it vLLM does not take the executor above on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {"sglang": _SGLANG_OPTIONS, "vllm": _VLLM_OPTIONS}
_VARIABLES: Mapping[str, Mapping[str, str]] = {"sglang": {}, "vllm": _VLLM_VARIABLES}
# vLLM's plugin and worker are imported from this clone.
_ON_PATH: Mapping[str, Path] = {"sglang": MEMORY_SAVER, "vllm": HERE.parents[1]}


def python_of(kind: str) -> Path:
    """The interpreter of the environment, which exists once it is made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ray-rollout" / f"{kind}-cpu" / "venv" / "bin" / "python"


def pins_of(kind: str) -> Path:
    """What it holds besides torch."""
    return HERE / kind / "pins.txt"


def variables_of(kind: str) -> dict[str, str]:
    """The environment variables of an engine in it, and of any other program there."""
    path = os.pathsep.join([str(HERE / kind / "shims"), str(_ON_PATH[kind])])
    return {"PYTHONPATH": path, **_VARIABLES[kind]}


def engine(kind: str, **settings: Any) -> dict[str, Any]:
    """The section ``engine`` of a configuration, for engines in it."""
    return {"gpus": 0, **launch_settings(kind, **settings)}


def launch_settings(kind: str, **settings: Any) -> dict[str, Any]:
    """How an engine in it is launched; ``options`` and ``env`` are added to its own."""
    return {
        "kind": kind,
        "python": str(python_of(kind)),
        **settings,
        "options": {**OPTIONS[kind], **settings.get("options", {})},
        "env": {**variables_of(kind), **settings.get("env", {})},
    }


def commands(kind: str) -> list[Sequence[str]]:
    """What makes it, or adds what it lacks."""
    python = python_of(kind)
    make = [sys.executable, "-m", "venv", str(python.parents[1])]
    pip = [str(python), "-I", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    return [
        *([] if python.with_name("pip").exists() else [make]),
        [*pip, TORCH],
        [*pip, "--no-deps", "-r", str(pins_of(kind))],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    arguments = parser.parse_args()
    machine = f"{platform.system()} {platform.machine()}"
    if machine != "Linux x86_64":
        sys.exit(f"the pinned wheels are for Linux x86_64; this machine is {machine}")
    for command in commands(arguments.kind):
        print(*command, file=sys.stderr, flush=True)
        if not arguments.dry_run and (status := subprocess.call(command, stdout=sys.stderr)):
            sys.exit(status)
    if not arguments.dry_run:
        print(json.dumps(engine(arguments.kind), indent=2))


if __name__ == "__main__":
    main()
