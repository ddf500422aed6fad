"""A ``GenerationClient`` over HTTP: ``/generate`` of a router, or of one engine.

aiohttp, not httpx: this sends thousands of small requests a second, and httpx needs about eight
times as much CPU for each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import orjson

from engines.http.reply_check import UnusableReply
from engines.http.sglang_json import DONE, read_checked, sse_payloads
from engines.http.trace_context import trace_headers
from engines.kinds import kind_of
from engines.plain_json import WRONG_FORM, read_json
from engines.protocol import GenerateReply, Loads
from engines.protocol.adapter_names import Names, newest_version, resolved
from engines.protocol.logprob_kind import LogprobRule, read_kind
from engines.protocol.plain_text import one_line, value_text
from rollout.driver.client.generation_client import (
    Disconnected,
    EngineLoad,
    FailureKind,
    GenerationError,
    GenerationRequest,
    kind_of_refusal,
)
from rollout.driver.client.sample_requests import weights_field
from rollout.rules.contract import NO_CONTRACT
from rollout.rules.routing import JUST_STARTED

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_ABORTS_AT_ONCE = 32
_JSON = {"content-type": "application/json"}
_AGAIN = frozenset({429, 503})
_ABORTED = 499
# How the router's refusals of a contract are marked.
_UNFULFILLED_STATUS = frozenset({400, 409})
_UNFULFILLED = {
    "weight_version": FailureKind.VERSION,
    "logprob_kind": FailureKind.LOGPROB_KIND,
}
# For so long a router that was lost is tried again; Ray has it back in one to three seconds.
_RECONNECT_S = 10.0
_RECONNECT_AGAIN_S = 0.05
_MOST_CONNECTIONS = 64

T = TypeVar("T")


class HttpGenerationClient:
    """For use in one event loop; call ``close`` at the end.

    Args:
        url: base URL of a router or of one engine.
        timeout_s: for one whole completion, including time held at the gate.
        lora_path: name of a LoRA adapter for all completions; None: the base; empty: what was
            pushed last.
        routed_experts: request the routed experts of all completions.
        sampling_mask: request what each of their tokens was drawn from.
        key: the router's ``client_key``, or empty for none.
        control_key: the router's, for aborts, loads and metrics; empty: ``key``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        lora_path: str | None = "",
        routed_experts: bool = False,
        sampling_mask: bool = False,
        key: str = "",
        control_key: str = "",
    ) -> None:
        self._names: Names = (lora_path,)
        self._extra_fields = weights_field(lora_path)
        if routed_experts:
            self._extra_fields["return_routed_experts"] = True
        if sampling_mask:
            self._extra_fields["return_sampling_mask"] = True
        self._headers = _JSON | _bearer(key)
        # Not a session header: the session also queries engines, which must not get the key.
        self._control_headers = _bearer(control_key or key)
        self._url = url.rstrip("/")
        self._generate_url = self._url + "/generate"
        self._timeout_s = timeout_s
        self._outage = Outage(has_served=False)
        self._has_refused = False
        # Each caller holds a slot of the limiter, so the connector needs no limit.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # A separate session, so that aborts do not wait behind generations.
        self._control = aiohttp.ClientSession(timeout=_CONTROL_TIMEOUT)

    async def close(self) -> None:
        await self._session.close()
        await self._control.close()

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        async with aclosing(self._replies(request)) as replies:
            return await anext(replies)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerateReply, None]:
        """The reply as it comes, each time with everything so far; the last has a finish reason.

        To close it early ends the request.

        Raises:
            GenerationError: there is no reply, or it broke off.
        """
        shown: GenerateReply | None = None
        async with aclosing(self._replies(request, stream=True)) as replies:
            async for reply in replies:
                known = () if shown is None else shown.output_ids
                if reply.output_ids[: len(known)] != known:
                    raise GenerationError("the reply began again", kind=FailureKind.LOST)
                yield (shown := reply)

    async def _replies(
        self, request: GenerationRequest, **more: Any
    ) -> AsyncGenerator[GenerateReply, None]:
        """The reply as it comes; a lost connection is opened again, with the same request."""
        clock = asyncio.get_running_loop().time
        until_s = clock() + (request.timeout_s or self._timeout_s)
        for num_tries in itertools.count(1):
            try:
                async with self._posted(request, until_s - clock(), more) as response:
                    if not more:
                        yield _read_reply(await response.read(), response)
                        return
                    async for reply in _read_stream(response):
                        yield reply
                return
            except Disconnected as error:
                await self._outage.wait(error, num_tries)
                if clock() >= until_s:
                    raise

    @asynccontextmanager
    async def _posted(
        self, request: GenerationRequest, left_s: float, more: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response to a request, which is 200.  Whatever breaks is a ``GenerationError``."""
        if self._session.closed:
            raise GenerationError("the driver was closed")
        try:
            async with self._session.post(
                self._generate_url,
                # aiohttp warns of bytes over 1 MiB.
                data=BytesIO(json.dumps({**self._body(request), **more}).encode()),
                headers=self._headers_of(request),
                timeout=aiohttp.ClientTimeout(total=left_s),
            ) as response:
                self._outage.end()
                if response.status != 200:
                    after = response.headers.get("retry-after", "")
                    raise _error_of_status(response.status, await response.read(), after)
                yield response
        except TimeoutError:
            timeout_s = request.timeout_s or self._timeout_s
            least = request.contract.least
            wanted = "" if least is None else f", perhaps because weight version {least} is awaited"
            raise GenerationError(
                f"no reply within {timeout_s:g} s{wanted}", kind=FailureKind.LOST
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            self._outage.note(error)
            raise Disconnected(f"{type(error).__name__}: {error}", kind=FailureKind.LOST) from None

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        return {
            "rid": request.rid,
            "input_ids": request.input_ids,
            "sampling_params": request.sampling.to_wire(),
            "return_logprob": True,
            **self._extra_fields,
            **request.fields,
        }

    def _headers_of(self, request: GenerationRequest) -> dict[str, str]:
        headers = self._headers | trace_headers()
        if request.affinity:
            headers = headers | {"x-affinity": request.affinity}
        if (contract := request.contract) is not NO_CONTRACT:
            if not request.fails_over:
                # It goes on in here alone, where its lag is checked.  For a lag the router would
                # read every token of it.
                contract = replace(contract, max_version_lag=None)
            headers = headers | contract.to_headers()
        return headers | {"x-token-failover": "on"} if request.fails_over else headers

    async def abort(self, rids: Sequence[str], *, prefix: str = "") -> None:
        """Best effort: callers check whether the requests have ended, and abort again."""
        if self._control.closed:
            return
        slots = asyncio.Semaphore(_ABORTS_AT_ONCE)

        async def send(order: Mapping[str, str]) -> None:
            async with slots:
                await self._post("/abort_request", order)

        orders = [{"rid": rid} for rid in rids]
        orders += [{"rid_prefix": prefix}] if prefix else []
        await asyncio.gather(*map(send, orders))

    async def order_abort(self, prefix: str) -> None:
        """``abort`` of the requests whose ids begin so, by a caller that does not abort again.

        Raises:
            GenerationError: the router or an engine did not take it.
        """

        async def order() -> tuple[aiohttp.ClientResponse, bytes]:
            async with self._control.post(
                self._url + "/abort_request",
                json={"rid_prefix": prefix},
                headers=self._control_headers,
            ) as response:
                return response, await response.read()

        try:
            response, content = await reconnecting(order)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise GenerationError(f"{type(error).__name__}: {error}") from None
        if response.status != 200:
            raise _error_of_status(response.status, content, "")

    async def load(self) -> EngineLoad | None:
        """From the router's ``/engines``, and through it from each engine."""
        try:
            router = await self._router_state()
            serving = [engine for engine in router["engines"] if engine["state"] == "serving"]
        except WRONG_FORM:  # it is no router
            return None
        loads = await asyncio.gather(*map(self._load_of, serving))
        known = [load for load in loads if load is not None]
        return EngineLoad(
            num_engines=len(serving),
            num_running=sum(load.num_running_reqs for load in known),
            num_waiting=sum(load.num_waiting_reqs for load in known),
            kv_use=max((load.kv_use for load in known if load.kv_use is not None), default=None),
            weight_version=_version_of(router.get("gate", {}), self._names),
            why_waiting=_why_waiting(router.get("gate", {})),
            logprobs=tuple(_read_rule(engine) for engine in serving if engine.get("logprobs")),
            why_closed=_why_closed(router.get("gate", {})),
        )

    async def server_metrics(self) -> Mapping[str, float]:
        """From the router's ``/engines``.  A single engine has none."""
        try:
            return dict((await self._router_state())["server_metrics"])
        except WRONG_FORM:
            return {}

    async def _router_state(self) -> Any:
        return read_json(await self._read(f"{self._url}/engines", self._control_headers))

    async def _load_of(self, engine: Mapping[str, Any]) -> Loads | None:
        try:
            kind = kind_of(engine["kind"])
            where = f"{self._url}/engines/{quote(engine['engine_id'], safe='')}/loads"
            return kind.read_loads(await self._read(where, self._control_headers))
        except WRONG_FORM:
            return None

    async def report(self, figures: Mapping[str, Any]) -> None:
        """To the router's ``/figures``.  A single engine has no such path; that is no error."""
        status, content = await self._post("/figures", figures)
        if status in (400, 413) and not self._has_refused:
            self._has_refused = True
            why = one_line(content.decode(errors="replace"), 400)
            logger.warning(
                "step %s: the server's page does not show its figures, nor others like them: %s",
                figures.get("step"),
                why,
            )

    async def _post(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Status and body of a reply; 0 if there is none."""
        try:
            async with self._control.post(
                self._url + path, json=body, headers=self._control_headers
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError):
            return 0, b""

    async def _read(self, url: str, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a reply, or empty if there is none."""
        try:
            async with self._control.get(url, headers=headers) as response:
                return await response.read() if response.status == 200 else b""
        except (aiohttp.ClientError, OSError, TimeoutError):
            return b""


class Outage:
    """For how long a router has taken no connection of any of its client's requests.

    Args:
        has_served: else its URL may be wrong, and no request is sent again.
    """

    def __init__(self, *, has_served: bool) -> None:
        self._has_served = has_served
        self._since_s: float | None = None

    def end(self) -> None:
        """The router has taken a connection."""
        self._has_served = True
        self._since_s = None

    def note(self, error: Exception) -> None:
        """A request has failed, with a connection unless this error is that there was none."""
        if not isinstance(error, aiohttp.ClientConnectorError):
            self.end()

    async def wait(self, error: Exception, num_tries: int) -> None:
        """Wait until a request is sent again, unchanged.

        Args:
            error: of the last try.
            num_tries: of this request so far.

        Raises:
            ``error``: the outage is too long, or the connection broke too often.
        """
        if not self._has_served:
            raise error
        now_s = asyncio.get_running_loop().time()
        if self._since_s is None:
            self._since_s = now_s
        if now_s >= self._since_s + _RECONNECT_S or num_tries > _MOST_CONNECTIONS:
            raise error
        await asyncio.sleep(_RECONNECT_AGAIN_S * min(num_tries, 8))


async def reconnecting(work: Callable[[], Awaitable[T]]) -> T:
    """What ``work`` returns, which may be done again when a connection was lost."""
    outage = Outage(has_served=True)
    for num_tries in itertools.count(1):
        try:
            return await work()
        except aiohttp.ClientConnectionError as error:
            outage.note(error)
            await outage.wait(error, num_tries)
    raise AssertionError


def _read_reply(content: bytes, response: aiohttp.ClientResponse) -> GenerateReply:
    engine_id = response.headers.get("x-engine-id", "")
    try:
        answer = read_json(content)
        if "error" in answer:
            text = str(answer["error"])[:500]
            refusal = GenerationError(text, kind=kind_of_refusal(text))
            raise _why_unfulfilled(content) or refusal
        if "output_ids" not in answer:
            raise KeyError("output_ids")
        reply = read_checked(answer, wants_logprobs=True)
    except UnusableReply as error:
        where = engine_id or f"at {response.url.origin()}"
        message = f"engine {where} sent an unusable reply: {error}"
        raise GenerationError(message, kind=FailureKind.LOST) from None
    except WRONG_FORM as error:
        raise GenerationError(f"unusable reply: {value_text(error, 300)}") from None
    if reply.logprob_kind is None and (kind := response.headers.get("x-logprob-kind")):
        reply = replace(reply, logprob_kind=read_kind(kind))
    # After a failover the header names only the last engine.
    return replace(reply, engine_id=engine_id) if engine_id and not reply.num_failovers else reply


async def _read_stream(response: aiohttp.ClientResponse) -> AsyncGenerator[GenerateReply, None]:
    reply: GenerateReply | None = None
    async with aclosing(sse_payloads(response.content.iter_any())) as payloads:
        async for payload in payloads:
            if payload != DONE:
                yield (reply := _read_reply(payload, response))
    if reply is None or reply.finish_reason is None:
        raise GenerationError("the stream ended before its reply", kind=FailureKind.LOST)


def _read_rule(engine: Mapping[str, Any]) -> LogprobRule:
    """What ``/engines`` has of one, without the sampling of OpenAI's routes."""
    has = engine["logprobs"]
    return LogprobRule(has["has_temperature"], has["has_penalties"], has["has_cuts"])


def _version_of(gate: Mapping[str, Any], names: Names) -> int | None:
    """The version that answers requests with these names, which have those of the last push."""
    base = gate.get("base_version", gate.get("weight_version"))
    return newest_version(resolved(names, gate.get("adapters") or {}), base)


def _why_waiting(gate: Mapping[str, Any]) -> str:
    if not gate.get("num_held"):
        return ""
    return (
        f"{gate['num_held']} requests wait at the router's gate, which is {gate['state']}: "
        f"{gate['reason']}; engines serve after a push, or after serve() if they hold the weights"
    )


def _why_closed(gate: Mapping[str, Any]) -> str:
    if gate.get("state") != "closed":
        return ""
    return (
        f"requests are turned away at the router's gate, which is closed: {gate['reason']}; they "
        "are sent again until it opens"
    )


def _why_push_needed(content: bytes) -> str:
    """Why only a push lets requests through, if a refusal of the router says so; else empty."""
    try:
        refusal = orjson.loads(content)["error"]
        version, reason = int(refusal["needs_push"]), str(refusal["reason"])
    except (KeyError, TypeError, ValueError):
        return ""
    return (
        f"the router's gate is closed, and only a push of weight version {version} or a newer one "
        f"opens it: {reason}"
    )


def _why_unfulfilled(content: bytes) -> GenerationError | None:
    """The router's refusal of a contract, or None if it is another answer."""
    try:
        error = read_json(content)["error"]
        kind, message = _UNFULFILLED[error["type"]], str(error["message"])[:500]
        version = error.get("weight_version")
    except WRONG_FORM:
        return None
    known = version if isinstance(version, int) else None
    return GenerationError(message, kind=kind, weight_version=known)


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _error_of_status(status: int, content: bytes, retry_after: str) -> GenerationError:
    if status in _UNFULFILLED_STATUS and (error := _why_unfulfilled(content)):
        return error
    text = content[:500].decode(errors="replace")
    kind = kind_of_refusal(text)
    if status in _AGAIN:
        kind = FailureKind.UNAVAILABLE
    elif status == _ABORTED:
        kind = FailureKind.ABORTED
    elif status >= 500:
        kind = FailureKind.LOST
    try:
        after_s = float(retry_after)
    except ValueError:
        after_s = 0.0
    if status == 503 and (why := _why_push_needed(content)):
        return GenerationError(why, kind=FailureKind.NEEDS_PUSH)
    if status == 503 and JUST_STARTED in text:
        return Disconnected(f"HTTP {status}: {text}", kind=kind)
    return GenerationError(f"HTTP {status}: {text}", kind=kind, retry_after_s=after_s)
