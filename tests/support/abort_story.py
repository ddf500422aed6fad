"""What an abort ends over one kind of real engine, and what it leaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx

import rollout
from rollout.runtime.handle import ServerHandle
from tests.support.event_lines import lines_of
from tests.support.processes import wait_until

LONG = rollout.SamplingParams(max_new_tokens=3000, temperature=0.0, ignore_eos=True)
_SAMPLING = {"max_new_tokens": 3000, "temperature": 0.0, "ignore_eos": True}
SOON_S = 3.0
"""An abort takes a tenth of that on a quiet machine; a request that is not aborted, ten times."""


class Client:
    """A client over HTTP with an id of its own, whose reply is read in a thread."""

    def __init__(self, url: str, rid: str, **more: Any) -> None:
        self._rid = rid
        body = {"input_ids": [1, 2, 3], "rid": rid, "sampling_params": _SAMPLING, **more}
        self._body = {"stream": True, **body}
        self._url = url
        self.status = 0
        self.num_tokens = 0
        self.finish: Any = None
        self.error: httpx.HTTPError | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        of = f"{self._rid}: {self.num_tokens} tokens, status {self.status}"
        return f"{of}, end {self.finish}, error {self.error!r}, running {self.is_running}"

    def _read(self) -> None:
        headers = {"x-token-failover": "on"}
        try:
            with httpx.stream(
                "POST", f"{self._url}/generate", json=self._body, headers=headers, timeout=300
            ) as response:
                self.status = response.status_code
                for line in lines_of(response):
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        self.num_tokens = len(event.get("output_ids") or [])
                        self.finish = (event.get("meta_info") or {}).get("finish_reason")
        except httpx.HTTPError as error:
            self.error = error

    def reaches(self, num: int) -> bool:
        return wait_until(lambda: self.num_tokens >= num or not self._thread.is_alive(), 60)

    def ends_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def check_has_begun(self) -> None:
        """It has tokens, and more to come."""
        began_s = time.monotonic()
        reached = self.reaches(5)
        took_s = time.monotonic() - began_s
        assert reached, f"not five tokens after {took_s:.1f} s: {self!r}"
        assert self.is_running, f"over before its abort: {self!r}"

    def check_ends_aborted(self) -> None:
        began_s = time.monotonic()
        has_ended = self.ends_within(SOON_S)
        took_s = time.monotonic() - began_s
        assert has_ended, f"not over {took_s:.1f} s after its abort: {self!r}"
        kind = self.finish and self.finish["type"]
        assert kind == "abort", f"over after {took_s:.1f} s, not as aborted: {self!r}"

    def check_goes_on(self, after: str) -> None:
        """It was not aborted.  On a busy machine what comes before can take as long as a reply."""
        has_length = self.finish is not None and self.finish["type"] == "length"
        assert self.is_running or has_length, f"ended by {after}: {self!r}"


def order(url: str, **body: Any) -> None:
    reply = httpx.post(f"{url}/abort_request", json=body, timeout=30)
    assert reply.status_code == 200, reply.text


def check_aborts_of_calls(policy: ServerHandle) -> None:
    """``policy.abort`` ends the replies of one call, and of no other."""
    call = policy.generate([[1, 2], [3, 4]], LONG, request_id="m-1")
    stream = policy.stream([5, 6], LONG, request_id="m-10")
    parts = iter(stream)
    assert len(next(parts).output_ids) >= 1
    began_s = time.monotonic()
    policy.abort("m-1").result(60)
    replies: Sequence[Any] = call.result(60)
    assert time.monotonic() - began_s < SOON_S
    for reply in replies:
        assert reply.finish_reason.kind == "abort"
        assert len(reply.output_ids) < LONG.max_new_tokens
    so_far = len(next(parts).output_ids)
    assert any(len(part.output_ids) > so_far for part in parts)
    policy.abort("m-10").result(60)
    *_, last = parts
    assert last.finish_reason is not None
    assert last.finish_reason.kind == "abort"


def check_aborts_of_ids(policy: ServerHandle, tensors: Any, version: int) -> None:
    """An id names one request: those that begin so go on, also over a push behind the abort."""
    url = policy.url
    clients = {rid: Client(url, rid) for rid in ("r-1", "r-10", "r")}
    for client in clients.values():
        client.check_has_begun()
    order(url, rid="r-1")
    clients["r-1"].check_ends_aborted()
    for rid in ("r-10", "r"):
        clients[rid].check_goes_on("the abort of r-1")
    policy.push(tensors, version).result(120)
    for rid in ("r-10", "r"):
        assert clients[rid].reaches(clients[rid].num_tokens + 20), clients[rid]
        clients[rid].check_goes_on("the push behind the abort of r-1")
    several = [Client(url, rid) for rid in ("s-1", "s-2")]
    for client in several:
        client.check_has_begun()
    order(url, rid_prefix="s-")
    for client in several:
        client.check_ends_aborted()
    for rid in ("r-10", "r"):
        clients[rid].check_goes_on("the abort of s-")
    order(url, rid_prefix="r-")
    assert clients["r-10"].ends_within(SOON_S), clients["r-10"]
    clients["r"].check_goes_on("the abort of r-")
    order(url, rid="r")
    assert clients["r"].ends_within(SOON_S), clients["r"]


def check_an_abort_of_several_completions(policy: ServerHandle) -> None:
    """Engines give completions of one request ids of their own, and end them all the same."""
    client = Client(policy.url, "several", sampling_params={**_SAMPLING, "n": 2})
    client.check_has_begun()
    order(policy.url, rid="several")
    assert client.ends_within(SOON_S), client
    assert client.num_tokens < _SAMPLING["max_new_tokens"], client
