"""The program of a process that judges: a model's text may keep it busy, or take its memory.

It is run by its path and imports nothing of ours, so that it starts quickly.  It reads one line of
JSON for each judgement and answers with one.  Always true: it ends at the end of its input, and the
kernel ends it where one judgement takes longer than its time, so also where its parent is no more.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence

_MOST_BYTES = 2 << 30
"""Memory limit of the child.  With sympy loaded it has about 100 MB."""
_MOST_KEPT_KB = 512 << 10
"""A process that has had more is replaced: caches may hold it, and the next text needs memory."""


def _most_kb() -> int:
    """The most memory that this program has had.

    ``ru_maxrss`` begins with what the parent had: a driver with torch has more than the bound.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def _judge(text: str, answers: Sequence[str]) -> bool | None:
    """Whether the text has one of the answers; ``None`` if that cannot be found out."""
    from math_verify import parse, verify

    try:
        # No timeouts of math-verify: their handlers are Python's, and a power is computed in C.
        parsed = parse(text, parsing_timeout=None)
        return any(
            verify(parse(answer, parsing_timeout=None), parsed, timeout_seconds=None)
            for answer in answers
        )
    except Exception:  # also of memory and recursion: what the text leads to is not known
        return None


def _bound(limit: int, most: int) -> None:
    hard = resource.getrlimit(limit)[1]
    if hard == resource.RLIM_INFINITY or hard > most:
        resource.setrlimit(limit, (most, most))


def main(alarm_s: float) -> None:
    """Answer until the input ends.

    Args:
        alarm_s: after which a judgement ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the driver
    # Whatever the parent ignores or blocks: no handler of Python's runs during a long operation.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    logging.disable()  # math-verify warns that it has no timeout
    _judge("$1$", ["$1$"])  # imports, and compiles its expressions
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # what a library prints is no answer,
    os.dup2(nowhere, 2)  # and a model's text is nothing for a terminal
    _bound(resource.RLIMIT_CORE, 0)
    _bound(resource.RLIMIT_AS, _MOST_BYTES)
    answers.write(b"ready\n")
    for line in requests:
        text, expected = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        is_right = _judge(text, expected)
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_last = _most_kb() > _MOST_KEPT_KB
        answers.write(json.dumps([is_right, is_last]).encode() + b"\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
