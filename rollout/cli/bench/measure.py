"""Measurements of ``rollout bench``: of engines that it starts, or of a running target.

Always true: engines that are started here are stopped here; a running target is loaded, never
offloaded.  In a cycle, engines get the weights that they were started with, with an increasing
version.  The costs come from the run's timeline, as in ``rollout trace``.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from engines.fake import write_checkpoint
from rollout.cli.bench.load import LoadGenerator, LoadPlan, figures
from rollout.cli.lib import find_run
from rollout.cli.lib.config_file import launch, load_config
from rollout.config import RolloutConfig, ServerConfig, WeightUpdate
from rollout.config.run_dir import RunFolder
from rollout.core.errors import ConfigError, RolloutError
from rollout.core.optional_deps import optional_import
from rollout.observability.timeline.analysis import Slowest, Step, steps
from rollout.observability.timeline.span import Span
from rollout.observability.timeline.span_file import read_spans
from rollout.runtime.handle import DeploymentHandle
from rollout.weights.format.manifest import Manifest, read_checkpoint_manifest
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.routes.shared_memory import ByPath

# Seconds per token of a fake engine; the rest of a request's latency is this library's.
_FAKE_TOKEN_S = 0.002


# -- engines that bench starts --------------------------------------------------------------------


def _write_tiny_model(folder: Path) -> None:
    with optional_import("embedded", "--engine embedded needs torch, which is not installed"):
        from rollout.testing.tiny_model import make_tiny_model

        make_tiny_model(folder)


_OWN: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "fake": (write_checkpoint, {"token-s": _FAKE_TOKEN_S}),
    "embedded": (_write_tiny_model, {"max-total-tokens": 32768}),
}
"""Kinds that need no installation of another program -> what writes a model, and their options."""


def own_engines(kind: str) -> RolloutConfig:
    """A configuration of two small engines, with their model in the run folder."""
    run_id = _new_run_id()
    folder = Path("runs", run_id, "model")
    if kind not in _OWN:
        raise ConfigError(f"--engine {kind!r}: must be {' or '.join(map(repr, _OWN))}")
    write_model, options = _OWN[kind]
    write_model(folder)
    engine = {"kind": kind, "options": options}
    server = {"model_path": str(folder), "groups": {"main": {"num_engines": 2, "engine": engine}}}
    return RolloutConfig.from_dict({"run_id": run_id, "servers": {"policy": server}})


def from_file(path: Path) -> RolloutConfig:
    """The configuration with a new run id, so that its timeline has no older spans."""
    return load_config(path).model_copy(update={"run_id": _new_run_id()})


def _new_run_id() -> str:
    return f"bench-{time.strftime('%Y%m%d-%H%M%S')}"


def measure_own(
    config: RolloutConfig, server: str, backend: str, plan: LoadPlan, seconds: float, cycles: int
) -> dict[str, Any]:
    folder = RunFolder.of(config).path
    _log("starting engines")
    with launch(config, backend) as deployment:
        name = _choose(server, list(deployment))
        plan = replace(plan, url=deployment[name].url, key=config.servers[name].router.client_key)
        with LoadGenerator(plan) as clients:
            measured = {"run": str(folder), "server": name, "load": _steady(clients, plan, seconds)}
            if cycles:
                measured["load_in_cycles"] = _cycles(deployment, config, clients, plan, cycles)
    if cycles:
        measured["boundary"] = boundary([step for step in _recorded(folder) if step.server == name])
    return measured


def _cycles(
    deployment: DeploymentHandle,
    config: RolloutConfig,
    clients: LoadGenerator,
    plan: LoadPlan,
    num: int,
) -> dict[str, Any]:
    from_s = time.monotonic()
    for number in range(num):
        _log(f"offload and onload {number + 1} of {num}")
        _cycle(deployment, config)
        # Before the next cycle every client is busy again: as many requests have ended.
        clients.wait_for(plan.num_clients, plan.timeout_s)
    return figures(clients.ended(), from_s, time.monotonic())


def _cycle(deployment: DeploymentHandle, config: RolloutConfig) -> None:
    """One offload of all servers, directly followed by their onload."""
    versions = {
        name: status.weight_version for name, status in deployment.status().result().items()
    }
    pushes = {
        name: _push_of_checkpoint(server, versions[name] + 1)
        for name, server in config.servers.items()
        if server.weights.update is WeightUpdate.FULL
    }
    deployment.give_memory().result()
    deployment.serve_weights(pushes).result()


def _push_of_checkpoint(server: ServerConfig, version: int) -> WeightPush:
    """A push that each engine reads from the model's folder."""
    manifest = read_checkpoint_manifest(server.model_path) or Manifest({})
    folder = str(Path(server.model_path).absolute())
    return WeightPush(version, manifest, [{"path": folder}], ByPath())


def _recorded(folder: Path) -> list[Step]:
    try:
        return steps(read_spans(folder))
    except ConfigError:  # on a cluster whose nodes do not share the folder
        return []


# -- a running target -----------------------------------------------------------------------------


def find_running(target: str, **where: Any) -> list[find_run.RunningServer]:
    """The servers of a run; none if ``target`` is the URL of a router or an engine."""
    try:
        return find_run.find(target, **where)
    except RolloutError:
        if target.startswith(("http://", "https://")):
            return []
        raise


def measure_running(
    servers: list[find_run.RunningServer], target: str, server: str, plan: LoadPlan, seconds: float
) -> dict[str, Any]:
    if not servers:
        with LoadGenerator(replace(plan, url=target.rstrip("/"))) as clients:
            return {"load": _steady(clients, plan, seconds)}
    name = _choose(server, [running.name for running in servers])
    chosen = next(running for running in servers if running.name == name)
    with LoadGenerator(replace(plan, url=chosen.state()["router_url"])) as clients:
        from_s = time.time()
        measured = {"run": chosen.where, "server": name, "load": _steady(clients, plan, seconds)}
    reported = chosen.state().get("steps", ())
    new = [step_of(step) for step in reported if step["start_s"] >= from_s]
    if new:
        measured["boundary"] = boundary(new)
    return measured


def _choose(wanted: str, names: list[str]) -> str:
    if wanted and wanted not in names:
        raise ConfigError(f"--server {wanted!r}: there is no such server; {', '.join(names)}")
    return wanted or names[0]


# -- both ----------------------------------------------------------------------------------------


def step_of(reported: Mapping[str, Any]) -> Step:
    """A step from the JSON that a page reports."""
    values = {name: value for name, value in reported.items() if name != "number"}
    values["slowest"] = {
        phase: Slowest(**slowest) for phase, slowest in reported["slowest"].items()
    }
    values["failures"] = tuple(Span.from_dict(span) for span in reported["failures"])
    return Step(**values)


def boundary(cycles: Sequence[Step]) -> dict[str, Any]:
    """The cost of these steps: time without generation, phase times, slowest engines, failures."""
    lost_s = [step.lost_s for step in cycles]
    phases = list(dict.fromkeys(phase for step in cycles for phase in step.phase_s))
    return {
        "num_cycles": len(cycles),
        "lost_median_s": statistics.median(lost_s) if cycles else None,
        "lost_longest_s": max(lost_s, default=None),
        "phases": {phase: _phase_cost(phase, cycles) for phase in phases},
        "failures": [
            f"engine {span.engine_id}: {span.name}: {span.said}"
            for step in cycles
            for span in step.failures
        ],
    }


def _phase_cost(phase: str, cycles: Sequence[Step]) -> dict[str, Any]:
    """``slowest_engine`` has the largest sum of seconds over the steps in which it was slowest."""
    took_s = [step.phase_s[phase] for step in cycles if phase in step.phase_s]
    slowest = [step.slowest[phase] for step in cycles if phase in step.slowest]
    elapsed_s: dict[str, float] = defaultdict(float)
    for engine in slowest:
        elapsed_s[engine.engine_id] += engine.elapsed_s
    slowest_id = max(elapsed_s, key=lambda engine_id: elapsed_s[engine_id], default="")
    return {
        "median_s": statistics.median(took_s),
        "longest_s": max(took_s),
        "slowest_engine": slowest_id,
        "slowest_in": sum(engine.engine_id == slowest_id for engine in slowest),
        "others_waited_s": statistics.median(engine.waited_s for engine in slowest)
        if slowest
        else 0.0,
    }


def _steady(clients: LoadGenerator, plan: LoadPlan, seconds: float) -> dict[str, Any]:
    """The load, measured after every client has had a reply."""
    _log(f"{plan.num_clients} clients on {plan.url}, {seconds:g} s")
    clients.wait_for(plan.num_clients, plan.timeout_s)
    from_s = time.monotonic()
    time.sleep(seconds)
    return figures(clients.ended(), from_s, from_s + seconds) | {"num_clients": plan.num_clients}


def _log(message: str) -> None:
    """Print to stderr, so that stdout has only the results."""
    typer.echo(f"bench: {message}", err=True)
