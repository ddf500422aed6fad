"""An environment for an engine, apart from this interpreter's: made once, then reused.

Always true:
- an environment is used only if its stamp is there, which is written last; a half-made one is
  made again;
- one installer at a time makes it; a second waits, and then finds it made;
- its folder is named after the pins that went into it, so other pins never meet old files;
- the stand-ins in it are those of this package: they are small, and copied again if they differ.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engines.protocol.errors import EngineError
from engines.protocol.plain_text import size_text
from engines.protocol.spec import CPU_PYTHONS, OF_THIS_PYTHON

_NOT_COPIED = ("README.md", "ruff.toml", "__pycache__")
_NEEDED_BYTES = 4 * 1024**3
_SHOWN_LINES = 15


class InstallError(EngineError):
    """The environment cannot be made here, or is not."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What goes into an environment.

    Attributes:
        name: of its folder in the cache, and of the command that makes it.
        product: what it runs, in errors.
        torch: installed first, with what it depends on.
        pins: a file of requirements, installed without what they depend on.
        shims: a folder that is copied into its site-packages.
        first_import: a module that must be importable at the end.
        variables: that its first import needs besides.
        engine_options: that an engine in it is started with, by name.
        engine_variables: those of an engine in it with so many threads.
    """

    name: str
    product: str
    torch: str
    pins: Path
    shims: Path
    first_import: str
    variables: Mapping[str, str]
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    engine_variables: Callable[[int], Mapping[str, str]] = lambda num_threads: {}

    def cache_folder(self) -> Path:
        """Where environments are kept, one folder per set of pins."""
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(root) / "ray-rollout" / self.name

    def fingerprint_of_pins(self) -> str:
        """Of all that pip installs, and for which Python."""
        what = f"{sys.version_info[:2]} {self.torch} {self.pins.read_text()}"
        return hashlib.sha256(what.encode()).hexdigest()[:16]

    def fingerprint_of_shims(self) -> str:
        """Of the stand-ins as they are in this package."""
        digest = hashlib.sha256()
        for path in sorted(self.shims.rglob("*")):
            name = path.relative_to(self.shims)
            if path.is_file() and not set(name.parts) & set(_NOT_COPIED):
                digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]


def recipe_of(python: str) -> Recipe | None:
    """That of the interpreter of this name, as ``EngineSpec.python``; None if it is not cached."""
    module = CPU_PYTHONS.get(python)
    recipe: Recipe | None = import_module(module).RECIPE if module else None
    return recipe


class CachedEnvironment:
    """One environment, made or not.

    Args:
        execute: runs a command and returns what it printed.
    """

    def __init__(
        self,
        recipe: Recipe,
        cache: Path | None = None,
        *,
        execute: Callable[[list[str]], str] | None = None,
        needed_bytes: int = _NEEDED_BYTES,
    ) -> None:
        self.folder = (cache or recipe.cache_folder()) / recipe.fingerprint_of_pins()
        self.stamp = self.folder / "installed.json"
        self._recipe = recipe
        self._execute = execute or partial(run, variables=recipe.variables)
        self._needed_bytes = needed_bytes

    @property
    def python(self) -> Path:
        """Its interpreter; exists only once it is made."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def is_made(self) -> bool:
        return self.stamp.is_file() and self.python.exists()

    def require(self) -> Path:
        """Its interpreter.

        Raises:
            InstallError: it is not made.
        """
        if not self.is_made:
            raise InstallError(
                f"{self._recipe.product} is not installed; "
                f"`rollout {self._recipe.name} install` does it "
                f"(2 GB, a few minutes) in {self.folder}",
                operation="install",
            )
        return self.make()

    def make(self, report: Callable[[str], None] = print) -> Path:
        """Make what is missing of it; its interpreter.

        Raises:
            InstallError: with the reason, and the end of pip's output.
        """
        if self._is_current():
            return self.python
        check_machine(self._recipe.product)
        self.folder.mkdir(parents=True, exist_ok=True)
        with _only_one(self.folder.with_suffix(".lock"), report):
            if not self.is_made:
                self._make(report)
            elif not self._is_current():
                self._copy_shims()
                self._write_stamp()
        return self.python

    def _is_current(self) -> bool:
        if not self.is_made:
            return False
        stamped: dict[str, str] = json.loads(self.stamp.read_text())
        return stamped["shims"] == self._recipe.fingerprint_of_shims()

    def _make(self, report: Callable[[str], None]) -> None:
        started = time.monotonic()
        venv = self.folder / "venv"
        shutil.rmtree(venv, ignore_errors=True)  # of an installer that was stopped
        free = shutil.disk_usage(self.folder).free
        if free < self._needed_bytes:
            raise InstallError(
                f"{self.folder} has {size_text(free)} free, {self._recipe.product} needs "
                f"{size_text(self._needed_bytes)}; free some, or point XDG_CACHE_HOME elsewhere"
            )
        report(f"making {venv} with Python {platform.python_version()}")
        self._execute([sys.executable, "-m", "venv", str(venv)])
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        report(f"1/3 {self._recipe.torch}; a CPU build if pip sees one")
        self._execute([*pip, self._recipe.torch])
        report(f"2/3 {self._recipe.product} and what it imports")
        self._execute([*pip, "--no-deps", "-r", str(self._recipe.pins)])
        report("3/3 stand-ins, and a first import")
        self._copy_shims()
        self._execute([str(self.python), "-c", f"import {self._recipe.first_import}"])
        self._write_stamp()
        report(f"installed in {time.monotonic() - started:.0f} s")

    def _write_stamp(self) -> None:
        made_of = {
            "python": platform.python_version(),
            "torch": self._recipe.torch,
            "shims": self._recipe.fingerprint_of_shims(),
        }
        partial = self.stamp.with_suffix(".partial")
        partial.write_text(json.dumps(made_of, indent=1))
        partial.replace(self.stamp)

    def _copy_shims(self) -> None:
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site_packages = self._execute([str(self.python), "-c", program]).strip()
        shutil.copytree(
            self._recipe.shims,
            site_packages,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(*_NOT_COPIED),
        )


def clean_environment() -> dict[str, str]:
    """This process's environment, less what belongs to this interpreter."""
    return {name: value for name, value in os.environ.items() if name not in OF_THIS_PYTHON}


def check_machine(product: str, here: str = "") -> None:
    """Refuse a machine that the pinned wheels do not fit.

    Raises:
        InstallError: naming what it is and what it would have to be.
    """
    here = here or f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        raise InstallError(f"{product} is for Linux x86_64; this machine is {here}")


@contextmanager
def _only_one(lock: Path, report: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock; the system releases it when this process ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another installer is at work; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: list[str], variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """The output of ``command``.

    Raises:
        InstallError: it failed; with its last lines.
    """
    done = subprocess.run(
        command,
        env=clean_environment() | dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        shown = "\n".join(done.stdout.splitlines()[-_SHOWN_LINES:])
        raise InstallError(
            f"`{' '.join(command[1:])}` ended with status {done.returncode}:\n{shown}",
            operation="install",
        )
    return done.stdout
