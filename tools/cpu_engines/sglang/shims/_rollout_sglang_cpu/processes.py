"""SGLang's schedulers and its detokenizer are forked, not spawned.

A spawned process imports torch and SGLang again, 6 s of CPU each.  SGLang spawns because a CUDA
context does not survive a fork, and there is none here.
"""

from __future__ import annotations

import multiprocessing


def fork() -> None:
    """Where SGLang asks for the start method ``spawn``, it is ``fork``."""
    set_start_method = multiprocessing.set_start_method

    def set_other(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_other
