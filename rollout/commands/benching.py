"""``rollout bench``: what a router gives, from outside."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from engines.protocol import SamplingParams
from rollout.commands.output import AsJson, console, print_json
from rollout.driver.door import Ask, DoorError
from rollout.driver.http_door import HttpDoor
from rollout.errors import RolloutError

_TOKENS_FROM, _TOKENS_TO = 5, 200


def bench(
    url: Annotated[str, typer.Argument(help="Base URL of a router, or of one engine.")],
    requests: Annotated[int, typer.Option(min=1, help="How many completions.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="How many at the same time.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each completion.")] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds for one completion.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Send completions to a router, and say how many tokens a second came, and how late.

    Prompts are random tokens, so that no prefix cache helps.
    """
    told = asyncio.run(_bench(url, requests, concurrency, prompt_tokens, max_new_tokens, timeout))
    if told["num_done"] == 0:
        raise RolloutError(f"no completion came: {told['errors'][0]}")
    if as_json:
        print_json(told)
        return
    table = Table("figure", "value")
    for name, value in told.items():
        if name != "errors":
            table.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console().print(table)
    for error in told["errors"][:3]:
        console().print(f"[red]{error}[/red]")


async def _bench(
    url: str, num: int, concurrency: int, prompt_tokens: int, max_new_tokens: int, timeout_s: float
) -> dict[str, Any]:
    door = HttpDoor(url, timeout_s=timeout_s)
    limit = asyncio.Semaphore(concurrency)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    took_s: list[float] = []
    errors: list[str] = []
    num_tokens = 0

    async def one(number: int) -> None:
        nonlocal num_tokens
        chance = random.Random(number)
        ids = [chance.randrange(_TOKENS_FROM, _TOKENS_TO) for _ in range(prompt_tokens)]
        async with limit:
            began_s = time.perf_counter()
            try:
                reply = await door.generate(Ask(f"bench-{number:08d}", ids, sampling))
            except DoorError as error:
                errors.append(str(error))
                return
            took_s.append(time.perf_counter() - began_s)
            num_tokens += len(reply.output_ids)

    began_s = time.perf_counter()
    try:
        await asyncio.gather(*(one(number) for number in range(num)))
    finally:
        await door.close()
    elapsed_s = time.perf_counter() - began_s
    took_s.sort()
    return {
        "num_done": len(took_s),
        "num_failed": len(errors),
        "seconds": elapsed_s,
        "tokens_per_s": num_tokens / elapsed_s,
        "requests_per_s": len(took_s) / elapsed_s,
        "latency_median_s": statistics.median(took_s) if took_s else 0.0,
        "latency_p99_s": took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))] if took_s else 0.0,
        "errors": sorted(set(errors)),
    }
