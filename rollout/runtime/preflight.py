"""Checks a configuration against this machine, before anything is started.

Always true: nothing is created, and no engine is started.  All mistakes are found at once, each
with its setting.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from engines.launch import check_spec
from engines.protocol import WorkerType
from engines.protocol.errors import EngineError
from engines.protocol.spec import EngineSpec, inherited_environment, spelled
from rollout.config import (
    EngineConfig,
    GroupConfig,
    RolloutConfig,
    ServerConfig,
    Transport,
)
from rollout.config.compatibility import of_checkpoint
from rollout.config.root import wrong_paths
from rollout.control.engine.start import configured_spec
from rollout.core.errors import ConfigError, Mistake, WeightMismatch
from rollout.core.optional_deps import install_command
from rollout.core.os_errors import why_not_writable
from rollout.rules.release_policy import release_policy
from rollout.weights.format.checkpoint_config import (
    element_bytes_of,
    elements_of,
    head_size_of,
    quantisation_of,
    read_checkpoint_config,
)
from rollout.weights.format.manifest import read_checkpoint_manifest, wrong_patterns
from rollout.weights.format.stacked_experts import stacked_bytes
from rollout.weights.format.tied_head import tied_head
from rollout.weights.push.push_memory import PushSizes, why_too_small
from rollout.weights.store.node.base_folder import base_folder, why_not_private

logger = logging.getLogger(__name__)

_ASK_S = 20.0
_OF_AGENTS = ("renderers", "tokenizers", "jinja2", "openai", "httpx")


def check_before_launch(config: RolloutConfig, *, launches_here: bool = True) -> None:
    """Raise if ``config`` cannot be launched.

    Args:
        launches_here: engines are child processes of this interpreter.

    Raises:
        ConfigError: all that is wrong.
    """
    found = wrong_settings(config)
    if launches_here:
        found += _missing_modules(config)
    if found:
        raise ConfigError.of(found)
    for note in push_room_notes(config):
        logger.warning("%s", note)


def wrong_settings(config: RolloutConfig) -> list[Mistake]:
    """What cannot work on this machine, or with engines of their kind."""
    found = [*wrong_paths(config), *_wrong_log_dir(config)]
    for name, server in config.servers.items():
        found += _wrong_folders(f"servers.{name}.weights", server)
        weights = server.weights
        for setting in ("not_pushed", "frozen"):
            patterns = getattr(weights, setting)
            found += _wrong_patterns(f"servers.{name}.weights.{setting}", patterns, server)
        for group, settings in server.groups.items():
            found += _wrong_group(f"servers.{name}.groups.{group}", server, settings)
    return found


def push_sizes(model_path: str) -> PushSizes | None:
    """Sizes of a push of a checkpoint, from its tensors or else from its config, or None if neither
    gives them."""
    try:
        manifest = read_checkpoint_manifest(model_path)
    except WeightMismatch:
        manifest = None
    if manifest is not None:
        sizes = [spec.num_bytes for spec in manifest.tensors.values()]
        return PushSizes(sum(sizes), max([0, *sizes, *stacked_bytes(manifest)]))
    config = read_checkpoint_config(model_path)
    whole, largest = (number * element_bytes_of(config) for number in elements_of(config))
    return PushSizes(whole, largest) if whole else None


def push_room_notes(config: RolloutConfig) -> Iterator[str]:
    """What pushes that need not go through shared memory lack there."""
    for name, server in config.servers.items():
        path = server.weights.shared_memory_path
        if server.weights.transport is Transport.AUTO and (why := _why_too_small(server)):
            yield (
                f"servers.{name}.weights.shared_memory_path = {path!r}: {why}; until then engines "
                "without another route get the weights by value"
            )


def _why_too_small(server: ServerConfig) -> str:
    """Why its pushes do not fit into the folder of shared memory."""
    sizes = push_sizes(server.model_path)
    try:
        total = os.statvfs(server.weights.shared_memory_path)
    except OSError:
        return ""
    total_bytes = total.f_blocks * total.f_frsize
    return "" if sizes is None else why_too_small(sizes, server.weights, total_bytes)


def agents_notes(config: RolloutConfig) -> Iterator[str]:
    """What the servers' agents lack here: without it each chat of a session is refused."""
    missing = next(
        (module for module in _OF_AGENTS if importlib.util.find_spec(module) is None), ""
    )
    for name, server in config.servers.items():
        if missing and server.agents.workers:
            yield (
                f"servers.{name}.agents: {missing} is not installed here, so chats of sessions get "
                f"status 501; {install_command('agents')}, or set workers to 0"
            )


def option_notes(config: RolloutConfig) -> Iterator[str]:
    """Options of engines that the pinned version does not have: another version may."""
    for name, server in config.servers.items():
        for group, settings in server.groups.items():
            kind, path = settings.engine.of_kind, f"servers.{name}.groups.{group}.engine.options"
            known = kind.known_options()
            for option in settings.engine.options if known else ():
                first = spelled(option).partition(".")[0]
                # Servers take the begin of an option for the whole.
                if not any(option.startswith(first) for option in known):
                    near = difflib.get_close_matches(first, known, n=1)
                    hint = f"; did you mean {near[0].replace('_', '-')!r}?" if near else ""
                    yield f"{path}: the pinned {kind.title} has no option {option!r}{hint}"


def open_engines(config: RolloutConfig, host: str) -> Iterator[Mistake]:
    """Engines that must not listen at an address of their node, as they do on several hosts."""
    for name, server in config.servers.items():
        for group, settings in server.groups.items():
            engine, path = settings.engine, f"servers.{name}.groups.{group}.engine.key"
            if engine.is_attached or settings.worker_type is WorkerType.PLACEHOLDER:
                continue
            if why := engine.of_kind.why_open(host, bool(engine.key)):
                yield _wrong(path, str(engine.key), f"{why}; leave {path} out for new keys")


def open_notes(config: RolloutConfig) -> Iterator[str]:
    """Engines that only a cluster of one host may start."""
    for mistake in open_engines(config, "the address of its node"):
        yield f"with Ray and several hosts this is refused: {mistake}"


def _wrong_log_dir(config: RolloutConfig) -> Iterator[Mistake]:
    if why := why_not_writable(Path(config.log_dir) / config.run_id):
        yield _wrong("log_dir", config.log_dir, f"{why}; give a folder for the files of runs")


def _wrong_folders(path: str, server: ServerConfig) -> Iterator[Mistake]:
    weights = server.weights
    is_named = "shared_memory_path" in weights.model_fields_set
    if is_named or weights.transport is Transport.SHARED_MEMORY:
        yield from _wrong_tmpfs(f"{path}.shared_memory_path", weights.shared_memory_path)
    if weights.transport is Transport.SHARED_MEMORY and (why := _why_too_small(server)):
        yield _wrong(f"{path}.shared_memory_path", weights.shared_memory_path, why)
    if weights.store is not None:
        yield from _wrong_tmpfs(f"{path}.store.path", weights.store.path)
        yield from _wrong_base(f"{path}.store.path", weights.store.path)
    if weights.transport is Transport.DISK and weights.disk_path is not None:
        parent = weights.disk_path.partition("{version}")[0] or "."
        if why := why_not_writable(parent if parent.endswith("/") else Path(parent).parent):
            yield _wrong(f"{path}.disk_path", weights.disk_path, f"{why}; give a folder that can")


def _wrong_patterns(
    setting: str, patterns: Sequence[str], server: ServerConfig
) -> Iterator[Mistake]:
    try:
        manifest = read_checkpoint_manifest(server.model_path) if patterns else None
    except WeightMismatch as error:
        yield Mistake(setting, patterns, f"{setting}: {error}")
        return
    if manifest is None:  # without a manifest, no push is checked
        return
    for why in wrong_patterns(patterns, manifest.tensors):
        yield Mistake(setting, patterns, f"{setting}: {why}")


def _wrong_tmpfs(setting: str, path: str) -> Iterator[Mistake]:
    # It is not created: in the place of a file system that is not mounted, a folder would fill the
    # root disk.
    if not os.path.isdir(path):
        why = "is no folder" if os.path.exists(path) else "does not exist"
        yield _wrong(setting, path, f"it {why}; mount a tmpfs there, or use /dev/shm")
    elif why := why_not_writable(path):
        yield _wrong(setting, path, f"{why}; make it writable, or use /dev/shm")


def _wrong_base(setting: str, path: str) -> Iterator[Mistake]:
    with suppress(FileNotFoundError):  # the store makes it
        if why := why_not_private(base_folder(path)):
            yield _wrong(setting, path, why)


def _wrong_group(path: str, server: ServerConfig, group: GroupConfig) -> Iterator[Mistake]:
    try:
        release_policy(path, group, server.weights.update, server.weights.not_pushed)
    except ConfigError as error:
        yield Mistake(error.setting, error.value, str(error))
    engine = group.engine
    if engine.is_attached or group.worker_type is WorkerType.PLACEHOLDER:
        return
    if why := _why_no_interpreter(engine.python):
        yield _wrong(f"{path}.engine.python", engine.python, why)
        return
    try:
        check_spec(planned_spec(server, group))
    except (ValueError, EngineError) as error:
        yield Mistake(f"{path}.engine", engine.kind.value, f"{path}.engine: {error}")
    checkpoint, weights = read_checkpoint_config(server.model_path), server.weights
    has_stages = engine.of_kind.num_stages(engine.options) > 1
    for setting, why in of_checkpoint(
        engine,
        weights.update,
        is_quantised=bool(quantisation_of(checkpoint)),
        head_size=head_size_of(checkpoint),
        # It reads the header of each file of the checkpoint.
        tied=tied_head(server.model_path, weights.update, weights.not_pushed)
        if has_stages
        else None,
    ):
        yield _wrong(f"{path}.{setting}", _value_at(group, setting), why)


def _value_at(group: GroupConfig, setting: str) -> str:
    found: Any = group
    for name in setting.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name)
    return str(found)


def _why_no_interpreter(python: str) -> str:
    if not python or shutil.which(python):
        return ""
    reason = "cannot be executed" if Path(python).exists() else "does not exist"
    return f"it {reason}; give the path of a Python interpreter, or leave python out"


def planned_spec(server: ServerConfig, group: GroupConfig) -> EngineSpec:
    """The specification of an engine of this group, with other GPUs than it will get."""
    engine, weights = group.engine, server.weights
    return replace(
        configured_spec(server.model_path, group, weights.update, weights.not_pushed),
        gpu_ids=tuple(range(engine.gpus // engine.nodes)),
        num_nodes=engine.nodes,
        dist_init_addr="127.0.0.1:1" if engine.nodes > 1 else "",
    )


def _missing_modules(config: RolloutConfig) -> Iterator[Mistake]:
    for name, server in config.servers.items():
        for group, settings in server.groups.items():
            if missing := _first_missing(settings.engine):
                path = f"servers.{name}.groups.{group}.engine"
                kind, python = settings.engine.kind.value, settings.engine.python
                if python:
                    why = f"it has no {missing}; install it there, or name another interpreter"
                    yield _wrong(f"{path}.python", python, why)
                    continue
                extra = settings.engine.of_kind.extra
                hint = install_command(extra) if extra else ""
                hint = hint or (
                    "install it, or set engine.python to an interpreter that has it; without a "
                    "GPU, to one that tools/cpu_engines/install.py of a clone makes"
                )
                yield _wrong(f"{path}.kind", kind, f"{missing} is not installed here; {hint}")


def _first_missing(engine: EngineConfig) -> str:
    if engine.is_attached:
        return ""
    needed, plugin = engine.of_kind.modules, engine.of_kind.plugin
    if not engine.python:
        return next((name for name in needed if importlib.util.find_spec(name) is None), "")
    needed += (plugin,) if plugin else ()
    missing = next((name for name in needed if _lacks(engine, name)), "")
    if missing and missing == plugin:
        return f"ray-rollout-{engine.kind.value}, the wheel of the plugin"
    return missing


def _lacks(engine: EngineConfig, module: str) -> bool:
    """Whether the interpreter of an engine answers that it has no such module."""
    code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is None)"
    try:
        # -P: what is in the working directory is not installed.
        asked = subprocess.run(
            [engine.python, "-P", "-c", code],
            env=inherited_environment(os.environ, engine.python) | dict(engine.env),
            capture_output=True,
            text=True,
            timeout=_ASK_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() == "True"


def _wrong(setting: str, value: str, why: str) -> Mistake:
    return Mistake(setting, value, f"{setting} = {value!r}: {why}")
