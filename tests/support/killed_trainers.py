"""Kill trainers in their pushes with SIGKILL: ``python -m tests.support.killed_trainers``.

    python -m tests.support.killed_trainers FOLDER HOW ROUTE

One after the other is killed at a line that none was killed at before, of the modules that make or
remove files; after each, another trainer pushes another version, and is closed.  A separate
program, because it forks the trainers from a process that has imported torch.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from rollout.core.pending import LoopThread
from rollout.runtime.handle.pusher import Pusher
from rollout.weights.ranks.link import RankLink
from tests.support.killed_push import Trainer
from tests.support.thread_ranks import Messages

MODULES = (
    "engines.process.locks",
    "engines.process.own_files",
    "rollout.weights.ranks.link",
    "rollout.weights.routes.buffers",
    "rollout.weights.routes.disk",
    "rollout.weights.routes.shared_memory",
)
# What a push of one version leaves on purpose.
CHECKPOINTS = "disk-"


def files_of(modules: tuple[str, ...]) -> set[str]:
    found = map(importlib.util.find_spec, modules)
    return {str(spec.origin) for spec in found if spec is not None}


def kill_at(number: int) -> None:
    """End this process with SIGKILL at that line of the modules, counted as they are reached."""
    files, reached = files_of(MODULES), set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
            if len(reached) >= number:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)


def in_child(run: Callable[[], object]) -> int:
    """How a forked child ended that ran this: its exit status, or minus the signal."""
    child = os.fork()
    if not child:
        status = 1
        try:
            run()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def push(folder: Path, how: str, route: str, version: int, killed_at: int = 0) -> None:
    """A trainer that pushes two versions, and is closed; or it is killed while it does."""
    torch.set_num_threads(1)
    loop = LoopThread("engines")
    if killed_at:
        kill_at(killed_at)
    if how == "two ranks":
        meet(folder, loop, route)
    else:
        trainer = Trainer(loop, folder, how, route)
        trainer.push(version)
        trainer.push(version + 1)
        trainer.close()
    sys.settrace(None)
    loop.close()


def meet(folder: Path, loop: LoopThread, route: str) -> None:
    """Rank 0 of two, whose other rank is on another host: it has answered before."""
    messages = Messages()
    messages.put("token/1", str(folder / "elsewhere"))
    messages.put("host/1", "1")
    server: Any = Trainer(loop, folder, "copied", route).pushes.server
    Pusher(server, RankLink(0, 2, messages), timeout_s=20).close()


def left_in(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith(CHECKPOINTS))


def main() -> None:
    folder, (how, route) = Path(sys.argv[1]), sys.argv[2:]
    num_killed, num_left, version = 0, 0, 0
    while True:
        version += 4
        status = in_child(partial(push, folder, how, route, version, num_killed + 1))
        assert status in (0, -signal.SIGKILL), status
        if not status:
            break
        num_killed += 1
        num_left += bool(left_in(folder))
        assert not in_child(partial(push, folder, how, route, version + 2))
        if left := left_in(folder):
            sys.exit(f"the trainer that was killed at line {num_killed} has left {left}")
    assert not left_in(folder), left_in(folder)
    print(f"killed at {num_killed} lines; {num_left} have left something", flush=True)


if __name__ == "__main__":
    main()
