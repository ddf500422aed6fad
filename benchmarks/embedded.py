"""The embedded engine against plain ``model.generate``: tokens per second, same model and machine.

Both run on one torch thread with greedy sampling.  The engine gets requests over HTTP, one at a
time and sixteen at once; ``generate`` gets sixteen prompts as one batch, which is its best case:
all start and end together.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.report import machine, parse_arguments, publish
from engines.launch import EngineSpec, LocalLauncher
from engines.protocol import NO_ACCESS
from rollout.testing.tiny_model import make_tiny_model

PROMPT_TOKENS = 32
CONCURRENT = 16
MODEL = {"hidden_size": 256, "num_layers": 4}


async def measure(model_path: Path, *, new_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians of alternating runs, after one of each to warm up."""
    spec = EngineSpec(
        engine_id="benchmark",
        kind="embedded",
        model_path=str(model_path),
        log_path=str(model_path.parent / "engine.log"),
        access=NO_ACCESS,
    )
    engine = await LocalLauncher().launch(spec)
    figures: dict[str, list[float]] = {}
    try:
        async with aiohttp.ClientSession(base_url=engine.endpoint.url) as http:
            generate = PlainGenerate(model_path)
            for _ in range(repeats + 1):
                for name, count in (
                    ("tokens_per_s_1", 1),
                    (f"tokens_per_s_{CONCURRENT}", CONCURRENT),
                ):
                    figures.setdefault(name, []).append(await tokens_per_s(http, count, new_tokens))
                figures.setdefault(f"generate_tokens_per_s_{CONCURRENT}", []).append(
                    await asyncio.to_thread(generate, CONCURRENT, new_tokens)
                )
    finally:
        await engine.stop(10.0)
    return {name: statistics.median(values[1:]) for name, values in figures.items()}


def prompts(count: int) -> list[list[int]]:
    """New random prompts, so that no token comes from a prefix cache."""
    return [[random.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def tokens_per_s(http: aiohttp.ClientSession, count: int, new_tokens: int) -> float:
    """Tokens per second of ``count`` requests at once."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}

    async def generate(ids: list[int]) -> int:
        body = {"input_ids": ids, "sampling_params": sampling}
        async with http.post("/generate", json=body) as response:
            response.raise_for_status()
            return len((await response.json())["output_ids"])

    began = time.perf_counter()
    tokens = await asyncio.gather(*(generate(ids) for ids in prompts(count)))
    return sum(tokens) / (time.perf_counter() - began)


class PlainGenerate:
    """``model.generate`` in this process."""

    def __init__(self, model_path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path)

    def __call__(self, count: int, new_tokens: int) -> float:
        """Tokens per second of one batch of ``count`` prompts."""
        ids = self._torch.tensor(prompts(count))
        began = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
        tokens = output[:, PROMPT_TOKENS:].numel()
        return float(tokens / (time.perf_counter() - began))


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    new_tokens, repeats = arguments.by_size(smoke=(4, 1), quick=(32, 2), full=(256, 5))
    size = arguments.by_size(smoke={}, quick=MODEL, full=MODEL)
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_tiny_model(Path(folder) / "model", **size)
        figures = asyncio.run(measure(model_path, new_tokens=new_tokens, repeats=repeats))
    result = {**figures, "machine": machine("torch", "transformers"), "repeats": repeats}
    publish(result, as_json=arguments.as_json, title="embedded engine, tokens per second")


if __name__ == "__main__":
    main()
