"""The embedded engine beside transformers' ``generate_batch`` and llama.cpp's server.

The same random Llama model in float32, greedy, one thread each, one request at a time and 32 at
once.  The engine and llama.cpp get requests over HTTP; ``generate_batch``, transformers' continuous
batching, gets lists in its own process.  In turns; medians.  ``boot_cpu_s`` is the CPU of a server,
user and system, from exec until it answers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.embedded.servers import Server, embedded, install_llama_cpp, llama_cpp
from benchmarks.report import machine, parse_arguments, publish
from rollout.testing.tiny_model import make_tiny_model

PROMPT_TOKENS = 32
COUNTS = (1, 32)
MODEL = {"hidden_size": 256, "num_layers": 4}

Generate = Callable[[list[list[int]], int], Awaitable[int]]
"""Takes prompts and the number of new tokens of each; the tokens of all."""


async def measure(
    model: Path, *, new_tokens: int, repeats: int, python: Path | None
) -> dict[str, Any]:
    """Medians of alternating runs, after one of each to warm up.

    Args:
        python: has llama.cpp; None leaves it out.
    """
    boots = boot_cpu(model, repeats, python)
    figures: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        servers = {"embedded": stack.enter_context(embedded(model))}
        if python is not None:
            servers["llama_cpp"] = stack.enter_context(llama_cpp(python, model, COUNTS[-1]))
        http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600))
        async with http:
            batches = GenerateBatch(model)
            ways: dict[str, tuple[Generate, Callable[[], float]]] = {
                "generate_batch": (batches.generate, time.process_time)
            }
            for name, server in servers.items():
                ways[name] = requests_of(http, server), server.cpu_s
            for _ in range(repeats + 1):
                for name, (generate, cpu_s) in ways.items():
                    for count in COUNTS:
                        row = figures.setdefault(name, {})
                        before, began = cpu_s(), time.perf_counter()
                        tokens = await generate(prompts(count), new_tokens)
                        seconds, cpu = time.perf_counter() - began, cpu_s() - before
                        row.setdefault(f"tokens_per_s_{count}", []).append(tokens / seconds)
                        row.setdefault(f"cpu_ms_per_token_{count}", []).append(1e3 * cpu / tokens)
    result = {
        name: {what: statistics.median(values[1:]) for what, values in of_name.items()}
        for name, of_name in figures.items()
    }
    for name, boot_s in boots.items():
        result[name]["boot_cpu_s"] = statistics.median(boot_s)
    return result


def boot_cpu(model: Path, repeats: int, python: Path | None) -> dict[str, list[float]]:
    """CPU of each boot of the two servers, after one of each to warm up."""
    boots: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        with embedded(model) as server:
            boots.setdefault("embedded", []).append(server.boot_cpu_s)
        if python is not None:
            with llama_cpp(python, model, COUNTS[-1]) as server:
                boots.setdefault("llama_cpp", []).append(server.boot_cpu_s)
    return {name: seconds[1:] for name, seconds in boots.items()}


def prompts(count: int) -> list[list[int]]:
    """New random prompts, so that no token comes from a prefix cache."""
    return [[random.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def requests_of(http: aiohttp.ClientSession, server: Server) -> Generate:
    async def generate(prompts: list[list[int]], new_tokens: int) -> int:
        tasks = (server.generate(http, ids, new_tokens) for ids in prompts)
        return sum(await asyncio.gather(*tasks))

    return generate


class GenerateBatch:
    """``model.generate_batch`` in this process."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
        from transformers.utils import logging as quiet_logging

        quiet: Any = quiet_logging
        quiet.set_verbosity_error()
        quiet.disable_progress_bar()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        self._config: Any = GenerationConfig
        # Its own choice is most of the machine's memory.
        self._batching: Any = ContinuousBatchingConfig(
            page_size=256, num_blocks=64, max_batch_tokens=2048
        )
        self._model: Any = AutoModelForCausalLM.from_pretrained(model)

    async def generate(self, prompts: list[list[int]], new_tokens: int) -> int:
        config = self._config(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
        replies = await asyncio.to_thread(
            self._model.generate_batch,
            prompts,
            generation_config=config,
            continuous_batching_config=self._batching,
            persistent_manager=True,
        )
        return sum(len(reply.generated_tokens) for reply in replies.values())


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    new_tokens, repeats = arguments.by_size(smoke=(4, 1), quick=(32, 2), full=(256, 5))
    size: dict[str, Any] = arguments.by_size(smoke={}, quick=MODEL, full=MODEL)
    python = "left out of the smallest size" if arguments.size == "smoke" else install_llama_cpp()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", **size)
        named = python if isinstance(python, Path) else None
        result = asyncio.run(measure(model, new_tokens=new_tokens, repeats=repeats, python=named))
    if isinstance(python, str):
        result["llama_cpp"] = {"why_not": python}
    result |= {"machine": machine("torch", "transformers"), "repeats": repeats}
    publish(result, as_json=arguments.as_json, title="embedded engine and its peers")


if __name__ == "__main__":
    main()
