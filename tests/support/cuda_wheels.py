"""An interpreter with torch and the CUDA runtimes that pip installs beside it, as files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


class CudaWheels:
    """The folder of one interpreter.

    Args:
        cuda: of its torch, such as ``13.0``; empty for a torch without CUDA.
    """

    def __init__(self, folder: Path, cuda: str) -> None:
        self.python = str(folder / "bin" / "python")
        self.site_packages = folder / "lib" / "python3.12" / "site-packages"
        program = Path(self.python)
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        program.chmod(0o755)
        version = self.site_packages / "torch" / "version.py"
        version.parent.mkdir(parents=True)
        value = repr(cuda) if cuda else None
        version.write_text(f"debug = False\ncuda: Optional[str] = {value}\nhip = None\n")

    def add(self, wheel: str, major: int) -> Path:
        """An empty runtime; ``wheel`` names its folder, ``cu13`` or ``cuda_runtime``."""
        file = self.site_packages / "nvidia" / wheel / "lib" / f"libcudart.so.{major}"
        file.parent.mkdir(parents=True)
        file.touch()
        return file

    def compile(self, wheel: str, major: int) -> tuple[Path, Path]:
        """A runtime that can be loaded, and a library that needs it."""
        file = self.add(wheel, major)
        compile_library("int of_runtime(void) { return 0; }", file, f"-Wl,-soname,{file.name}")
        needs = self.site_packages / "preloaded.so"
        source = "int of_runtime(void); int of_saver(void) { return of_runtime(); }"
        compile_library(source, needs, "-Wl,--no-as-needed", str(file))
        return file, needs


def compile_library(source: str, to: Path, *options: str) -> None:
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(to), *options]
    subprocess.run(command, input=source.encode(), check=True)
