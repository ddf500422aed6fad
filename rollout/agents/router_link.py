"""A worker's requests to its router: turns as ``/generate``, the model's folder, pins.

Always true: a turn whose reply was lost with the router is requested again, unchanged, as long as
its client has no part of it.  Each request has a deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar

import aiohttp

from engines.http.reply_check import UnusableReply, check_generate
from engines.http.sglang_json import DONE, read_checked, read_logprob
from engines.http.trace_context import trace_headers
from engines.plain_json import WRONG_FORM
from engines.process.background import Then, keep_task
from rollout.agents.failures import ChatFailure, failure
from rollout.agents.plan import Ended
from rollout.driver.client.http_client import Outage
from rollout.router.continuation.fast_path import loads_reply
from rollout.router.http.fast_json import loads
from rollout.router.http.routes import GENERATE_PATH, PINS_PATH
from rollout.router.tokenizer_file import folder_in
from rollout.rules.contract import Contract
from rollout.rules.routing import JUST_STARTED

T = TypeVar("T")


_QUERY_S = 10.0
_MARGIN_S = 10.0
_MOST_AT_ONCE = 1 << 16
"""Bytes that are read on the event loop, in less than 1 ms."""
_SIGNED = ("x-engine-id", "x-weight-version", "x-first-weight-version", "x-logprob-kind")
_PIN_AGAIN_S = 3600.0
_JUST_STARTED = JUST_STARTED.encode()
_NO_END = "the reply ended before its last token"
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


@dataclass(frozen=True, slots=True)
class Progress:
    """The tokens of a turn so far.

    Attributes:
        entries: of their log-probs, as the engine writes them.
        signed: headers that name the engine and its weights.
    """

    text: str
    ids: Sequence[int]
    entries: Sequence[Any]
    signed: Mapping[str, str]

    def logprobs_from(self, num: int) -> list[float]:
        """Log-probs of the tokens from number ``num`` on."""
        return [read_logprob(entry[0]) for entry in self.entries[num:]]


class RouterLink:
    """The router of one worker; for use in one event loop, between ``open`` and ``close``.

    Args:
        url: base URL of the router, which it has for life.
        client_key, control_key: empty for none.
        request_timeout_s: the router's, for a request with the time it is held.
    """

    def __init__(
        self, url: str, *, client_key: str, control_key: str, request_timeout_s: float
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = _bearer(client_key)
        self._control_headers = _bearer(control_key or client_key)
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s + _MARGIN_S)
        self._outage = Outage(has_served=True)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    # -- turns ------------------------------------------------------------------------------

    async def generate(
        self, affinity: str, body: bytes, contract: Contract
    ) -> AsyncGenerator[Progress | Ended, None]:
        """The tokens so far, at last the end.  When it is closed, the request ends.

        Args:
            affinity: of the session, whose turns prefer one engine.
            body: as ``/generate`` takes it.
            contract: what its tokens have to fulfil.

        Raises:
            ChatFailure: there is no complete reply.
        """
        headers = {
            **trace_headers(),
            **self._headers,
            **contract.to_headers(),
            "content-type": "application/json",
            "x-token-failover": "on",
            "x-affinity": affinity,
        }
        has_begun = False
        for num_tries in itertools.count(1):
            try:
                async with aclosing(self._posted(body, headers)) as replies:
                    async for reply in replies:
                        has_begun = True
                        yield reply
                return
            except TimeoutError:
                raise failure(504, "timeout", "the router has not answered in time") from None
            except (aiohttp.ClientError, OSError) as error:
                lost = failure(502, "router_lost", f"the router was lost: {_words(error)}")
                if has_begun:
                    raise lost from None
                await self.wait(error, num_tries, lost)

    async def wait(self, error: Exception, num_tries: int, lost: ChatFailure) -> None:
        """Wait until a request is sent again; raises ``lost`` if the router is away too long."""
        try:
            self._outage.note(error)
            await self._outage.wait(error, num_tries)
        except (aiohttp.ClientError, OSError):
            raise lost from None

    async def _posted(
        self, body: bytes, headers: Mapping[str, str]
    ) -> AsyncGenerator[Progress | Ended, None]:
        assert self._session is not None, "a turn before open"
        async with self._session.post(
            self.url + GENERATE_PATH,
            data=BytesIO(body),  # aiohttp warns of bytes over 1 MiB
            headers=headers,
        ) as response:
            self._outage.end()
            signed = {name: response.headers[name] for name in _SIGNED if name in response.headers}
            if response.status != 200:
                content = await response.read()
                _check_has_begun(response, content)
                after = response.headers.get("retry-after", "")
                raise ChatFailure(response.status, content, after)
            if not response.content_type.startswith("text/event-stream"):
                yield await _read(_read_end, await response.read(), signed)
                return
            async for reply in _streamed(response, signed):
                yield reply

    # -- everything else --------------------------------------------------------------------

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a reply.

        Raises:
            ChatFailure: there is none.
        """
        assert self._session is not None, "a query before open"
        try:
            timeout = aiohttp.ClientTimeout(total=_QUERY_S)
            async with self._session.get(
                self.url + path, headers=self._headers, timeout=timeout
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = f"the router did not answer {path}: {_words(error)}"
            raise failure(503, "unavailable", message, "2") from None

    async def tokenizer_folder(self) -> str:
        """The folder of the engines' tokenizer.

        Raises:
            ChatFailure: no engine names it.
        """
        status, body = await self.get("/model_info")
        if status == 404:  # of vLLM
            status, body = await self.get("/v1/models")
        try:
            if status == 200:
                return folder_in(loads(body))
        except WRONG_FORM:
            pass
        message = "no engine names the folder of its tokenizer; set agents.tokenizer_path"
        raise failure(503, "unavailable", message, "2")

    async def pin(self, lora_path: str) -> Pin:
        """Keep the version of an adapter that answers now, until the pin is closed.

        Args:
            lora_path: the adapter, or empty for the one that was pushed last.

        Raises:
            ChatFailure: the router keeps none.
        """
        pin = Pin(self, lora_path)
        await pin.open()
        return pin

    async def pin_again(self, name: str) -> Pin:
        """Keep a version that a lost worker kept; it is pinned as soon as the router answers."""
        pin = Pin(self, name)
        pin.keep()
        return pin

    async def begin_pin(
        self, stack: AsyncExitStack, lora_path: str
    ) -> tuple[Mapping[str, Any], aiohttp.ClientResponse]:
        """What the router keeps, and the response that lasts as long.

        Args:
            stack: what the response ends with.

        Raises:
            aiohttp.ClientConnectionError: there is no router, or it has just started.
            ChatFailure: it refuses.
            ClientError, OSError, WRONG_FORM: it has not answered.
        """
        assert self._session is not None, "a pin before open"
        async with asyncio.timeout(_QUERY_S):
            response = await stack.enter_async_context(
                self._session.post(
                    self.url + PINS_PATH,
                    json={"lora_path": lora_path},
                    headers=self._control_headers,
                    timeout=aiohttp.ClientTimeout(),
                )
            )
            line = await response.content.readline()
        _check_has_begun(response, line)
        self._outage.end()
        if response.status != 200:
            raise ChatFailure(response.status, line)
        return loads(line), response

    async def end_pin(self, pin_id: str) -> None:
        """Let the router keep it no longer, at once; else it does so half a minute later."""
        assert self._session is not None, "the end of a pin before open"
        with suppress(aiohttp.ClientError, OSError):
            timeout = aiohttp.ClientTimeout(total=_QUERY_S)
            async with self._session.delete(
                f"{self.url}{PINS_PATH}/{pin_id}", headers=self._control_headers, timeout=timeout
            ):
                pass


class Pin:
    """A version of an adapter that the router keeps while the pin is open.

    Its connection is opened again when the router was lost.

    Attributes:
        name: the version, as ``lora_path`` takes it, or None for the base.
    """

    def __init__(self, link: RouterLink, lora_path: str) -> None:
        self.name: str | None = lora_path
        self._link = link
        self._stack = AsyncExitStack()
        self._pin_id = ""
        self._response: aiohttp.ClientResponse | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def is_kept(self) -> bool:
        """False for what has no further versions."""
        return self._keeping is not None

    async def open(self) -> None:
        """Raises ChatFailure: the router does not keep it."""
        if await self._begin():
            self.keep()

    def keep(self) -> None:
        """Open it again whenever its connection ends."""
        self._keeping = keep_task(self._keep, "agents-pin", Then.STARTS_AGAIN)

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        if self._pin_id:
            await self._link.end_pin(self._pin_id)
        await self._stack.aclose()

    async def _begin(self) -> bool:
        """Pin it; whether the router keeps it from now on.  An earlier pin ends behind that.

        Raises:
            ChatFailure: the router does not keep it.
        """
        for num_tries in itertools.count(1):
            try:
                return await self._begin_once()
            except (aiohttp.ClientError, OSError, *WRONG_FORM) as error:
                message = f"the router keeps no version of {self.name!r:.80}: {_words(error)}"
                lost = failure(503, "unavailable", message, "2")
                if not isinstance(error, _BROKEN):
                    raise lost from None
                await self._link.wait(error, num_tries, lost)
        raise AssertionError

    async def _begin_once(self) -> bool:
        assert self.name is not None, "the base is not pinned"
        async with AsyncExitStack() as stack:
            kept, response = await self._link.begin_pin(stack, self.name)
            name, is_pinned, pin_id = kept["lora_path"], kept["is_pinned"], kept.get("pin_id", "")
            following = stack.pop_all()
        old, self._stack = self._stack, following
        await old.aclose()
        self.name, self._pin_id, self._response = name, pin_id, response
        return bool(is_pinned)

    async def _keep(self) -> None:
        while True:
            if self._response is not None:
                with suppress(aiohttp.ClientError, OSError):
                    async with asyncio.timeout(_PIN_AGAIN_S):
                        await self._response.content.read()
            if not await self._begin():
                return


def _check_has_begun(response: aiohttp.ClientResponse, content: bytes) -> None:
    """Raises aiohttp.ClientConnectionError: the router does not serve so far."""
    if response.status == 503 and _JUST_STARTED in content:
        raise aiohttp.ClientConnectionError(JUST_STARTED)


async def _read(
    read: Callable[[bytes, Mapping[str, str]], T], content: bytes, signed: Mapping[str, str]
) -> T:
    if len(content) > _MOST_AT_ONCE:
        return await asyncio.to_thread(read, content, signed)
    return read(content, signed)


def _read_end(content: bytes, signed: Mapping[str, str]) -> Ended:
    """Raises ChatFailure: it is no complete reply."""
    with _unusable(signed):
        payload = loads_reply(content)
        if "error" in payload:
            raise ChatFailure(502, content)
        return _end_of(payload, signed)


def _end_of(payload: Any, signed: Mapping[str, str]) -> Ended:
    reply = read_checked(payload, wants_logprobs=True)
    if reply.finish_reason is None:
        raise failure(502, "engine_failure", _NO_END)
    is_known = payload["meta_info"].get("cached_tokens") is not None
    return Ended(reply, num_cached=reply.cached_tokens if is_known else None, signed=signed)


@contextmanager
def _unusable(signed: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except (UnusableReply, *WRONG_FORM) as error:
        engine = signed.get("x-engine-id", "")
        message = f"engine {engine} sent an unusable reply: {_words(error)}"
        raise failure(502, "engine_failure", message) from None


async def _streamed(
    response: aiohttp.ClientResponse, signed: Mapping[str, str]
) -> AsyncGenerator[Progress | Ended, None]:
    """The events of a reply; of several that arrived together only the last, which repeats the
    others."""
    reply: Progress | Ended | None = None
    pieces: list[bytes] = []  # of a line that has not ended
    async for data in response.content.iter_any():
        before, line_end, rest = data.rpartition(b"\n")
        pieces.append(before if line_end else data)
        if not line_end:
            continue
        lines, pieces = b"".join(pieces).split(b"\n"), [rest]
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        events = [event for event in events if event != DONE]
        if events:
            reply = await _read(_read_event, events[-1], signed)
            if isinstance(reply, Progress):
                yield reply
    if reply is None:
        raise failure(502, "engine_failure", "the stream ended before its first token")
    if isinstance(reply, Progress):
        raise failure(502, "engine_failure", _NO_END)
    yield reply


def _read_event(content: bytes, signed: Mapping[str, str]) -> Progress | Ended:
    """The tokens so far, or the end.

    Raises:
        ChatFailure: it is an error, or no complete reply.
    """
    with _unusable(signed):
        payload = loads_reply(content)
        if "error" in payload:
            raise ChatFailure(502, content)
        meta = payload["meta_info"]
        if meta.get("finish_reason") is not None:
            return _end_of(payload, signed)
        check_generate(payload, wants_logprobs=True)
        logprobs = meta.get("output_token_logprobs") or ()
        return Progress(
            payload.get("text") or "", payload.get("output_ids") or (), logprobs, signed
        )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
