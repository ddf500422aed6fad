"""Seconds from the kill of an engine until it serves the current weights again, by part.

The only engine of a server is killed with SIGKILL after a push, several times, first with the DRAM
store and then with checkpoints on disk (``health.weights_path``).  The seconds come from the
timeline of the run: ``detect`` until the engine is fenced, ``boot`` until the new process is
ready, ``admit`` until it has joined its group, ``restore`` until it has loaded the pushed weights,
``verify`` until its fingerprints are checked and the router sends it requests.  Weights from the
store are verified within ``restore``.

``standby`` is the same with a standby, over the store: medians, the slowest of all (``worst``), and
``asleep_bytes`` of host memory of a process that sleeps.  ``sglang`` and ``vllm`` are real ones on
the CPU, cold and with a standby, where they are installed (``tools/cpu_engines/install.py``).
``beyond_load`` is the total without ``restore``.

``step_delay_s`` is how much longer a step takes because an engine dies in it or before it, at most,
by the phase of the death.  It is measured in virtual time over fake engines whose boot takes
``boot_s``, so that it holds waiting alone, and no work of this machine.

``lost_actors`` is what follows when an actor of ours is killed: see
``benchmarks.rollout.lost_actors``.

``driver_journal`` is what a request costs that survives the training script: see
``benchmarks.rollout.journal``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Arguments, machine, parse_arguments, publish
from benchmarks.rollout import journal, lost_actors
from engines.fake import FakeLauncher, faults
from engines.fake.launcher import FakeRunningEngine
from engines.launch import EngineSpec
from rollout import RolloutConfig, launch
from rollout.config.run_dir import RunFolder
from rollout.core.types import EngineStatus
from rollout.observability.timeline.span import Span
from rollout.observability.timeline.span_file import read_lines
from tests.support.builders import make_server, push
from tests.support.models import FOR_VLLM, make_plain_model
from tests.support.real_policy import one_engine
from tests.support.virtual_time import virtual_time
from tools.cpu_engines import install

PARTS = ("detect", "boot", "admit", "restore", "verify", "total", "beyond_load")
FAMILIES = ("embedded", "sglang", "vllm", "delays", "actors", "journal")
BOOT_S = 60.0
HEALTH = {"probe_interval_s": 0.5, "probe_timeout_s": 2.0, "backoff_s": 0.01, "max_backoff_s": 0.01}
EMBEDDED: Mapping[str, Any] = {"engine": {"kind": "embedded", "cpus": 0.5}}
STANDBY: Mapping[str, Any] = {"standby": 1}
DEADLY_CALLS = ("generate", "pause_generation", "flush_cache", "update_weights_from_tensor")


def measure(
    source: str, model_path: Path, folder: Path, kills: int, group: Mapping[str, Any] = EMBEDDED
) -> dict[str, float]:
    """Medians of seconds, by part, and the slowest kills.

    Args:
        source: ``store`` or ``disk``.
        group: its settings.
    """
    import torch
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(1)
    folder.mkdir()
    policy: dict[str, Any] = {
        "model_path": str(model_path),
        "groups": {"main": dict(group)},
        "health": HEALTH | {"max_restarts": kills + 1},
    }
    if source == "store":
        policy["weights"] = {"store": {"spare_bytes": 0}}
    else:
        policy["health"]["weights_path"] = f"{folder}/{{version}}"
    config = RolloutConfig.from_dict({"log_dir": str(folder), "servers": {"policy": policy}})
    weights = load_file(model_path / "model.safetensors")
    recoveries: list[dict[str, float]] = []
    asleep: list[int] = []
    with launch(config, backend="local") as deployment:
        server = deployment["policy"]
        for _ in range(kills):
            weights = {name: tensor * 1.01 for name, tensor in weights.items()}
            version = server.weight_version + 1
            if source == "disk":
                (folder / str(version)).mkdir()
                save_file(weights, folder / str(version) / "model.safetensors")
                (folder / str(version) / "config.json").write_text("{}")
            server.push(weights).result(300)
            engine = wait_until_stored(server, version, waits_for_store=source == "store")
            asleep += asleep_bytes(engine, model_path)
            killed_s = kill(server, version, engine)
            recoveries.append(parts_of(spans_since(config, killed_s), killed_s))
    medians = {part: statistics.median(one[part] for one in recoveries) for part in PARTS}
    worst = {f"worst_{part}": max(one[part] for one in recoveries) for part in PARTS[-2:]}
    sizes = {"asleep_bytes": statistics.median(asleep)} if asleep else {}
    return {"kills": kills} | medians | worst | sizes


def wait_until_stored(server: Any, version: int, *, waits_for_store: bool) -> EngineStatus:
    """The only engine, when the version is stored and its standby is ready, if it has one."""
    while True:
        status = server.status().result(30)
        (engine,) = status.groups[0].engines
        is_stored = not waits_for_store or status.store.version == version
        if is_stored and engine.standby in ("", "ready"):
            return engine
        time.sleep(0.05)


def asleep_bytes(engine: EngineStatus, model_path: Path) -> list[int]:
    """Host memory of its standby, with that of the processes it has started."""
    if not engine.standby:
        return []
    launched = [
        [one, *one.children(recursive=True)]
        for one in psutil.process_iter()
        if one.pid != engine.pid and str(model_path) in cmdline(one) and is_guarded(one)
    ]
    return [sum(one.memory_info().rss for one in processes) for processes in launched]


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


def is_guarded(process: psutil.Process) -> bool:
    parent = process.parent()
    return parent is not None and parent.name() == "engine-guard"


def kill(server: Any, version: int, engine: EngineStatus) -> float:
    """Kill the engine, and wait until a new one serves the version.

    Returns:
        The time of the kill.
    """
    killed_s = time.time()
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 300
    while True:
        (new,) = server.status().result(30).groups[0].engines
        if new.pid != engine.pid and new.state == "serving" and new.weight_version == version:
            return killed_s
        assert time.monotonic() < deadline, f"the engine does not serve after 300 s: {new}"
        time.sleep(0.02)


def spans_since(config: RolloutConfig, since_s: float) -> list[Span]:
    """Spans that began after ``since_s``, in order, once the recovery is among them."""
    deadline = time.monotonic() + 30
    while True:
        files = RunFolder.of(config).span_files()
        lines = [line for file in files for line in file.read_text().splitlines()]
        spans = [span for span in read_lines(lines) if span.start_s >= since_s]
        if any(span.name == "readmitted" for span in spans):
            return sorted(spans, key=lambda span: span.start_s)
        assert time.monotonic() < deadline, "the timeline has no span of the recovery"
        time.sleep(0.05)


def parts_of(spans: list[Span], killed_s: float) -> dict[str, float]:
    """Seconds of each part of one recovery."""
    boot = next(span for span in spans if span.name == "boot")
    adopt = next(span for span in spans if span.name == "readmit")
    load = next(span for span in spans if span.name == "update_weights_from_disk")
    back_s, loaded_s = adopt.start_s + adopt.elapsed_s, load.start_s + load.elapsed_s
    return {
        "detect": boot.start_s - killed_s,
        "boot": boot.elapsed_s,
        "admit": adopt.start_s - boot.start_s - boot.elapsed_s,
        "restore": loaded_s - adopt.start_s,
        "verify": back_s - loaded_s,
        "total": back_s - killed_s,
        "beyond_load": back_s - killed_s - (loaded_s - adopt.start_s),
    }


class SlowLauncher(FakeLauncher):
    """Fakes whose boot takes ``BOOT_S``, but for the first of each slot."""

    async def launch(self, spec: EngineSpec) -> FakeRunningEngine:
        if spec.engine_id in self.processes:
            await asyncio.sleep(BOOT_S)
        return await super().launch(spec)


def measure_delays(folder: Path) -> dict[str, float]:
    """Seconds that a step takes longer at most, by the call in which two engines die."""
    delays: dict[str, float] = {}

    async def measure(call: str) -> None:
        (folder / call).mkdir()
        delays[call] = await step_delay(folder / call, call)

    for call in DEADLY_CALLS:
        virtual_time(measure)(call)
    return delays


async def step_delay(folder: Path, call: str) -> float:
    """The longest step until an engine is back, less the shortest one.

    One engine of a group that offloads dies, and one of a group that keeps its GPUs; the latter
    comes back while the steps go on.
    """
    groups = {"shared": {"num_engines": 2}, "apart": {"num_engines": 2, "needs_offload": False}}
    bench = make_server(folder, groups, launcher=SlowLauncher(), health={"probe_interval_s": 1.0})
    clock, steps = asyncio.get_running_loop().time, list[float]()
    await bench.server.start()
    dying = [bench["shared-0"], bench["apart-0"]]
    try:
        while len(steps) < 3 or bench["apart-0"] in dying:
            await asyncio.sleep(1.0)  # a rollout
            if len(steps) == 1:
                for engine in dying:
                    if call == "generate":
                        engine.die("out of memory")
                    else:
                        engine.faults.strike(call, faults.die())
                await asyncio.sleep(1.0)
            begun = clock()
            await bench.server.offload()
            await bench.server.push(push(len(steps) + 1))
            steps.append(clock() - begun)
    finally:
        await bench.server.stop()
    return max(steps) - min(steps)


def measure_real(kind: str, folder: Path, cold: int, kills: int) -> dict[str, Any]:
    """Real engines on the CPU over a tiny model, cold and with a standby."""
    folder.mkdir()
    model_path = make_plain_model(folder / "model", 0, **(FOR_VLLM if kind == "vllm" else {}))
    group = one_engine(kind)
    return {
        "cold": measure("store", model_path, folder / "cold", cold, group),
        "standby": measure("store", model_path, folder / "standby", kills, {**STANDBY, **group}),
    }


def main() -> None:
    arguments = parse_arguments(__doc__ or "", FAMILIES)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "embedded" in arguments.families:
            result |= measure_embedded(arguments, folder)
        for kind in ("sglang", "vllm"):
            is_made = install.python_of(kind).exists()
            if kind in arguments.families and is_made and arguments.size != "smoke":
                cold, kills = arguments.by_size(smoke=(0, 0), quick=(1, 3), full=(3, 20))
                result[kind] = measure_real(kind, folder / kind, cold, kills)
        if "delays" in arguments.families:
            (folder / "delays").mkdir()
            result |= {"boot_s": BOOT_S, "step_delay_s": measure_delays(folder / "delays")}
        if "actors" in arguments.families:
            num_kills = arguments.by_size(smoke=1, quick=3, full=20)
            result["lost_actors"] = lost_actors.measure(folder / "actors", num_kills)
        if "journal" in arguments.families:
            size = arguments.by_size(
                smoke=(1, 32), quick=(2, journal.NUM_TOKENS), full=(10, journal.NUM_TOKENS)
            )
            result["driver_journal"] = journal.measure(folder / "journal", *size)
    result |= {"machine": machine("torch", "transformers", "ray")}
    publish(result, as_json=arguments.as_json, title="seconds from kill to verified")


def measure_embedded(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Embedded engines: from the store and from disk, and from the store with a standby."""
    from rollout.testing.tiny_model import make_tiny_model

    large = {"hidden_size": 1024, "num_layers": 16}
    size = arguments.by_size(smoke={}, quick={}, full=large)
    model_path = make_tiny_model(folder / "model", **size)
    cold, kills = arguments.by_size(smoke=(1, 1), quick=(1, 3), full=(5, 20))
    both = ("store", "disk")  # the standby comes from the store, too
    sources = arguments.by_size(smoke=both[1:], quick=both, full=both)
    return {
        "model_bytes": (model_path / "model.safetensors").stat().st_size,
        **{one: measure(one, model_path, folder / one, cold) for one in sources},
        "standby": measure("store", model_path, folder / "standby", kills, {**STANDBY, **EMBEDDED}),
    }


if __name__ == "__main__":
    main()
