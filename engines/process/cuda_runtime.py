"""The CUDA runtime of an interpreter, for the memory saver's library, which is preloaded.

torch finds the runtime that pip installs beside it, and the system's loader does not look there.  A
preloaded library that lacks what it needs ends every process at its start, with status 127.

Always true: the user's own folders come first, and the runtime is that of the interpreter's torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.protocol.plain_text import first_line
from engines.protocol.spec import inherited_environment

LIBRARY_PATH = "LD_LIBRARY_PATH"
_ASK_S = 20.0
_CUDA_OF_TORCH = re.compile(r"^cuda\b[^=\n]*= *(?:None|['\"](\d+))", re.MULTILINE)
_LOAD = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1]); maps = open('/proc/self/maps'); "
    "print(next(line.split()[-1] for line in maps if 'libcudart' in line))"
)


def site_packages(python: str) -> Sequence[Path]:
    """Where packages of this interpreter are, empty for our own."""
    if python:
        return sorted(Path(python).parent.parent.glob("lib/python*/site-packages"))
    return [Path(folder) for folder in sys.path if folder]


def with_runtime(env: Mapping[str, str], python: str) -> dict[str, str]:
    """The environment, with the runtime that pip installed for this interpreter's torch, if any, on
    the loader's path."""
    name = _runtime_of_torch(python)
    files = [file for at in site_packages(python) for file in at.glob(f"nvidia/*/lib/{name}")]
    folders = dict.fromkeys(str(file.parent) for file in files if name)
    if not folders:
        return dict(env)
    own = [env[LIBRARY_PATH]] if env.get(LIBRARY_PATH) else []
    return {**env, LIBRARY_PATH: ":".join([*own, *folders])}


def runtime_text(python: str) -> str:
    """Which runtime a library that is preloaded into this interpreter gets, or why none."""
    name, program = _runtime_of_torch(python), python or sys.executable
    if not name:
        return f"none: {program} has no torch, or one without CUDA"
    try:
        asked = subprocess.run(
            [program, "-I", "-c", _LOAD, name],
            env=with_runtime(inherited_environment(os.environ, python), python),
            capture_output=True,
            text=True,
            timeout=_ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {program} does not answer: {first_line(error)}"
    if asked.returncode == 0:
        return f"{asked.stdout.strip()}, for {program}"
    if name not in asked.stderr:
        return f"unknown: {program} ended with status {asked.returncode}"
    wheel = "nvidia-cuda-runtime-cu12" if name.endswith(".12") else "nvidia-cuda-runtime"
    return (
        f"none: the loader finds no {name} for {program}, so an engine whose memory is released "
        f"ends at its start with status 127; pip install {wheel} there, or set {LIBRARY_PATH} "
        "under engine.env to the folder that has it"
    )


def _runtime_of_torch(python: str) -> str:
    """The runtime's file, by its version in torch, or empty for a torch without CUDA."""
    for folder in site_packages(python):
        version = folder / "torch" / "version.py"
        if version.is_file():
            found = _CUDA_OF_TORCH.search(version.read_text())
            return f"libcudart.so.{found[1]}" if found and found[1] else ""
    return ""
