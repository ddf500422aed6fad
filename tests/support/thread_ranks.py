"""Ranks of a trainer that are threads of one process."""

import threading
from collections.abc import Sequence


class Messages:
    """A store between threads."""

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}
        self._changed = threading.Condition()

    def put(self, key: str, message: str) -> None:
        with self._changed:
            self._messages[key] = message
            self._changed.notify_all()

    def claim(self, key: str, message: str) -> str:
        with self._changed:
            stored = self._messages.setdefault(key, message)
            self._changed.notify_all()
            return stored

    def get(self, keys: Sequence[str], timeout_s: float) -> list[str | None]:
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._messages for key in keys), timeout_s)
            return [self._messages.get(key) for key in keys]

    def delete(self, keys: Sequence[str]) -> None:
        with self._changed:
            for key in keys:
                self._messages.pop(key, None)
