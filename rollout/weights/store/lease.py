"""How long a run's bytes may stay when nobody of it speaks any more.

Always true: a run that says nothing for the length of its lease loses its bytes, by its own agent
or by the next one that starts on the node; so does one of an earlier boot.  A run that is there
keeps them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout.weights.store import same_path
from rollout.weights.store.files import Files
from rollout.weights.store.machine import boot_id, since_boot_s

logger = logging.getLogger(__name__)

LEASE = "lease.json"
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Lease:
    """Until when, in seconds since which boot."""

    boot_id: str
    until_s: float

    def holds(self, boot: str, now_s: float) -> bool:
        """Whether it still counts."""
        return self.boot_id == boot and now_s < self.until_s


def renew(files: Files, folder: Path, lease_s: float) -> Lease:
    """A lease from now on, for all that is in ``folder``."""
    lease = Lease(boot_id(), since_boot_s() + lease_s)
    files.replace(folder / LEASE, json.dumps(asdict(lease)).encode())
    return lease


def read_lease(folder: Path) -> Lease | None:
    """The lease of a folder; None if it has none that can be read."""
    try:
        values = json.loads((folder / LEASE).read_bytes())
        return Lease(str(values["boot_id"]), float(values["until_s"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def locked(base: Path) -> Iterator[None]:
    """Meanwhile nobody else begins or sweeps a run below ``base``; a kill lets go of it."""
    descriptor = _take(base)
    try:
        yield
    finally:
        os.close(descriptor)


def _take(base: Path) -> int:
    path = base / _LOCK
    while True:
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the last user has just removed the folder
            continue
        except (
            FileExistsError
        ):  # or removed it between mkdir's failure and its look at what is there
            if base.is_file() or base.is_symlink():
                raise
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # a lock that nobody else can find is none


def sweep(
    base: Path, *, boot: Callable[[], str] = boot_id, now_s: Callable[[], float] = since_boot_s
) -> list[str]:
    """Remove runs below ``base`` whose lease is over; returns their names.  Hold the lock."""
    gone = []
    for run in sorted(one for one in base.iterdir() if one.is_dir()):
        for folder in sorted(run.iterdir()):
            if folder.is_symlink() or not folder.is_dir():
                continue
            lease = read_lease(folder)
            if lease is None or not lease.holds(boot(), now_s()):
                same_path.forget_all(run, folder)
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(f"{run.name}/{folder.name}")
        remove_if_empty(run)
    if gone:
        logger.info("store: removed what crashed runs left: %s", ", ".join(gone))
    return gone


def remove_if_empty(folder: Path) -> None:
    """A folder in which nothing is but our lock."""
    try:
        if os.listdir(folder) == [_LOCK]:
            (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        pass  # somebody else is in it
