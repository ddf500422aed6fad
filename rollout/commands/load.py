"""Clients that keep a router busy, in a process of their own: ``python -m rollout.commands.load``.

Always true: whoever drives them is not slowed by them but for the cores they share; they end
when their owner closes their standard input, also by dying; every request is told once, when it
ends, as a line of JSON.
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
from dataclasses import asdict, dataclass
from typing import Any

from engines.protocol import SamplingParams
from rollout.driver.door import Ask, DoorError
from rollout.driver.http_door import HttpDoor
from rollout.errors import RolloutError

_TOKENS_FROM, _TOKENS_TO = 5, 200
_STOP_S = 15.0
_AFTER_A_FAILURE_S = 0.2


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What the clients ask for.

    Attributes:
        prompt_tokens: random ones, so that no prefix cache helps.
        max_new_tokens: of each completion, which does not end sooner.
        timeout_s: for one completion, waiting at the gate included.
    """

    url: str
    num_clients: int
    prompt_tokens: int
    max_new_tokens: int
    timeout_s: float
    key: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that has ended.  Times are of ``time.monotonic``, which all processes share.

    Attributes:
        num_tokens: that were made for it.
        was_aborted: a pause ended it; what it had by then was its answer.
        failure: why there was no answer; empty if there was one.
    """

    began_s: float
    ended_s: float
    num_tokens: int = 0
    was_aborted: bool = False
    failure: str = ""


def figures(ended: Sequence[Ended], from_s: float, to_s: float) -> dict[str, Any]:
    """What the requests that ended between these moments add up to."""
    inside = [one for one in ended if from_s <= one.ended_s < to_s]
    answered = [one for one in inside if not one.failure]
    whole = sorted(one.ended_s - one.began_s for one in answered if not one.was_aborted)
    elapsed_s = to_s - from_s
    return {
        "seconds": elapsed_s,
        "num_done": len(whole),
        "num_aborted": len(answered) - len(whole),
        "num_failed": len(inside) - len(answered),
        "requests_per_s": len(whole) / elapsed_s,
        "tokens_per_s": sum(one.num_tokens for one in answered) / elapsed_s,
        "latency_p50_s": statistics.median(whole) if whole else None,
        "latency_p99_s": whole[math.ceil(0.99 * len(whole)) - 1] if whole else None,
        "errors": sorted({one.failure for one in inside if one.failure})[:5],
    }


class Load:
    """The clients, from the process that owns them; a context manager that ends them."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._ended: list[Ended] = []
        self._changed = threading.Condition()
        self._is_over = False

    def __enter__(self) -> Load:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rollout.commands.load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the owner, which then lets go of the clients
        )
        assert self._process.stdin is not None
        # Not as an argument: everybody on the machine can read those, and there is a key in it.
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
        """Until so many more requests have ended, however they did.

        Raises:
            RolloutError: they have not within ``timeout_s``, or the clients are gone.
        """
        with self._changed:
            wanted = len(self._ended) + num_more
            self._changed.wait_for(
                lambda: self._is_over or len(self._ended) >= wanted, timeout=timeout_s
            )
            lacking = wanted - len(self._ended)
        if lacking > 0:
            why = "the clients have ended" if self._is_over else f"within {timeout_s:g} s"
            raise RolloutError(
                f"{self._plan.url}: {num_more - lacking} of {num_more} requests ended: {why}"
            )

    def ended(self) -> list[Ended]:
        """All requests that have ended so far."""
        with self._changed:
            return list(self._ended)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = Ended(*json.loads(line))
            with self._changed:
                self._ended.append(told)
                self._changed.notify_all()
        self._process.stdout.close()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


async def _run(plan: LoadPlan) -> None:
    door = HttpDoor(plan.url, timeout_s=plan.timeout_s, key=plan.key)
    clients = [asyncio.create_task(_client(plan, door, at)) for at in range(plan.num_clients)]
    try:
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await door.close()


async def _client(plan: LoadPlan, door: HttpDoor, number: int) -> None:
    clock = asyncio.get_running_loop().time
    chance = random.Random(number)
    sampling = SamplingParams(max_new_tokens=plan.max_new_tokens, ignore_eos=True)
    num_asked = 0
    while True:
        num_asked += 1
        ids = [chance.randrange(_TOKENS_FROM, _TOKENS_TO) for _ in range(plan.prompt_tokens)]
        began_s = clock()
        try:
            reply = await door.generate(Ask(f"bench-{number:05d}-{num_asked:08d}", ids, sampling))
        except DoorError as error:
            _tell(Ended(began_s, clock(), failure=str(error)))
            await asyncio.sleep(max(error.retry_after_s, _AFTER_A_FAILURE_S))
            continue
        was_aborted = reply.finish_reason is not None and reply.finish_reason.kind == "abort"
        _tell(Ended(began_s, clock(), len(reply.output_ids), was_aborted))


def _tell(one: Ended) -> None:
    print(json.dumps([one.began_s, one.ended_s, one.num_tokens, one.was_aborted, one.failure]))
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_run(LoadPlan(**json.loads(sys.stdin.buffer.readline()))))
