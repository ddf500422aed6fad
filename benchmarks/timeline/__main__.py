"""``python -m benchmarks.timeline``: what recording costs, counted and measured live.

Counted: CPU of a span, times the spans of a step.  Live: CPU of our process for the same steps and
the same requests, with recording on and off in turns.  The engines are fakes that answer at once,
and a step here has few requests, so recording weighs more than it ever does in training, where a
step lasts ten seconds and more.
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
from rollout.timeline.lines import recorded_in
from rollout.timeline.recorder import Timeline
from rollout.timeline.span import Kind
from tests.support.builders import make_server, push

STEP_S = 10.0
SHARE = f"share of one core, a step of {STEP_S:g} s (%)"


def cost_of_a_span(num: int, timeline: Timeline) -> float:
    """Seconds of CPU, writing included, for one engine span with one call in it."""
    began_s = time.process_time()
    for _ in range(num):
        with (
            timeline.span(Kind.ENGINE, "pause", engine_id="main-0", budget_s=60.0),
            timeline.span(Kind.CALL, "pause_generation", engine_id="main-0", budget_s=60.0),
        ):
            pass
    asyncio.run(timeline.aclose())
    return (time.process_time() - began_s) / num


async def spans_of_a_step(folder: Path, num_engines: int) -> int:
    """How many spans one offload and onload records."""
    bench = make_server(folder, {"main": {"num_engines": num_engines}})
    await bench.server.start()
    before = await bench.server.observe({})
    cursors = {source: one.cursor for source, one in before.timelines.items()}
    await bench.server.offload()
    await bench.server.onload(push(1))
    after = await bench.server.observe(cursors)
    await bench.server.stop()
    return sum(len(one.spans) for one in after.timelines.values())


def main() -> None:
    arguments = parse_arguments(__doc__ or "")
    num = 2_000 if arguments.quick else 50_000
    result: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        in_memory_s = cost_of_a_span(num, Timeline("policy/main"))
        written_s = cost_of_a_span(num, recorded_in(folder, "policy/main"))
        result["span_with_call_us"] = {
            "in memory": in_memory_s * 1e6,
            "and in a file": written_s * 1e6,
        }
        for num_engines in (2, 16) if arguments.quick else (2, 64, 256):
            num_spans = asyncio.run(spans_of_a_step(Path(folder), num_engines))
            # The fakes get no HTTP calls; as if each span had one in it.
            cpu_s = num_spans * written_s
            result[f"counted, {num_engines} engines"] = {
                "spans in a step, each with a call in it": num_spans,
                "cpu_ms": cpu_s * 1e3,
                SHARE: 100 * cpu_s / STEP_S,
            }
        num_pairs, num_requests = (10, 100) if arguments.quick else (100, 1000)
        for num_engines in (8,) if arguments.quick else (8, 64):
            at = Path(folder) / f"live-{num_engines}"
            told = asyncio.run(live.measure(num_engines, num_pairs, num_requests, at))
            result[f"live, {num_engines} engines"] = {
                "requests in a step": num_requests,
                **told,
                SHARE: told["cpu_ms of recording"] / 10 / STEP_S,
            }
    publish(result, as_json=arguments.json, title="What recording costs")


if __name__ == "__main__":
    main()
