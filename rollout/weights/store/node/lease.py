"""The lease of a run: how long its files stay without a renewal.

Always true: files of a run whose lease expired, or of an earlier boot, are removed by its own agent
or, when that has ended, by the next agent that starts on the node.  A run that renews its lease
keeps its files.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from engines.plain_json import WRONG_FORM, read_json
from engines.process.locks import remove_unheld
from engines.process.process_identity import boot_id
from rollout.core.machine import since_boot_s
from rollout.weights.store.node.files import Files, remove_links
from rollout.weights.store.node.private_folder import make_private_folder, own_folders

logger = logging.getLogger(__name__)

LEASE = "lease.json"
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class Lease:
    """Expiry time, in seconds since a boot."""

    boot_id: str
    until_s: float

    def holds(self, boot: str, now_s: float) -> bool:
        """Whether it is still valid."""
        return self.boot_id == boot and now_s < self.until_s


def renew(files: Files, folder: Path, lease_s: float) -> Lease:
    """Write a new lease for ``folder``."""
    lease = Lease(boot_id(), since_boot_s() + lease_s)
    files.replace(folder / LEASE, json.dumps(asdict(lease)).encode())
    return lease


def read_lease(folder: Path) -> Lease | None:
    """The lease of a folder; None if it has no readable one."""
    try:
        values = read_json((folder / LEASE).read_bytes())
        return Lease(str(values["boot_id"]), float(values["until_s"]))
    except (OSError, *WRONG_FORM):
        return None


@contextmanager
def locked(base: Path) -> Iterator[None]:
    """Meanwhile no other process starts or sweeps a run below ``base``. A kill releases it.

    Raises:
        WeightsUnavailable: ``base`` is not a folder that only this user can enter.
        OSError: there can be no lock on it.
    """
    descriptor = _take(base)
    try:
        yield
    finally:
        os.close(descriptor)


def _take(base: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        folder = make_private_folder(base)
        try:
            descriptor = os.open(_LOCK, flags, 0o600, dir_fd=folder.descriptor)
        except FileNotFoundError:  # another process has just removed the folder
            continue
        finally:
            folder.close()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.lstat(base / _LOCK)):
                return descriptor
        os.close(descriptor)  # the file was removed: other processes lock another one


def sweep(base: Path, *, boot: Callable[[], str] = boot_id) -> list[str]:
    """Remove runs below ``base`` whose lease expired; returns their names. Needs the lock.

    What is a link, or belongs to another user, or is held by an agent, is left alone.
    """
    gone = []
    for run in own_folders(base):
        for folder in own_folders(run):
            lease = read_lease(folder)
            is_held = lease is not None and lease.holds(boot(), since_boot_s())
            if not is_held and _remove(run, folder):
                gone.append(f"{run.name}/{folder.name}")
        remove_if_empty(run)
    if gone:
        logger.info("store: removed files of crashed runs: %s", ", ".join(gone))
    return gone


def _remove(run: Path, folder: Path) -> bool:
    return remove_unheld(folder, partial(remove_links, run), is_known=True)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that is empty but for the lock file."""
    with suppress(OSError):  # it is in use
        if os.listdir(folder) == [_LOCK]:
            (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()
