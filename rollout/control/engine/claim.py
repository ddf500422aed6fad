"""The claim of a group on an attached engine, so that one run at a time drives it.

Always true: a claim ends with its process, also after SIGKILL.  It is known to the runs of one user
on one host: SGLang and vLLM have no place for it, so a run elsewhere is not seen here.  What it
does to the engine is (``weight_watch``).
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engines.process.locks import FileLock, owner_of, read_values
from engines.process.own_files import SHARED_MEMORY
from engines.protocol import Endpoint
from engines.protocol.plain_text import describe
from rollout.core.errors import ConfigError, WeightsUnavailable
from rollout.weights.store.node.base_folder import (
    base_folder,
    locked,
    make_private_folder,
    remove_if_empty,
)

logger = logging.getLogger(__name__)

# Not of any run: runs that attach to one engine may have different settings.
BASE = base_folder(SHARED_MEMORY)
_FOLDER = "attached"


class Claim:
    """A group's claim on one engine.

    Args:
        folder: of the group; it is the same group if it is launched or started again.
        setting: its path, for messages.
        takeover: other runs may have a claim on it.

    Raises:
        ConfigError: another living run has one, or another group of this run.
    """

    def __init__(
        self, endpoint: Endpoint, engine_id: str, folder: str, setting: str, *, takeover: bool
    ) -> None:
        self._base = BASE
        self._path = self._base / _FOLDER / f"{_name(endpoint)}-{_digest(os.path.abspath(folder))}"
        self._file: FileLock | None = None
        try:
            self._make(endpoint, engine_id, folder, setting, takeover=takeover)
        except (OSError, WeightsUnavailable) as error:
            logger.warning(
                "engine %s at %s: whether another run uses it is not known: %s",
                *(engine_id, endpoint.url, describe(error)),
            )

    def _make(
        self, endpoint: Endpoint, engine_id: str, folder: str, setting: str, *, takeover: bool
    ) -> None:
        with locked(self._base):
            make_private_folder(self._path.parent).close()
            others = list(_held(self._path))
            if others and not takeover:
                raise ConfigError(
                    f"{setting}.engine.urls: engine {engine_id} at {endpoint.url} is in use: "
                    f"{owner_of(others[0])} has attached it, for the group of "
                    f"{read_values(others[0]).get('group')}; end that run, or set "
                    f"{setting}.engine.takeover to true: that run fences the engine then",
                    setting=f"{setting}.engine.takeover",
                    value=takeover,
                )
            for other in others:
                taken = engine_id, endpoint.url, owner_of(other)
                logger.warning("engine %s at %s is taken over from %s", *taken)
            self._take(folder)

    def _take(self, folder: str) -> None:
        if (before := _HELD.get(self._path)) is not None:  # of this process: its group was lost
            self._file, before._file = before._file, None
        else:
            lock = FileLock(self._path)
            try:
                lock.take()
            except BlockingIOError:  # of a process of the same group, which is about to end
                lock.release()
                return
            lock.write(group=folder)
            self._file = lock
        _HELD[self._path] = self

    def release(self) -> None:
        """Let another run attach the engine; repeated calls do nothing."""
        if self._file is None:
            return
        file, self._file = self._file, None
        _HELD.pop(self._path, None)
        with suppress(OSError), locked(self._base):
            self._path.unlink(missing_ok=True)
            file.release()
            remove_if_empty(self._path.parent)
            remove_if_empty(self._base)
        file.release()


_HELD: dict[Path, Claim] = {}
"""The claims of this process; the last one of a group has the lock."""


def remove_ended() -> None:
    """Remove the claims of processes that have ended; a claim of another run does that, too."""
    with suppress(OSError, WeightsUnavailable):
        folder = BASE / _FOLDER
        if folder.is_dir():
            with locked(BASE):
                _living(folder)
                remove_if_empty(folder)
                remove_if_empty(BASE)


def _held(own: Path) -> Iterator[Path]:
    """The claims of others on the same engine."""
    engine = own.name.rpartition("-")[0]
    for path in _living(own.parent):
        if path != own and path.name.rpartition("-")[0] == engine:
            yield path


def _living(folder: Path) -> list[Path]:
    """The claims whose processes live; the others are removed."""
    living = []
    for path in sorted(folder.iterdir()):
        lock = FileLock(path)
        try:
            lock.take()
            path.unlink()
        except BlockingIOError:
            living.append(path)
        finally:
            lock.release()
    return living


def _name(endpoint: Endpoint) -> str:
    """One name for all addresses of this host, because an engine may listen at several."""
    address = endpoint.host
    with suppress(OSError):
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        address = str(found[0][4][0])
    return f"{'here' if _is_here(address) else _digest(address)}-{endpoint.port}"


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
