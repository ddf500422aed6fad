"""Who may look, and who may steer.

Always true: without a key only this machine can look; without a control key nobody can steer.  A
wrong key takes as long to refuse as a nearly right one.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie

from rollout.config import is_loopback

COOKIE = "rollout_key"


class Access:
    """The two keys of a page.

    Args:
        key: opens the page and its data; empty for no key.
        control_key: opens what changes something, and the page too; empty for nothing.
        host: where the page is bound; on loopback, requests that name another host are refused,
            for a browser sends those only when a foreign site has led it here.
    """

    def __init__(self, *, key: str, control_key: str, host: str) -> None:
        self._key = key.encode()
        self._control_key = control_key.encode()
        self._is_loopback = is_loopback(host)
        self.can_steer = bool(control_key)

    def may_look(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers may see anything."""
        if not self._key:
            return not self._is_loopback or is_loopback(_host_of(headers.get("host", "")))
        given = _given(headers)
        # Both are compared whatever the first says, so that time tells nothing.
        opens, steers = self._is(given, self._key), self._is(given, self._control_key)
        return opens or steers

    def may_steer(self, headers: Mapping[str, str]) -> bool:
        """Whether it may change something: never by cookie, which other sites can make use of."""
        given = _bearer(headers)
        return self.can_steer and self._is(given, self._control_key)

    @staticmethod
    def _is(given: bytes, key: bytes) -> bool:
        return bool(key) and hmac.compare_digest(given, key)


def _bearer(headers: Mapping[str, str]) -> bytes:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode() if kind.lower() == "bearer" else b""


def _given(headers: Mapping[str, str]) -> bytes:
    if key := _bearer(headers):
        return key
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return b""
    return cookie.value.encode() if cookie else b""


def _host_of(netloc: str) -> str:
    if netloc.startswith("["):
        return netloc[1:].partition("]")[0]
    return netloc.partition(":")[0]
