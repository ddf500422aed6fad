"""``rollout validate`` and ``rollout plan``: what a configuration would do; nothing is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from engines.protocol import WorkerType
from rollout.commands.output import AsJson, console, gib, print_json
from rollout.config import GroupConfig, RolloutConfig, ServerConfig, check_paths
from rollout.errors import ConfigError, PlacementError
from rollout.local import visible_gpus
from rollout.memory import size_of_weights
from rollout.placement import Plan, check_capacity, plan_placement
from rollout.policy import elastic_backup_note, release_policy
from rollout.weights.manifest import read_checkpoint_manifest
from rollout.weights.store.cost import node_bytes

ConfigPath = Annotated[Path, typer.Argument(help="YAML or JSON file with the configuration.")]
# Numbers of nodes that a store's cost is told for.
_STORE_NODES = (1, 2, 4, 8)


def validate(config: ConfigPath, as_json: AsJson = False) -> None:
    """Check a configuration and the directories it names; start nothing."""
    loaded = load(config)
    _refuse(refusals(loaded))
    if as_json:
        print_json({"config": str(config), "servers": list(loaded.servers), "is_valid": True})
    else:
        console().print(f"{config}: {len(loaded.servers)} server(s), nothing wrong")


def plan(config: ConfigPath, as_json: AsJson = False) -> None:
    """Show what would run where, its ports, and what an offload forgets and costs in host memory.

    Exit status 2 if something would be refused; each refusal names the setting that mends it.
    """
    loaded = load(config)
    told = summary(loaded)
    if as_json:
        print_json(told)
    else:
        _show(told)
    if told["refusals"]:
        raise typer.Exit(2)


def load(path: Path) -> RolloutConfig:
    """A configuration whose model directories are there."""
    loaded = RolloutConfig.from_file(path)
    check_paths(loaded)
    return loaded


def refusals(config: RolloutConfig) -> list[str]:
    """Why groups would be refused at start-up, each with what mends it."""
    told = []
    for name, server in config.servers.items():
        for group, of_group in server.groups.items():
            try:
                release_policy(f"servers.{name}.groups.{group}", of_group, server.weights.update)
            except ConfigError as error:
                told.append(str(error))
    return told


def _refuse(told: list[str]) -> None:
    if told:
        raise ConfigError("; ".join(told))


def summary(config: RolloutConfig) -> dict[str, Any]:
    """Everything the configuration decides, ready for JSON."""
    placement = plan_placement(
        {name: server.groups for name, server in config.servers.items()},
        trainer_gpus=config.cluster.trainer_gpus,
    )
    groups = [
        _group(config, placement, name, server, group, of_group)
        for name, server in config.servers.items()
        for group, of_group in server.groups.items()
    ]
    host_bytes = sum(one["host_bytes"] for one in groups)
    return {
        "run_id": config.run_id,
        "needs": placement.totals(),
        "shared_gpu_bundles": placement.shared,
        "servers": [_server(name, server) for name, server in config.servers.items()],
        "groups": groups,
        "host_bytes": host_bytes,
        "refusals": refusals(config),
        "notes": [*_notes(placement, host_bytes), *_backup_notes(config)],
    }


def _server(name: str, server: ServerConfig) -> dict[str, Any]:
    weights = size_of_weights(server.model_path)
    page = f"{server.page.host}:{server.page.port or 'any free'}" if server.page.enabled else "off"
    return {
        "server": name,
        "router": f"{server.router.host}:{server.router.port or 'any free'}",
        "page": page,
        "needs_client_key": bool(server.router.client_key),
        "weight_bytes": weights,
        "store_bytes_per_node": _store_bytes(server),
    }


def _store_bytes(server: ServerConfig) -> dict[str, int]:
    """Number of nodes -> bytes of each that the DRAM store takes; empty if it is off."""
    store, manifest = server.weights.store, read_checkpoint_manifest(server.model_path)
    if store is None or manifest is None:
        return {}
    return {str(number): node_bytes(manifest, store, number) for number in _STORE_NODES}


def _group(
    config: RolloutConfig,
    placement: Plan,
    name: str,
    server: ServerConfig,
    group: str,
    of_group: GroupConfig,
) -> dict[str, Any]:
    spans = [
        placement.spans[name, group, index]
        for index in range(of_group.num_engines)
        if (name, group, index) in placement.spans
    ]
    try:
        policy = release_policy(f"servers.{name}.groups.{group}", of_group, server.weights.update)
        weights_from, has_backup = policy.weights_from, policy.weights_cpu_backup
    except ConfigError:
        weights_from, has_backup = "REFUSED", False
    backup = size_of_weights(server.model_path) * of_group.num_engines if has_backup else 0
    is_placeholder = of_group.worker_type is WorkerType.PLACEHOLDER
    return {
        "server": name,
        "group": group,
        "kind": "placeholder" if is_placeholder else of_group.engine.kind.value,
        "num_engines": of_group.num_engines,
        "gpus_each": of_group.engine.gpus,
        "cpus_each": of_group.engine.cpus,
        "bundles": [_span_text(span) for span in spans],
        "urls": list(of_group.engine.urls) or ["any free port"],
        "needs_offload": of_group.needs_offload,
        "weights_from": weights_from,
        "host_bytes": backup,
    }


def _span_text(span: range) -> str:
    if not len(span):
        return "elsewhere"
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"


def _notes(placement: Plan, host_bytes: int) -> list[str]:
    """What this machine alone could not do; a cluster may."""
    told = []
    here = {"GPU": float(len(visible_gpus())), "CPU": float(os.cpu_count() or 1)}
    try:
        check_capacity(placement, here, "this machine")
    except PlacementError as error:
        told.append(f"{error}; a Ray cluster may have more (--backend ray)")
    free = psutil.virtual_memory().available
    if host_bytes > free:
        told.append(
            f"backups take {gib(host_bytes)} of host memory, this machine has {gib(free)} free"
        )
    return told


def _backup_notes(config: RolloutConfig) -> list[str]:
    notes = (
        elastic_backup_note(f"servers.{name}.groups.{group}", of_group, server.weights.update)
        for name, server in config.servers.items()
        for group, of_group in server.groups.items()
    )
    return [note for note in notes if note]


def _store_text(by_nodes: Mapping[str, int]) -> str:
    if not by_nodes:
        return "no DRAM store"
    costs = ", ".join(f"{gib(size)} on {number}" for number, size in by_nodes.items())
    return f"DRAM store: bytes per node {costs} nodes"


def _show(told: dict[str, Any]) -> None:
    table = Table(
        "server",
        "group",
        "engines",
        "GPUs each",
        "bundles",
        "offloads",
        "weights come back from",
        "host memory",
    )
    for one in told["groups"]:
        bundles = one["bundles"]
        table.add_row(
            one["server"],
            one["group"],
            f"{one['num_engines']} {one['kind']}",
            str(one["gpus_each"]),
            ", ".join(bundles[:4]) + (" ..." if len(bundles) > 4 else ""),
            "yes" if one["needs_offload"] else "no",
            one["weights_from"],
            gib(one["host_bytes"]),
        )
    console().print(table)
    for one in told["servers"]:
        console().print(
            f"{one['server']}: router {one['router']}, page {one['page']}, weights "
            f"{gib(one['weight_bytes'])}, {_store_text(one['store_bytes_per_node'])}"
        )
    needs = ", ".join(f"{amount:g} {name}" for name, amount in told["needs"].items()) or "nothing"
    console().print(
        f"needs {needs}; the trainer shares the first {told['shared_gpu_bundles']} GPU bundles"
    )
    for note in told["notes"]:
        console().print(f"[yellow]note[/yellow] {note}")
    for refusal in told["refusals"]:
        console().print(f"[red]refused[/red] {refusal}")
