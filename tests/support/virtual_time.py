"""An event loop whose clock jumps to the next timer, so that a minute's deadline costs nothing."""

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable

# Real seconds; only a thread's answer is ever waited for, and a test that waits longer is stuck.
_STUCK_S = 5.0


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout=None):
        if timeout is None:
            events = super().select(_STUCK_S)
            if not events:
                raise RuntimeError("the test is stuck: nothing is left that could happen")
            return events
        events = super().select(0)
        if not events:
            self.now_s += max(0.0, timeout)
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Time passes only when every task waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Without the limit of Python 3.12: its timer would jump, and threads end in real time."""
        await super().shutdown_default_executor()


async def pass_time(seconds: float) -> None:
    """Waits for virtual seconds to pass, which is refused where they would be real ones."""
    if not isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
        raise RuntimeError("time is real here: wait for what is to happen")
    await asyncio.sleep(seconds)


def virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test on a ``VirtualTimeLoop``."""

    @functools.wraps(test)
    def run(*args, **kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
