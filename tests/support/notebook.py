"""An actor that writes down what happens to it."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from rollout.runtime.worker_process import is_own_process, switch_threads_often


class TwoArguments(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Notebook:
    """Writes down what happens to it."""

    def __init__(self, is_broken: bool = False) -> None:
        if is_broken:
            raise ValueError("it is broken")
        self.notes: list[Any] = []
        self.hanging = asyncio.Event()
        self.released = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def note(self, what: Any) -> Any:
        self.notes.append(what)
        return what

    async def read(self) -> list[Any]:
        return self.notes

    async def where(self) -> tuple[int, bool]:
        return os.getpid(), is_own_process()

    async def turn_s(self) -> float:
        if is_own_process():
            switch_threads_often()
        return sys.getswitchinterval()

    async def fail(self) -> None:
        raise ValueError("the book is full")

    async def fail_with_two(self) -> None:
        raise TwoArguments("ink", "paper")

    async def hang(self) -> str:
        self.hanging.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.notes.append("cancelled")
            self.cancelled.set()
            raise
        return "released"

    async def hangs(self) -> bool:
        await self.hanging.wait()
        return True

    async def was_cancelled(self) -> bool:
        return await self.cancelled.wait()

    async def release(self) -> None:
        self.released.set()

    async def have_child(self, remote_class: Any) -> list[Any]:
        self.child = remote_class.remote()
        await self.child.read.remote()
        return [self.child]
