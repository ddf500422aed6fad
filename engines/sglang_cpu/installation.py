"""The environment that CPU SGLang runs in: made once, then reused.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.protocol.errors import EngineError
from engines.protocol.plain_text import size_text

TORCH = "torch==2.13.0"
PINS = Path(__file__).with_name("pins.txt")
SHIMS = Path(__file__).with_name("shims")
_NOT_COPIED = ("README.md", "ruff.toml", "__pycache__")
_NEEDED_BYTES = 4 * 1024**3
_SHOWN_LINES = 15


class InstallError(EngineError):
    """CPU SGLang cannot be installed here, or is not."""


def cache_folder() -> Path:
    """Where environments are kept, one folder per set of pins."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "ray-rollout" / "sglang-cpu"


class Installation:
    """One environment, made or not.

    Args:
        execute: runs a command and returns what it printed.
    """

    def __init__(
        self,
        cache: Path | None = None,
        *,
        execute: Callable[[list[str]], str] | None = None,
        needed_bytes: int = _NEEDED_BYTES,
    ) -> None:
        self.folder = (cache or cache_folder()) / fingerprint_of_pins()
        self.stamp = self.folder / "installed.json"
        self._execute = execute or run
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
                "CPU SGLang is not installed; `rollout sglang-cpu install` does it "
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
        check_machine()
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
        return stamped["shims"] == fingerprint_of_shims()

    def _make(self, report: Callable[[str], None]) -> None:
        started = time.monotonic()
        venv = self.folder / "venv"
        shutil.rmtree(venv, ignore_errors=True)  # of an installer that was stopped
        free = shutil.disk_usage(self.folder).free
        if free < self._needed_bytes:
            raise InstallError(
                f"{self.folder} has {size_text(free)} free, CPU SGLang needs "
                f"{size_text(self._needed_bytes)}; free some, or point XDG_CACHE_HOME elsewhere"
            )
        report(f"making {venv} with Python {platform.python_version()}")
        self._execute([sys.executable, "-m", "venv", str(venv)])
        pip = [str(self.python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        report(f"1/3 {TORCH}; a CPU build if pip sees one")
        self._execute([*pip, TORCH])
        report("2/3 SGLang and what it imports")
        self._execute([*pip, "--no-deps", "-r", str(PINS)])
        report("3/3 stand-ins for CUDA, and a first import")
        self._copy_shims()
        self._execute([str(self.python), "-c", "import sglang.srt.server_args"])
        self._write_stamp()
        report(f"installed in {time.monotonic() - started:.0f} s")

    def _write_stamp(self) -> None:
        shims = fingerprint_of_shims()
        made_of = {"python": platform.python_version(), "torch": TORCH, "shims": shims}
        partial = self.stamp.with_suffix(".partial")
        partial.write_text(json.dumps(made_of, indent=1))
        partial.replace(self.stamp)

    def _copy_shims(self) -> None:
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site_packages = self._execute([str(self.python), "-c", program]).strip()
        shutil.copytree(
            SHIMS, site_packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_NOT_COPIED)
        )


def fingerprint_of_pins() -> str:
    """Of all that pip installs, and for which Python."""
    what = f"{sys.version_info[:2]} {TORCH} {PINS.read_text()}"
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def fingerprint_of_shims() -> str:
    """Of the stand-ins as they are in this package."""
    digest = hashlib.sha256()
    for path in sorted(SHIMS.rglob("*")):
        name = path.relative_to(SHIMS)
        if path.is_file() and not set(name.parts) & set(_NOT_COPIED):
            digest.update(str(name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cpu_environment() -> dict[str, str]:
    """This process's environment, less what belongs to this interpreter, for CPU SGLang."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return env | {"SGLANG_USE_CPU_ENGINE": "1"}


def check_machine(here: str = "") -> None:
    """Refuse a machine that the pinned wheels do not fit.

    Raises:
        InstallError: naming what it is and what it would have to be.
    """
    here = here or f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64":
        raise InstallError(f"CPU SGLang is for Linux x86_64; this machine is {here}")


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


def run(command: list[str]) -> str:
    """The output of ``command``.

    Raises:
        InstallError: it failed; with its last lines.
    """
    done = subprocess.run(
        command,
        env=cpu_environment(),
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
