"""CPU of driver and router for a request, with and without the driver's journal.

Fake engines in processes of their own stream each token; driver and router are in this process, so
its CPU time is that of both.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import rollout
from tests.support.builders import write_checkpoint

NUM_TOKENS, IN_FLIGHT = 256, 64


def measure(folder: Path, num_steps: int, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """CPU milliseconds per request of so many tokens, 64 in flight, and bytes on disk."""
    result: dict[str, Any] = {}
    for name in ("plain", "journal"):
        place = folder / name
        place.mkdir(parents=True)
        result[f"{name}_cpu_ms"] = _cpu_ms(place, num_steps, num_tokens, name == "journal")
    sizes = [path.stat().st_size for path in folder.glob("journal/journal/*/*.jsonl")]
    result["journal_bytes"] = sum(sizes) / ((num_steps + 1) * IN_FLIGHT)
    return result


def _cpu_ms(folder: Path, num_steps: int, num_tokens: int, has_journal: bool) -> float:
    engine = {"kind": "fake", "gpus": 0, "options": {"token-s": 0.02}}
    policy = {
        "model_path": write_checkpoint(folder),
        "groups": {"main": {"num_engines": 2, "needs_offload": False, "engine": engine}},
        "weights": {"update": "frozen"},
    }
    config = rollout.RolloutConfig.from_dict(
        {"log_dir": str(folder), "servers": {"policy": policy}}
    )
    sampling = rollout.SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    batch: dict[str, Any] = {"num_groups": IN_FLIGHT // 8, "group_size": 8, "sampling": sampling}
    data = rollout.PromptData([{"input_ids": list(range(1, 513))}])
    with (
        rollout.launch(config, backend="local") as deployment,
        rollout.Driver(
            deployment["policy"].url, journal=folder / "journal" if has_journal else None
        ) as driver,
    ):
        driver.rollout(0, data, **batch).result(300)  # which opens the connections
        began_s = time.process_time()
        for step in range(1, num_steps + 1):
            driver.rollout(step, data, **batch).result(300)
        return 1000 * (time.process_time() - began_s) / (num_steps * IN_FLIGHT)
