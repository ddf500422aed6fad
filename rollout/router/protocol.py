"""uvicorn's HTTP protocol, with one thing more: a reply that has begun can be cut.

Plain ASGI has no way to say "this reply cannot be completed": returning early or raising makes
uvicorn log an error of the application, and the engine's failure is not one.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout.router.exchange import CUT_EXTENSION


class RouterProtocol(HttpToolsProtocol):
    """Puts ``close`` and ``abort`` of the connection into every request's scope."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {
            CUT_EXTENSION: {"close": self.transport.close, "abort": self.transport.abort}
        }
