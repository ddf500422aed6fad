"""Clients that load a router from a separate process: ``python -m rollout.cli.bench.load``.

Always true: the clients share only the cores with the process that starts them; they stop when
that process closes their standard input or ends; every request is reported once, when it ends, as
a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from engines.protocol import SamplingParams
from rollout.core.errors import RolloutError
from rollout.driver.client.generation_client import GenerationError, GenerationRequest
from rollout.driver.client.http_client import HttpGenerationClient

_TOKENS_FROM, _TOKENS_TO = 5, 200
_STOP_S = 15.0
_AFTER_A_FAILURE_S = 0.2


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The requests that the clients send.

    Attributes:
        prompt_tokens: random tokens of each prompt, so that no prefix cache helps.
        max_new_tokens: of each completion; none ends earlier.
        timeout_s: for one completion, including the wait at the gate.
        key: client key of the router; empty for none.
    """

    url: str
    num_clients: int
    prompt_tokens: int
    max_new_tokens: int
    timeout_s: float
    key: str = ""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of one request.  Times are of ``time.monotonic``, which all processes share.

    Attributes:
        was_aborted: a pause ended it, and it returned the tokens so far.
        failure: the error; empty if there was a reply.
    """

    began_s: float
    ended_s: float
    num_tokens: int = 0
    was_aborted: bool = False
    failure: str = ""


def figures(ended: Sequence[RequestResult], from_s: float, to_s: float) -> dict[str, Any]:
    """Totals of the requests that ended between these times, and errors of all."""
    inside = [request for request in ended if from_s <= request.ended_s < to_s]
    answered = [request for request in inside if not request.failure]
    latencies = sorted(
        request.ended_s - request.began_s for request in answered if not request.was_aborted
    )
    elapsed_s = to_s - from_s
    return {
        "seconds": elapsed_s,
        "num_done": len(latencies),
        "num_aborted": len(answered) - len(latencies),
        "num_failed": len(inside) - len(answered),
        "requests_per_s": len(latencies) / elapsed_s,
        "tokens_per_s": sum(request.num_tokens for request in answered) / elapsed_s,
        "latency_p50_s": statistics.median(latencies) if latencies else None,
        "latency_p99_s": latencies[math.ceil(0.99 * len(latencies)) - 1] if latencies else None,
        "errors": sorted({request.failure for request in ended if request.failure})[:5],
    }


class LoadGenerator:
    """Starts the clients in a separate process; a context manager that stops them."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._ended: list[RequestResult] = []
        self._changed = threading.Condition()
        self._is_over = False

    def __enter__(self) -> LoadGenerator:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout.cli.bench.load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C goes to the owner, which then stops the clients
        )
        assert self._process.stdin is not None
        # Not as an argument: every user of the machine can read those, and the plan contains a key.
        self._process.stdin.write(json.dumps(asdict(self._plan)).encode() + b"\n")
        self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name="load", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def wait_for(self, num_more: int, timeout_s: float) -> None:
        """Wait until ``num_more`` more requests have ended, successful or not.

        Raises:
            RolloutError: fewer ended within ``timeout_s``, or the clients have ended.
        """
        with self._changed:
            wanted = len(self._ended) + num_more
            self._changed.wait_for(
                lambda: self._is_over or len(self._ended) >= wanted, timeout=timeout_s
            )
            missing = wanted - len(self._ended)
        if missing > 0:
            reason = "the clients have ended" if self._is_over else f"within {timeout_s:g} s"
            raise RolloutError(
                f"{self._plan.url}: {num_more - missing} of {num_more} requests ended: {reason}"
            )

    def ended(self) -> list[RequestResult]:
        """All requests that have ended so far."""
        with self._changed:
            return list(self._ended)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            result = RequestResult(*json.loads(line))
            with self._changed:
                self._ended.append(result)
                self._changed.notify_all()
        self._process.stdout.close()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


async def _run(plan: LoadPlan) -> None:
    client = HttpGenerationClient(plan.url, timeout_s=plan.timeout_s, key=plan.key)
    users = [asyncio.create_task(_user(plan, client, at)) for at in range(plan.num_clients)]
    try:
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
        await client.close()


async def _user(plan: LoadPlan, client: HttpGenerationClient, number: int) -> None:
    clock = asyncio.get_running_loop().time
    rng = random.Random(number)
    sampling = SamplingParams(max_new_tokens=plan.max_new_tokens, ignore_eos=True)
    num_sent = 0
    while True:
        num_sent += 1
        ids = [rng.randrange(_TOKENS_FROM, _TOKENS_TO) for _ in range(plan.prompt_tokens)]
        began_s = clock()
        try:
            reply = await client.generate(
                GenerationRequest(f"bench-{number:05d}-{num_sent:08d}", ids, sampling)
            )
        except GenerationError as error:
            _report(RequestResult(began_s, clock(), failure=str(error)))
            await asyncio.sleep(max(error.retry_after_s, _AFTER_A_FAILURE_S))
            continue
        was_aborted = reply.finish_reason is not None and reply.finish_reason.kind == "abort"
        _report(RequestResult(began_s, clock(), len(reply.output_ids), was_aborted))


def _report(result: RequestResult) -> None:
    print(json.dumps(astuple(result)), flush=True)


if __name__ == "__main__":
    asyncio.run(_run(LoadPlan(**json.loads(sys.stdin.buffer.readline()))))
