"""The door over HTTP: ``/generate`` of a router, or of one engine.

aiohttp, not httpx: thousands of small requests a second go through here, and httpx costs about
eight times the CPU of aiohttp for each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from engines.protocol import FinishReason, GenerateReply, VersionSpan
from rollout.driver.door import Ask, DoorError, Load, Trouble

_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_ABORTS_AT_ONCE = 32
_JSON = {"content-type": "application/json"}
_AGAIN = frozenset({429, 503})
_ABORTED = 499


class HttpDoor:
    """One per event loop; close it.

    Args:
        url: base URL of a router or of one engine.
        timeout_s: for one whole completion, time parked at the gate included.
        lora_path: name of the LoRA adapter that all completions are made with; None: the base.
        key: the router's ``client_key``; empty for none.
        control_key: the router's, for aborts, loads and figures; empty: ``key``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        lora_path: str | None = None,
        key: str = "",
        control_key: str = "",
    ) -> None:
        self._more = {} if lora_path is None else {"lora_path": lora_path}
        self._headers = _JSON | _bearer(key)
        # Not of the whole session: it also asks engines, whose business no key is.
        self._steering = _bearer(control_key or key)
        self._url = url.rstrip("/")
        self._generate_url = self._url + "/generate"
        self._timeout_s = timeout_s
        # Whoever asks has a slot of the limiter, so no second limit is set here.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        # Of its own, so that no abort waits behind generations.
        self._control = aiohttp.ClientSession(timeout=_CONTROL_TIMEOUT)

    async def close(self) -> None:
        await self._session.close()
        await self._control.close()

    async def generate(self, ask: Ask) -> GenerateReply:
        """One completion.

        Raises:
            DoorError: there is no reply.
        """
        body = {
            "rid": ask.rid,
            "input_ids": ask.input_ids,
            "sampling_params": ask.sampling.to_wire(),
            "return_logprob": True,
            **self._more,
        }
        if self._session.closed:
            raise DoorError("the driver was closed")
        headers = self._headers
        if ask.session_id:
            headers = headers | {"x-session-id": ask.session_id}
        try:
            async with self._session.post(
                self._generate_url, data=json.dumps(body).encode(), headers=headers
            ) as response:
                answer = await response.read()
                status, after = response.status, response.headers.get("retry-after", "")
        except TimeoutError:
            raise DoorError(
                f"no answer within {self._timeout_s:g} s", trouble=Trouble.LOST
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise DoorError(f"{type(error).__name__}: {error}", trouble=Trouble.LOST) from None
        if status != 200:
            raise _refusal(status, answer, after)
        try:
            return read_reply(json.loads(answer))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DoorError(f"unusable answer: {error!r}") from None

    async def abort(self, rids: Sequence[str]) -> None:
        """Best effort: whoever aborts looks whether the asks have ended, and aborts again."""
        if self._control.closed:
            return
        slots = asyncio.Semaphore(_ABORTS_AT_ONCE)

        async def one(rid: str) -> None:
            async with slots:
                try:
                    async with self._control.post(
                        f"{self._url}/abort_request", json={"rid": rid}, headers=self._steering
                    ) as response:
                        await response.read()
                except (aiohttp.ClientError, OSError, TimeoutError):
                    return

        await asyncio.gather(*(one(rid) for rid in rids))

    async def load(self) -> Load | None:
        """From the router's ``/engines`` and, where they can be reached, ``/v1/loads`` of each."""
        told = await self._read(f"{self._url}/engines", self._steering)
        if not isinstance(told, Mapping) or "engines" not in told:
            return None
        serving = [one for one in told["engines"] if one.get("state") == "serving"]
        urls = [f"{one['url']}/v1/loads" for one in serving]
        loads = await asyncio.gather(*(self._read(url) for url in urls))
        ranks = [
            rank
            for load in loads
            if isinstance(load, Mapping)
            for rank in load.get("loads", ())
            if isinstance(rank, Mapping)
        ]
        use = [float(rank["token_usage"]) for rank in ranks if "token_usage" in rank]
        return Load(
            num_engines=len(serving),
            num_running=sum(int(rank.get("num_running_reqs", 0)) for rank in ranks),
            num_waiting=sum(int(rank.get("num_waiting_reqs", 0)) for rank in ranks),
            kv_use=max(use, default=None),
            weight_version=told.get("gate", {}).get("weight_version"),
        )

    async def report(self, told: Mapping[str, Any]) -> None:
        """To the router's ``/figures``; a single engine has none, and that is no error."""
        try:
            async with self._control.post(
                f"{self._url}/figures", json=told, headers=self._steering
            ) as response:
                await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError):
            return

    async def _read(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        try:
            async with self._control.get(url, headers=headers) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return None


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _refusal(status: int, answer: bytes, retry_after: str) -> DoorError:
    trouble = Trouble.REFUSED
    if status in _AGAIN:
        trouble = Trouble.UNAVAILABLE
    elif status == _ABORTED:
        trouble = Trouble.ABORTED
    elif status >= 500:
        trouble = Trouble.LOST
    try:
        after_s = float(retry_after)
    except ValueError:
        after_s = 0.0
    text = answer[:500].decode(errors="replace")
    return DoorError(f"HTTP {status}: {text}", trouble=trouble, retry_after_s=after_s)


def read_reply(answer: Mapping[str, Any]) -> GenerateReply:
    """SGLang's answer to ``/generate`` as a value.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    version = meta.get("weight_version")
    return GenerateReply(
        rid=meta.get("id", ""),
        text=answer["text"],
        output_ids=tuple(answer["output_ids"]),
        output_logprobs=tuple([entry[0] for entry in meta.get("output_token_logprobs") or ()]),
        finish_reason=FinishReason(
            reason["type"], reason.get("matched"), reason.get("message") or ""
        ),
        weight_version=None if version is None else str(version),
        weight_versions=tuple(
            VersionSpan(str(span["version"]), span["start"], span["end"])
            for span in meta.get("weight_versions") or ()
        ),
    )
