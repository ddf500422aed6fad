"""Identity of an engine's process, so that it is found again and never confused with another.

Always true: a process is only ever signalled after its start time was compared through a handle
that the kernel keeps for it, so a pid that was given to another process is safe; and nothing is
reported gone before every process of the engine has been looked for, wherever it moved.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engines.process.guard import TOKEN_VARIABLE, place
from engines.protocol import ProcessIdentity
from engines.protocol.errors import EngineHung

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GUARD_NAME = b"engine-guard"
_POLL_S = 0.02
_GUARD_GRACE_S = 2.0


def boot_id() -> str:
    """A text that changes each time this machine starts."""
    return _BOOT_ID.read_text().strip()


def is_of_this_boot(identity: ProcessIdentity) -> bool:
    """Whether it was started on this machine, since that was last switched on."""
    return identity.boot_id == boot_id()


def is_visible(identity: ProcessIdentity) -> bool:
    """Whether its pid means that process here: in this container, since the machine's start."""
    return [identity.boot_id, identity.namespace] == place()


def identity_at(pid: int, started: int, token: str = "") -> ProcessIdentity:
    """The identity of a process of this container that started then, which may have ended."""
    boot, namespace = place()
    return ProcessIdentity(pid, started, socket.gethostname(), boot, token, namespace)


def identify(pid: int, token: str = "") -> ProcessIdentity | None:
    """The identity of a process of this machine, or None if it has ended."""
    seen = _look(pid)
    if seen is None:
        return None
    return identity_at(pid, seen.started, token)


def is_running(identity: ProcessIdentity) -> bool:
    """Whether that very process runs here."""
    return is_visible(identity) and _runs(identity.pid, identity.started)


def pids_of(identity: ProcessIdentity) -> list[int]:
    """Pids of that process and of everything else of its engine that runs, without the guard."""
    return sorted(_find_engine(identity).engine)


def resident_bytes(identities: Iterable[ProcessIdentity]) -> int:
    """Memory that these engines hold here; pages that processes share are counted in each."""
    return resident_bytes_of({pid for identity in identities for pid in pids_of(identity)})


def resident_bytes_of(pids: Iterable[int]) -> int:
    """Memory of these processes; pages that they share are counted in each."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError):
            total += page * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total


def end(identity: ProcessIdentity, timeout_s: float = 10.0) -> int:
    """Kill that engine, if it runs here, and wait until all its processes are gone.

    Its guard, where it still lives, removes the leftovers and exits.

    Returns:
        How many processes were killed; 0 if it had ended before.

    Raises:
        EngineHung: something survives SIGKILL; its memory is not free.
    """
    began = time.monotonic()
    killed: set[int] = set()
    while True:
        found = _find_engine(identity)
        killed |= kill_all(found.engine)
        left = found.engine or found.guards
        if not left:
            return len(killed)
        elapsed_s = time.monotonic() - began
        if not found.engine and elapsed_s > _GUARD_GRACE_S:
            kill_all(found.guards)
        if elapsed_s > timeout_s:
            raise EngineHung(
                f"processes {', '.join(map(str, left))} of an engine are still there "
                f"{timeout_s:g} s after SIGKILL; what they hold is not free",
                operation="kill",
                budget_s=timeout_s,
            )
        time.sleep(_POLL_S)


@dataclass(slots=True)
class FoundProcesses:
    """Living processes by pid, each with its start time."""

    engine: dict[int, int]
    guards: dict[int, int]


@dataclass(frozen=True, slots=True)
class _Seen:
    started: int
    parent: int
    is_guard: bool


def _find_engine(identity: ProcessIdentity) -> FoundProcesses:
    if not is_visible(identity):
        return FoundProcesses({}, {})
    return find_processes(identity.token, {identity.pid: identity.started})


def find_processes(token: str, known: Mapping[int, int]) -> FoundProcesses:
    """The processes of an engine: known ones, those that carry its token, and what is below them.

    A program that writes its title over its environment carries nothing any more, but its parent
    does, or its guard.

    Args:
        token: empty to look at no environment.
        known: pid -> start time.
    """
    found = FoundProcesses({}, {})
    everyone = {int(name): _look(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    alive = {pid: seen for pid, seen in everyone.items() if seen is not None}
    below: dict[int, list[int]] = {}
    for pid, seen in alive.items():
        below.setdefault(seen.parent, []).append(pid)
    roots = [
        pid
        for pid, seen in alive.items()
        if known.get(pid) == seen.started or (token and _carries(pid, token))
    ]
    while roots:
        pid = roots.pop()
        of = found.guards if alive[pid].is_guard else found.engine
        if pid not in of:
            of[pid] = alive[pid].started
            roots += below.get(pid, [])
    return found


def kill_all(processes: Mapping[int, int]) -> set[int]:
    """SIGKILL to processes, each with its start time; the pids of those that still ran."""
    return {pid for pid, started in processes.items() if _kill(pid, started)}


def terminate(identity: ProcessIdentity, timeout_s: float) -> bool:
    """SIGTERM to that very process, if it runs here; returns whether it has ended in this time."""
    if not is_visible(identity):
        return True
    with _signalled(identity.pid, identity.started, signal.SIGTERM) as handle:
        return handle is None or bool(select.select([handle], [], [], timeout_s)[0])


def _kill(pid: int, started: int) -> bool:
    with _signalled(pid, started, signal.SIGKILL) as handle:
        return handle is not None


@contextmanager
def _signalled(pid: int, started: int, number: int) -> Iterator[int | None]:
    """The kernel's handle for a process that a signal was sent to, or None if it has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        # Looked at again now that the handle holds: the pid cannot change its meaning any more.
        is_sent = _runs(pid, started)
        if is_sent:
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                is_sent = False
        yield handle if is_sent else None
    finally:
        os.close(handle)


def _runs(pid: int, started: int) -> bool:
    seen = _look(pid)
    return seen is not None and seen.started == started


def _look(pid: int) -> _Seen | None:
    """A process as it is now, or None if it has ended, or only waits to be reaped."""
    try:
        # The second field is the program's name in brackets and may hold anything.
        name, _, rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
        state, parent, *fields = rest.split()
        started = int(fields[17])
    except (OSError, ValueError, IndexError):
        return None
    if state in (b"Z", b"X"):
        return None
    return _Seen(started, int(parent), name.endswith(b"(" + _GUARD_NAME))


def _carries(pid: int, token: str) -> bool:
    try:
        return f"{TOKEN_VARIABLE}={token}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
