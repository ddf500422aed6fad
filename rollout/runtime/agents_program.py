"""One worker of agents: ``python -m rollout.runtime.agents_program LISTENER OWNER_PID ROUTER_URL``.

Always true: it ends when its owner does, however that ends, also while another process has
inherited the owner's end of the pipe; ``SIGTERM`` lets its turns end.  ``runtime.agents_process``
is the owner's side.

In: one line of JSON, of ``WorkerSettings``.  LISTENER is the descriptor of the bound socket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import sys

from engines.process.background import Then, keep_thread


def main() -> None:
    """Serve until ``SIGTERM``, or until the owner ends."""
    descriptor, owner_pid, router_url = sys.argv[1:]
    keep_thread(lambda: _end_after(int(owner_pid)), "the watch for the owner", Then.PROCESS_ENDS)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    line = sys.stdin.buffer.readline()
    if line.endswith(b"\n"):  # else the owner has ended
        asyncio.run(_serve(line, router_url, socket.socket(fileno=int(descriptor))))


async def _serve(line: bytes, router_url: str, listener: socket.socket) -> None:
    keep_thread(_end_with_pipe, "the watch for the pipe", Then.PROCESS_ENDS)
    # Here: meanwhile the end of the owner is seen already.
    from rollout.agents.worker.host import AgentsHost
    from rollout.agents.worker.settings import WorkerSettings
    from rollout.rules.deadlines import STOP_TIMEOUT_S
    from rollout.runtime.worker_process import tune_worker

    tune_worker()
    host = AgentsHost(WorkerSettings.of_json(line), owns_process=True)
    ordered = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ordered.set)
    await host.start(router_url, listener)
    await ordered.wait()
    await host.stop(STOP_TIMEOUT_S)
    os._exit(0)  # no turn is left, and a thread that reads a long chat is not waited for


def _end_after(pid: int) -> None:
    try:
        owner = os.pidfd_open(pid)
    except (AttributeError, OSError):  # a kernel without them: the pipe ends, too
        return
    if os.getppid() == pid:  # else it has ended, and another may have its number
        select.select([owner], [], [])
    os._exit(0)


def _end_with_pipe() -> None:
    # Not its buffer, which Python wants to close while this thread waits.
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
