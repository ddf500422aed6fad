"""``python -m benchmarks.timeline``: CPU of recording the timeline, counted and measured live.

Counted: CPU of one span times the spans of a step.  Live: CPU of this process for the same steps
and the same requests, with recording on and off in turns.  The engines are fakes that reply at
once, and a step has few requests, so the share of recording is larger here than in training, where
a step takes ten seconds and more.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import machine, parse_arguments, publish
from benchmarks.timeline import live
from rollout.observability.timeline.recorder import Timeline
from rollout.observability.timeline.span import Kind
from rollout.observability.timeline.span_file import create_timeline
from tests.support.builders import make_server, push

STEP_S = 10.0
SHARE = f"share of one core, a step of {STEP_S:g} s (%)"


def span_cpu_s(num: int, timeline: Timeline) -> float:
    """CPU seconds of one engine span with one call in it, writing included."""
    began_s = time.process_time()
    for _ in range(num):
        with (
            timeline.span(Kind.ENGINE, "pause_generation", engine_id="main-0", budget_s=60.0),
            timeline.span(Kind.CALL, "pause_generation", engine_id="main-0", budget_s=60.0),
        ):
            pass
    asyncio.run(timeline.aclose())
    return (time.process_time() - began_s) / num


async def num_spans_of_a_step(folder: Path, num_engines: int) -> int:
    """Number of spans that one offload and onload records."""
    bench = make_server(folder, {"main": {"num_engines": num_engines}})
    await bench.server.start()
    before = await bench.server.observe({})
    cursors = {source: excerpt.cursor for source, excerpt in before.timelines.items()}
    await bench.server.offload()
    await bench.server.push(push(1))
    after = await bench.server.observe(cursors)
    await bench.server.stop()
    return sum(len(excerpt.spans) for excerpt in after.timelines.values())


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    num = arguments.by_size(smoke=100, quick=2_000, full=50_000)
    nums_counted = arguments.by_size(smoke=(2,), quick=(2, 16), full=(2, 64, 256))
    nums_live = arguments.by_size(smoke=(2,), quick=(8,), full=(8, 64))
    num_pairs, num_requests = arguments.by_size(smoke=(2, 10), quick=(10, 100), full=(100, 1000))
    result: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        in_memory_s = span_cpu_s(num, Timeline("policy/main"))
        written_s = span_cpu_s(num, create_timeline(folder, "policy/main"))
        result["span_with_call_us"] = {
            "in memory": in_memory_s * 1e6,
            "and in a file": written_s * 1e6,
        }
        for num_engines in nums_counted:
            num_spans = asyncio.run(num_spans_of_a_step(Path(folder), num_engines))
            # These fakes get no HTTP calls; the estimate counts one call per span.
            cpu_s = num_spans * written_s
            result[f"counted, {num_engines} engines"] = {
                "spans in a step, each with a call in it": num_spans,
                "cpu_ms": cpu_s * 1e3,
                SHARE: 100 * cpu_s / STEP_S,
            }
        for num_engines in nums_live:
            log_dir = Path(folder) / f"live-{num_engines}"
            figures = asyncio.run(live.measure(num_engines, num_pairs, num_requests, log_dir))
            result[f"live, {num_engines} engines"] = {
                "requests in a step": num_requests,
                **figures,
                SHARE: figures["cpu_ms of recording"] / 10 / STEP_S,
            }
    publish(result, as_json=arguments.as_json, title="CPU of recording")


if __name__ == "__main__":
    main()
