"""Bearer keys: one to generate, one to read state and to abort.  Health needs no key.

Always true: no engine sees a key of the router.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from rollout.router.http.headers import Headers

OPEN_PATHS = frozenset({"/health", "/ready"})
CLIENT_PATHS = frozenset({"/v1/models", "/model_info", "/get_model_info"})
"""Paths that reach no gate but are a client's: either key is enough."""


class BearerKeys:
    """The bearer keys of one router.

    Args:
        client: what generation and model info need, or empty for no key.
        control: what everything else needs, or empty for the client's.
        is_clients: whether either key is enough for a path that reaches no gate.
    """

    def __init__(
        self,
        client: str,
        control: str,
        is_clients: Callable[[str], bool] = CLIENT_PATHS.__contains__,
    ) -> None:
        self._is_clients = is_clients
        self._client = client.encode()
        self._control = (control or client).encode()
        self.are_needed = bool(self._control)

    def admit(self, headers: Headers, path: str, *, is_generation: bool) -> bool:
        """Whether these headers give access to this path; any wrong key takes the same time."""
        is_clients = self._is_clients(path)
        key = self._client if is_generation or is_clients else self._control
        if not key or path in OPEN_PATHS:
            return True
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        is_right = hmac.compare_digest(given[0], b"Bearer " + key)
        is_control = hmac.compare_digest(given[0], b"Bearer " + self._control)
        return is_right or (is_clients and is_control)

    def is_open(self, path: str, *, is_generation: bool) -> bool:
        """Whether any client has access to this path, which is more than a health check."""
        return path not in OPEN_PATHS and self.admit([], path, is_generation=is_generation)

    def strip(self, headers: Headers) -> Headers:
        """The headers without the keys of this router, which engines must not see.

        Where generation needs none, a client's key for the engine passes.
        """
        if not self.are_needed:
            return headers
        return [
            (name, value)
            for name, value in headers
            if name != b"authorization" or not (self._client or self._control in value)
        ]
