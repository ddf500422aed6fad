"""``rollout validate`` and ``plan``: check and show a configuration; start nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import psutil
import typer
from rich.text import Text

from engines.protocol import WorkerType
from engines.protocol.plain_text import size_text
from rollout.cli.lib.config_file import load_config, read_sources, split_arguments
from rollout.cli.lib.gpu_sums import PlannedGpu, gpu_lines, gpu_sums, planned_gpu
from rollout.cli.lib.output import print_json, show, table
from rollout.cli.lib.start_values import show_start, start_values
from rollout.config import (
    EngineConfig,
    GroupConfig,
    RolloutConfig,
    ServerConfig,
    Transport,
    WeightUpdate,
)
from rollout.config.compatibility import of_window
from rollout.config.root import examined_from
from rollout.config.sources.hub import HubModel
from rollout.control.engine.memory import size_of_weights
from rollout.core.errors import ConfigError, Mistake, PlacementError
from rollout.rules.placement import PlacementPlan, check_capacity, plan_of
from rollout.rules.release_policy import draft_note, elastic_backup_note, release_policy
from rollout.runtime.local import visible_gpus
from rollout.runtime.preflight import (
    agents_notes,
    open_notes,
    option_notes,
    push_room_notes,
    push_sizes,
    wrong_settings,
)
from rollout.weights.format.checkpoint_config import read_checkpoint_config
from rollout.weights.format.manifest import read_checkpoint_manifest
from rollout.weights.push.push_memory import PushMemory, push_memory, push_memory_text
from rollout.weights.routes.choice import is_only_streamed, stream_note, why_loads_cost
from rollout.weights.routes.nccl import why_nccl_fails
from rollout.weights.store.layout.placement import node_bytes

# Numbers of nodes for which the cost of a weight store is shown.
_STORE_NODES = (1, 2, 4, 8)


def print_mistakes(arguments: Sequence[str], *, as_json: bool) -> None:
    """Print all mistakes of a configuration; with one, exit status 2."""
    name = ", ".join(map(str, split_arguments(arguments)[0]))
    loaded, mistakes = _examined(arguments)
    notes = []
    if loaded is not None:
        notes = [*_model_notes(loaded), *option_notes(loaded), *open_notes(loaded)]
        notes += _draft_notes(loaded)
    if as_json:
        values = {
            "config": name,
            "servers": list(loaded.servers) if loaded is not None else [],
            "is_valid": not mistakes,
            "mistakes": [asdict(mistake) for mistake in mistakes],
            "notes": notes,
        }
        print_json(values)
    elif loaded is not None and not mistakes:
        show(f"{name}: {len(loaded.servers)} server(s), valid")
    if not as_json:
        for line in (*map(str, mistakes), *(f"note: {note}" for note in notes)):
            typer.echo(line, err=True)
    if mistakes:
        raise typer.Exit(2)


def _examined(arguments: Sequence[str]) -> tuple[RolloutConfig | None, list[Mistake]]:
    """The config as far as it is right, and all mistakes."""
    try:
        sources = read_sources(arguments)
        loaded, mistakes = examined_from(sources)
    except ConfigError as error:
        return None, [Mistake("", None, str(error))]
    if loaded is not None:
        mistakes += sources.located(wrong_settings(loaded))
    return loaded, mistakes


def _model_notes(config: RolloutConfig) -> Iterator[str]:
    for name, server in config.servers.items():
        if HubModel.named(server.model_path):
            yield (
                f"servers.{name}.model_path: a launch gets {server.model_path} from the Hub, and "
                "checks its files then"
            )


def print_plan(arguments: Sequence[str], *, as_json: bool, gpu_gib: float | None = None) -> None:
    """Print what a configuration would start; with a refusal, exit status 2.

    Args:
        gpu_gib: the size of the GPUs that memory sums are computed for; see ``planned_gpu``.
    """
    config = load_config(arguments).with_local_models(may_download=False)
    values = summary(config, planned_gpu(gpu_gib))
    if as_json:
        print_json(values)
    else:
        _show(values)
    if values["refusals"]:
        raise typer.Exit(2)


def _groups(config: RolloutConfig) -> list[tuple[str, WeightUpdate, GroupConfig]]:
    """All groups, each with the path of its settings and the kind of its server's pushes."""
    return [
        (f"servers.{name}.groups.{group}", server.weights.update, of_group)
        for name, server in config.servers.items()
        for group, of_group in server.groups.items()
    ]


def summary(config: RolloutConfig, gpu: PlannedGpu) -> dict[str, Any]:
    """Placement, addresses, memory and refusals of a configuration, ready for JSON."""
    placement = plan_of(config)
    trainer_gpus = config.cluster.trainer_gpus
    groups = [
        _group(placement, name, server, group, of_group)
        | {"gpu": _gpu_sums(server, of_group, trainer_gpus, gpu)}
        for name, server in config.servers.items()
        for group, of_group in server.groups.items()
    ]
    host_bytes = sum(group["host_bytes"] for group in groups)
    backup_notes = [
        elastic_backup_note(where, group, update) for where, update, group in _groups(config)
    ]
    return {
        "run_id": config.run_id,
        "needs": placement.totals(),
        "shared_gpu_bundles": placement.shared,
        "stacked": placement.stacked,
        "servers": [_server(name, server, trainer_gpus) for name, server in config.servers.items()],
        "groups": groups,
        "host_bytes": host_bytes,
        "refusals": [mistake.message for mistake in wrong_settings(config)],
        "notes": [
            *_notes(placement, host_bytes),
            *option_notes(config),
            *open_notes(config),
            *agents_notes(config),
            *filter(None, backup_notes),
            *_draft_notes(config),
            *_push_notes(config),
            *push_room_notes(config),
            *_window_notes(config),
            *_standby_notes(config),
        ],
    }


def _server(name: str, server: ServerConfig, trainer_gpus: int) -> dict[str, Any]:
    page = f"{server.page.host}:{server.page.port or 'any free'}"
    return {
        "server": name,
        "router": f"{server.router.host}:{server.router.port or 'any free'}",
        "agents": [f"{server.agents_host}:{port or 'any free'}" for port in server.agents.ports],
        "page": page,
        "needs_client_key": bool(server.router.client_key),
        "weight_bytes": size_of_weights(server.model_path),
        "store_bytes_per_node": _store_bytes(server),
        "push_memory": [asdict(peaks) for peaks in _push_memory(server, trainer_gpus)],
    }


def _gpu_sums(
    server: ServerConfig, group: GroupConfig, trainer_gpus: int, gpu: PlannedGpu
) -> dict[str, Any] | None:
    if group.worker_type is WorkerType.PLACEHOLDER:
        return None
    return gpu_sums(server, group, trainer_gpus, gpu, [*_push_memory(server, trainer_gpus)])


def _push_memory(server: ServerConfig, trainer_gpus: int) -> Iterator[PushMemory]:
    """Peaks of full pushes, with all ranks of the trainer on one host."""
    sizes = push_sizes(server.model_path)
    if sizes is None or server.weights.update is not WeightUpdate.FULL:
        return iter(())
    return push_memory(sizes, server.weights, ranks_per_host=max(1, trainer_gpus))


def _store_bytes(server: ServerConfig) -> dict[str, int]:
    """Number of nodes -> bytes that the DRAM store takes on each, or empty if it is off."""
    store, manifest = server.weights.store, read_checkpoint_manifest(server.model_path)
    if store is None or manifest is None:
        return {}
    return {str(number): node_bytes(manifest, store, number) for number in _STORE_NODES}


def _group(
    placement: PlacementPlan,
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
        policy = release_policy(
            f"servers.{name}.groups.{group}",
            of_group,
            server.weights.update,
            server.weights.not_pushed,
        )
        weights_from, has_backup = policy.weights_from, policy.weights_cpu_backup
        if server.weights.store is not None and policy.tags and not has_backup:
            weights_from += ", or the store"
    except ConfigError:
        weights_from, has_backup = "REFUSED", False
    engine = of_group.engine
    backup = size_of_weights(server.model_path) if has_backup else 0
    if of_group.needs_offload and not engine.is_attached:
        backup += _draft_copy_bytes(engine, has_backup=has_backup)
        backup += engine.of_kind.graph_copy_bytes * engine.gpus
    asleep = (backup + engine.of_kind.asleep_bytes * max(1, engine.gpus)) * of_group.standby
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
        "host_bytes": (backup + asleep) * of_group.num_engines,
        "start": start_values(server, of_group, has_backup=has_backup),
    }


def _draft_copy_bytes(engine: EngineConfig, *, has_backup: bool) -> int:
    """Host memory for a draft that is no part of the model's checkpoint, while it is released."""
    is_kept = has_backup or bool(engine.of_kind.draft_backup_option)
    draft = engine.of_kind.draft(engine.options)
    return size_of_weights(draft) if draft and is_kept else 0


def _span_text(span: range) -> str:
    if not len(span):
        return "elsewhere"
    return str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"


def _draft_notes(config: RolloutConfig) -> Iterator[str]:
    """What keeps the drafts of engines, and what becomes of them.  One that is attached reports its
    draft when the run attaches it."""
    for name, server in config.servers.items():
        weights = server.weights
        for group, settings in server.groups.items():
            where = f"servers.{name}.groups.{group}"
            terms = where, settings, weights.update, weights.not_pushed
            try:
                has_backup = release_policy(*terms).weights_cpu_backup
            except ConfigError:
                continue  # it is among the mistakes
            if note := draft_note(settings, weights.update, has_backup=has_backup):
                yield f"{where}: {note}"


def _push_notes(config: RolloutConfig) -> Iterator[str]:
    """How pushes by path are sent to engines for which each load costs more than its tensors."""
    for name, server in config.servers.items():
        weights = server.weights
        kinds = {group.engine.kind for group in server.groups.values()}
        why = why_loads_cost(kinds, read_checkpoint_config(server.model_path))
        wanted = weights.transport
        if weights.update is WeightUpdate.FROZEN:
            continue
        if note := stream_note(wanted, why, streams=weights.stream):
            yield f"servers.{name}: {note}"
        elif wanted in (Transport.AUTO, Transport.SHARED_MEMORY) and why:
            yield f"servers.{name}: a push by shared memory is loaded in one call: {why}"
        if wanted in (Transport.AUTO, Transport.DISTRIBUTED) and (why := why_nccl_fails(server)):
            yield f"servers.{name}: a broadcast by NCCL from an environment like this fails: {why}"


def _window_notes(config: RolloutConfig) -> Iterator[str]:
    """What ``offloaded`` would refuse."""
    for name, server in config.servers.items():
        streams = is_only_streamed(server.weights.transport)
        for is_copy in (False, True):
            conflicts = of_window(server.weights, is_copy=is_copy, is_only_streamed=streams)
            yield from (f"servers.{name}: {why}" for _, why in conflicts)


def _standby_notes(config: RolloutConfig) -> Iterator[str]:
    """What standbys take besides host memory."""
    for where, _, group in _groups(config):
        num_processes = group.num_engines * group.standby
        if num_processes:
            yield f"{where}: {num_processes} more processes sleep, one beside each engine" + (
                "; each takes about 1 GiB of each of its GPUs for its CUDA context (not measured)"
                if group.engine.gpus
                else ""
            )


def _notes(placement: PlacementPlan, host_bytes: int) -> list[str]:
    """What this machine lacks; a cluster may have it."""
    notes = []
    here = {"GPU": float(len(visible_gpus())), "CPU": float(os.cpu_count() or 1)}
    try:
        check_capacity(placement, here, "this machine")
    except PlacementError as error:
        notes.append(f"{error}; a Ray cluster may have more (--backend ray)")
    free = psutil.virtual_memory().available
    if host_bytes > free:
        notes.append(
            f"backups and standbys take {size_text(host_bytes)} of host memory, "
            f"this machine has {size_text(free)} free"
        )
    return notes


def _store_text(by_nodes: Mapping[str, int]) -> str:
    if not by_nodes:
        return "no DRAM store"
    costs = ", ".join(f"{size_text(size)} on {number}" for number, size in by_nodes.items())
    return f"DRAM store: bytes per node {costs} nodes"


def _show(values: dict[str, Any]) -> None:
    heads = ("group", "engines", "GPUs", "at", "offloads", "weights from", "host memory")
    groups = table(*heads, whole=("group",))
    for group in values["groups"]:
        bundles = group["bundles"]
        groups.add_row(
            f"{group['server']}/{group['group']}",
            f"{group['num_engines']} {group['kind']}",
            str(group["gpus_each"]),
            ", ".join(bundles[:4]) + (" ..." if len(bundles) > 4 else ""),
            "yes" if group["needs_offload"] else "no",
            group["weights_from"],
            size_text(group["host_bytes"]),
        )
    show(groups)
    for group in values["groups"]:
        if group["gpu"] is not None:
            show(f"{group['server']}/{group['group']}: memory of each GPU, computed, not measured")
            for line in gpu_lines(group["gpu"]):
                show(f"  {line}")
    for group in values["groups"]:
        if group["start"] is not None:
            show_start(f"{group['server']}/{group['group']}", group["start"])
    for server in values["servers"]:
        show(
            f"{server['server']}: router {server['router']}, agents "
            f"{', '.join(server['agents']) or 'none'}, page {server['page']}, weights "
            f"{size_text(server['weight_bytes'])}, {_store_text(server['store_bytes_per_node'])}"
        )
        for peaks in server["push_memory"]:
            show(f"{server['server']}: {push_memory_text(PushMemory(**peaks))}")
    needs = ", ".join(f"{amount:g} {name}" for name, amount in values["needs"].items()) or "nothing"
    shared = values["shared_gpu_bundles"]
    positions = f"positions {_span_text(range(shared))}" if shared else "no GPU"
    show(f"needs {needs}; the trainer shares {positions}")
    for server, below in values["stacked"].items():
        show(f"{server}: on GPUs of {', '.join(below)}, so it starts first and stays offloaded")
    for note in values["notes"]:
        show(Text.assemble(("note", "yellow"), f" {note}"))
    for refusal in values["refusals"]:
        show(Text.assemble(("refused", "red"), f" {refusal}"))
