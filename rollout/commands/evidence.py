"""What this machine can tell of a process: its state, its stack, its log, who holds GPU memory.

Always true: looking changes nothing, and ends within its deadline; what cannot be looked at is
said, with how to look oneself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from rollout.config import is_loopback

_TIMEOUT_S = 10.0
_STATES = {
    psutil.STATUS_STOPPED: "stopped by a signal (SIGSTOP): kill -CONT {pid} lets it go on",
    psutil.STATUS_SLEEPING: "waiting for something (sleeping)",
    psutil.STATUS_RUNNING: "computing (running)",
    psutil.STATUS_ZOMBIE: "dead, and not yet reaped by its parent",
    psutil.STATUS_DISK_SLEEP: "in the kernel and not to be interrupted, as in a disk or GPU driver",
}


def pid_of(engine: dict[str, Any]) -> int | None:
    """The process of an engine, if it is surely one of this machine: it listens where it should.

    A number alone proves nothing: another node may have told it.
    """
    url = urlsplit(engine.get("url", ""))
    if not url.port or not _is_ours(url.hostname or ""):
        return None
    owner = _listening_on(url.port)
    told = engine.get("pid")
    if owner is None or not told:
        return owner
    try:
        family = {int(told), *(one.pid for one in psutil.Process(int(told)).children(True))}
    except psutil.Error:
        return None
    return int(told) if owner in family else None


def _is_ours(host: str) -> bool:
    """Whether ``host`` is an address of this machine."""
    if is_loopback(host):
        return True
    addresses = {one.address for all_of in psutil.net_if_addrs().values() for one in all_of}
    return host in addresses


def _listening_on(port: int) -> int | None:
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:
        return None
    for one in connections:
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port:
            return one.pid
    return None


def process_state(pid: int) -> str:
    """What the process is doing, in words."""
    try:
        process = psutil.Process(pid)
        cpu = process.cpu_percent(0.2)
        state = process.status()
        memory = process.memory_info().rss
    except psutil.Error as error:
        return f"process {pid}: {error}"
    meaning = _STATES.get(state, state).format(pid=pid)
    return f"process {pid}: {meaning}; {cpu:.0f} % CPU, {memory / 2**20:.0f} MiB"


def stack(pid: int) -> str:
    """The Python stack of a process by py-spy, or how to get it."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return f"(no stack: py-spy is not installed; pip install py-spy, py-spy dump --pid {pid})"
    done = _run([tool, "dump", "--nonblocking", "--pid", str(pid)])
    if done.returncode == 0:
        return done.stdout.strip()
    why = (done.stderr or done.stdout).strip().splitlines()
    return f"(no stack of {pid}: {why[-1] if why else 'py-spy failed'}; try it as root)"


def gpu_holders() -> list[str]:
    """Who holds GPU memory on this machine, a line each; empty without NVIDIA GPUs."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    done = _run(
        [
            tool,
            "--query-compute-apps=gpu_uuid,pid,used_memory,process_name",
            "--format=csv,noheader",
        ]
    )
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))
