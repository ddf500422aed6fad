"""What the data path needs of a transport.  Anything that keeps to this can replace it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engines.protocol import Endpoint
from rollout.router.headers import Headers
from rollout.router.stamp import stamp


@dataclass(slots=True)
class Request:
    """A whole request, kept until its engine has begun to answer.

    Attributes:
        target: path and query, as the client sent them.
        headers: those meant for the engine.
        rid: its id, where it is known.
        is_rid_ours: the router gave it that id and has to write it in.
        is_extra_key_ours: the router writes the weight version in.
    """

    method: str
    target: str
    headers: Headers
    body: bytes
    rid: str = ""
    is_rid_ours: bool = False
    is_extra_key_ours: bool = False

    def body_under(self, weight_version: int | None) -> bytes:
        """The body an engine gets when admitted under this weight version."""
        values = {}
        if self.is_rid_ours:
            values["rid"] = self.rid
        if self.is_extra_key_ours and weight_version is not None:
            values["extra_key"] = f"v{weight_version}"
        return stamp(self.body, **values)


class Reply(Protocol):
    """An engine's answer, of which the head has come."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Iterable[tuple[bytes, bytes]]: ...
    @property
    def is_at_end(self) -> bool:
        """The last byte has been read."""
        ...

    async def read(self) -> bytes:
        """What has come since, once there is some; nothing at the end.

        Raises:
            EngineUnreachable: the engine went away before its last byte.
        """
        ...

    def close(self) -> None:
        """Done with it.  Before its end this closes the connection, which ends the work."""
        ...


class Transport(Protocol):
    """A way to engines.  Cancelling ``send`` closes the connection it was using."""

    async def send(
        self, engine_id: str, endpoint: Endpoint, request: Request, body: bytes
    ) -> Reply:
        """Send ``request`` and wait for the head of the answer.

        Raises:
            EngineUnreachable: no connection, or it broke before the head was complete.
        """
        ...
