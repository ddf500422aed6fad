"""Inspects processes of this machine: their state and their stack.

Always true: an inspection changes nothing and ends within a deadline; if it is not possible, the
text names the reason and the command to use.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from engines.protocol.plain_text import size_text
from rollout.config.base import is_loopback

_TIMEOUT_S = 10.0
_STATES = {
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP): kill -CONT {pid} resumes it",
    psutil.STATUS_SLEEPING: "waiting (sleeping)",
    psutil.STATUS_RUNNING: "computing (running)",
    psutil.STATUS_ZOMBIE: "dead, not yet reaped by its parent",
    psutil.STATUS_DISK_SLEEP: "in an uninterruptible kernel call, as in a disk or GPU driver",
}


def pid_of(engine: dict[str, Any]) -> int | None:
    """The process of an engine if it runs on this machine; None otherwise.

    The reported pid alone is not enough, because it may belong to another node: the process, or a
    child of it, must listen on the engine's port.
    """
    url = urlsplit(engine.get("url", ""))
    if not url.port or not _is_ours(url.hostname or ""):
        return None
    owner = _listening_on(url.port)
    pid = engine.get("pid")
    if owner is None or not pid:
        return owner
    try:
        family = {int(pid), *(child.pid for child in psutil.Process(int(pid)).children(True))}
    except psutil.Error:
        return None
    return int(pid) if owner in family else None


def _is_ours(host: str) -> bool:
    """Whether ``host`` is an address of this machine."""
    if is_loopback(host):
        return True
    addresses = {
        address.address for interface in psutil.net_if_addrs().values() for address in interface
    }
    return host in addresses


def _listening_on(port: int) -> int | None:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for connection in connections:
        address = connection.laddr
        if connection.status == psutil.CONN_LISTEN and address and address.port == port:
            return connection.pid
    return None


def examine(pid: int) -> dict[str, str]:
    """``state`` and ``stack`` of a process."""
    return {"state": process_state(pid), "stack": stack(pid)}


def process_state(pid: int) -> str:
    """State, CPU share and memory of a process, as one line."""
    try:
        process = psutil.Process(pid)
        cpu = process.cpu_percent(0.2)
        state = process.status()
        memory = process.memory_info().rss
    except psutil.Error as error:
        return f"process {pid}: {error}"
    meaning = _STATES.get(state, state).format(pid=pid)
    return f"process {pid}: {meaning}; {cpu:.0f} % CPU, {size_text(memory)}"


def stack(pid: int) -> str:
    """The Python stack of a process from py-spy, or a line that explains how to get it."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return f"(no stack: py-spy is not installed; pip install py-spy, py-spy dump --pid {pid})"
    done = _run([tool, "dump", "--nonblocking", "--pid", str(pid)])
    if done.returncode == 0:
        return done.stdout.strip()
    errors = (done.stderr or done.stdout).strip().splitlines()
    return f"(no stack of {pid}: {errors[-1] if errors else 'py-spy failed'}; try it as root)"


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
