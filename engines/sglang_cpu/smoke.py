"""One step of training, as an engine sees it, on a tiny model: what an installation must do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import engines.embedded
from engines.client import EngineClient
from engines.errors import EngineError
from engines.launch import EngineSpec, LocalLauncher
from engines.protocol import MemoryTag, PauseMode, SamplingParams
from engines.sglang.invocation import CACHED
from engines.sglang_cpu.installation import Installation, run

_PROMPT = tuple(b"Once upon a time")
_GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
_RELEASED = (MemoryTag.KV_CACHE, MemoryTag.WEIGHTS)


def make_model(path: Path, seed: int) -> Path:
    """A tiny random model, made by the installation: torch need not be in this interpreter."""
    maker = Path(engines.embedded.__file__).with_name("tiny.py")
    code = f"import runpy; runpy.run_path({str(maker)!r})['make_tiny_model']({str(path)!r}"
    run([str(Installation().require()), "-c", f"{code}, seed={seed})"])
    return path


async def smoke_test(folder: Path, say: Callable[[str], None]) -> dict[str, float]:
    """Release the weights, bring others, and see that the answers are theirs; what was measured.

    Raises:
        EngineError: the engine did not start, refused a call, or did not do it.
    """
    first, second = (make_model(folder / f"model-{seed}", seed) for seed in (0, 1))
    started = time.monotonic()
    spec = EngineSpec(
        engine_id="smoke-0",
        kind="sglang",
        model_path=str(first),
        log_path=str(folder / "engine.log"),
        options={"dtype": "float32"},
        python=CACHED,
    )
    running = await LocalLauncher().launch(spec)
    client = EngineClient(running.endpoint, engine_id=spec.engine_id)
    try:
        ready_s = time.monotonic() - started
        say(f"ready after {ready_s:.0f} s")
        before = await client.generate(input_ids=_PROMPT, sampling_params=_GREEDY)
        await client.pause_generation(PauseMode.ABORT)
        await client.flush_cache(timeout_s=10.0)
        held = await running.resident_bytes() or 0
        await client.release_memory_occupation(_RELEASED)
        freed = held - (await running.resident_bytes() or 0)
        await client.resume_memory_occupation([MemoryTag.WEIGHTS])
        await client.update_weights_from_disk(str(second), weight_version="1")
        await client.resume_memory_occupation([MemoryTag.KV_CACHE])
        await client.continue_generation()
        after = await client.generate(input_ids=_PROMPT, sampling_params=_GREEDY)
        say(f"released {freed / 2**20:.0f} MiB")
        say(f"version {before.weight_version}: {before.output_ids}")
        say(f"version {after.weight_version}: {after.output_ids}")
        if freed <= 0 or after.weight_version != "1" or after.output_ids == before.output_ids:
            raise EngineError("the engine answered, but did not do it", operation="smoke")
    finally:
        await client.aclose()
        await running.stop(10.0)
    say("all well")
    return {"ready_s": ready_s, "freed_bytes": freed}
