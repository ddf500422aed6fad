"""Who may generate, and who may look and abort.  Health needs no key."""

from __future__ import annotations

import hmac

from rollout.router.headers import Headers

OPEN_PATHS = frozenset({"/health", "/ready"})


class Keys:
    """The bearer keys of one router.

    Args:
        client: what generation needs; empty for no key.
        control: what everything else needs; empty for the client's.
    """

    def __init__(self, client: str, control: str) -> None:
        self._client = client.encode()
        self._control = (control or client).encode()
        self.are_needed = bool(self._control)

    def admit(self, headers: Headers, path: str, *, is_generation: bool) -> bool:
        """Whether these headers open this path; takes the same time for any wrong key."""
        key = self._client if is_generation else self._control
        if not key or path in OPEN_PATHS:
            return True
        given = [value for name, value in headers if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], b"Bearer " + key)

    def strip(self, headers: Headers) -> Headers:
        """Without the client's key, which is not the engines' business."""
        if not self._client:
            return headers
        return [header for header in headers if header[0] != b"authorization"]
