"""Versions of adapters that clients keep between their requests.

Always true: a version is kept while a pin of it is open, and for ``LINGERS_S`` after its client was
lost, so that the client's next process can pin it again.  A pin that its client closes ends at
once.  At most ``MOST_LEFT`` pins stay without a client, the last ones.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from engines.protocol.adapter_names import Names
from rollout.router.gate.gate import Gate
from rollout.router.http.fast_json import dumps

LINGERS_S = 30.0
MOST_LEFT = 1 << 14


@dataclass(eq=False, slots=True)
class _Pin:
    names: Names
    is_closed: asyncio.Event = field(default_factory=asyncio.Event)


class Pins:
    """The pins at one gate; used on the router's event loop."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._pins: dict[str, _Pin] = {}
        self._left: dict[str, asyncio.TimerHandle] = {}

    async def open(self, names: Names) -> AsyncIterator[bytes]:
        """The reply to a client: its only line, and its end when the pin is closed."""
        pin_id, pin = secrets.token_hex(16), _Pin(names)
        self._pins[pin_id] = pin
        self._gate.pin(names)
        try:
            line = {"lora_path": names[0], "is_pinned": True, "pin_id": pin_id}
            yield dumps(line) + b"\n"
            await pin.is_closed.wait()
        finally:
            if pin_id in self._pins:
                self._leave(pin_id)

    def close(self, pin_id: str) -> bool:
        """End a pin; False if there is none of this id."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        if (timer := self._left.pop(pin_id, None)) is not None:
            timer.cancel()
        pin.is_closed.set()
        self._gate.unpin(pin.names)
        return True

    def _leave(self, pin_id: str) -> None:
        """The client was lost."""
        loop = asyncio.get_running_loop()
        self._left[pin_id] = loop.call_later(LINGERS_S, self.close, pin_id)
        if len(self._left) > MOST_LEFT:
            self.close(next(iter(self._left)))
