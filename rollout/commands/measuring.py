"""What ``rollout bench`` measures: engines of its own, or what runs already.

Always true: what is started here is ended here; what runs already is loaded and never offloaded.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from engines.fake import write_checkpoint
from rollout.commands import sources
from rollout.commands.cycling import boundary, cycle, step_of
from rollout.commands.load import Load, LoadPlan, figures
from rollout.commands.planning import load as load_config
from rollout.commands.serving import launched
from rollout.commands.tracing import read_spans
from rollout.config import RolloutConfig
from rollout.errors import ConfigError, RolloutError
from rollout.handle import DeploymentHandle
from rollout.run_folder import RunFolder
from rollout.timeline.analysis import Step, steps

# So long a token of a fake takes: what is left of a request is this library's own time.
_FAKE_TOKEN_S = 0.002


# -- engines of its own ---------------------------------------------------------------------------


def own_engines(kind: str) -> RolloutConfig:
    """Two small engines, for somebody who has no configuration yet; their model is in the run."""
    run_id = _new_run_id()
    folder = Path("runs", run_id, "model")
    options: dict[str, Any]
    if kind == "fake":
        write_checkpoint(folder)
        options = {"token-s": _FAKE_TOKEN_S}
    elif kind == "embedded":
        from engines.embedded.tiny import make_tiny_model

        make_tiny_model(folder)
        options = {"max-total-tokens": 32768}
    else:
        raise ConfigError(f"--engine {kind!r}: must be 'fake' or 'embedded'")
    engine = {"kind": kind, "options": options}
    server = {"model_path": str(folder), "groups": {"main": {"num_engines": 2, "engine": engine}}}
    return RolloutConfig.from_dict({"run_id": run_id, "servers": {"policy": server}})


def from_file(path: Path) -> RolloutConfig:
    """As a run of its own: what was recorded before is not in its timeline."""
    return load_config(path).model_copy(update={"run_id": _new_run_id()})


def _new_run_id() -> str:
    return f"bench-{time.strftime('%Y%m%d-%H%M%S')}"


def measure_own(
    config: RolloutConfig, server: str, backend: str, plan: LoadPlan, seconds: float, cycles: int
) -> dict[str, Any]:
    folder = RunFolder.of(config).path
    _say("starting engines")
    with launched(config, backend) as deployment:
        name = _one_of(server, list(deployment))
        plan = replace(plan, url=deployment[name].url, key=config.servers[name].router.client_key)
        with Load(plan) as clients:
            told = {"run": str(folder), "server": name, "load": _steady(clients, plan, seconds)}
            if cycles:
                told["load_in_cycles"] = _cycles(deployment, config, clients, plan, cycles)
    if cycles:
        told["boundary"] = boundary([one for one in _recorded(folder) if one.server == name])
    return told


def _cycles(
    deployment: DeploymentHandle, config: RolloutConfig, clients: Load, plan: LoadPlan, num: int
) -> dict[str, Any]:
    from_s = time.monotonic()
    for number in range(num):
        _say(f"offload and onload {number + 1} of {num}")
        cycle(deployment, config)
        # Busy again before the next: as many as there are clients have got their answer.
        clients.wait_for(plan.num_clients, plan.timeout_s)
    return figures(clients.ended(), from_s, time.monotonic())


def _recorded(folder: Path) -> list[Step]:
    try:
        return steps(read_spans(folder))
    except ConfigError:  # a cluster whose nodes do not share the folder
        return []


# -- what runs already ----------------------------------------------------------------------------


def find_running(target: str, **where: Any) -> list[sources.Source]:
    """The servers of a run; none where ``target`` is the URL of a router or an engine."""
    try:
        return sources.find(target, **where)
    except RolloutError:
        if target.startswith(("http://", "https://")):
            return []
        raise


def measure_running(
    found: list[sources.Source], target: str, server: str, plan: LoadPlan, seconds: float
) -> dict[str, Any]:
    if not found:
        with Load(replace(plan, url=target.rstrip("/"))) as clients:
            return {"load": _steady(clients, plan, seconds)}
    name = _one_of(server, [one.name for one in found])
    source = next(one for one in found if one.name == name)
    with Load(replace(plan, url=source.state()["router_url"])) as clients:
        from_s = time.time()
        told = {"run": source.where, "server": name, "load": _steady(clients, plan, seconds)}
    made = [step_of(one) for one in source.state().get("steps", ()) if one["start_s"] >= from_s]
    if made:
        told["boundary"] = boundary(made)
    return told


def _one_of(wanted: str, names: list[str]) -> str:
    if wanted and wanted not in names:
        raise ConfigError(f"--server {wanted!r}: there is no such server; {', '.join(names)}")
    return wanted or names[0]


# -- both ----------------------------------------------------------------------------------------


def _steady(clients: Load, plan: LoadPlan, seconds: float) -> dict[str, Any]:
    """The load once every client has had an answer."""
    _say(f"{plan.num_clients} clients on {plan.url}, {seconds:g} s")
    clients.wait_for(plan.num_clients, plan.timeout_s)
    from_s = time.monotonic()
    time.sleep(seconds)
    return figures(clients.ended(), from_s, from_s + seconds) | {"num_clients": plan.num_clients}


def _say(what: str) -> None:
    """On stderr, so that what is measured can be piped."""
    typer.echo(f"bench: {what}", err=True)
