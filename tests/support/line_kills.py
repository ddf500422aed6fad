"""A process that is killed at each line of a function, one after the other."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any


def killed_at_each_line(function: FunctionType, run: Callable[[], object]) -> Iterator[bool]:
    """Call ``run`` in children, which die at a line of ``function``; the last child does not.

    Yields:
        After each child: whether it was killed.
    """
    for line in itertools.count(1):
        child = os.fork()
        if not child:
            _run_until(line, function, run)
        is_killed = os.waitpid(child, 0)[1] != 0
        yield is_killed
        if not is_killed:
            return


def _run_until(line: int, function: FunctionType, run: Callable[[], object]) -> None:
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        os._exit(0)
