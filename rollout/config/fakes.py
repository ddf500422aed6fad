"""The configuration of a launch without engines, for a script that trains on saved groups.

``rollout debug train`` sets ``ROLLOUT_REPLAY``.  Then a driver returns the saved groups, and
``rollout.launch`` starts fakes where the configuration has engines: router, page, lifecycle and
pushes are real, so an unchanged script runs, and a push of a wrong name, type or shape is refused
as by a real engine.

Always true: nothing outside of the folder of the new run is written: no version of weights on
disk, nothing in the store, nothing in the folder of the run that is repeated.
"""

from __future__ import annotations

import logging
from pathlib import Path

from engines.protocol import WorkerType
from rollout.config.groups import EngineConfig, GroupConfig
from rollout.config.root import RolloutConfig, ServerConfig
from rollout.config.run_dir import JOURNAL_FILE
from rollout.config.weights import EncodingChoice, Transport

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 63
_SUFFIX = "-replay"
_FAKE_CPUS = 0.1


def with_fakes(config: RolloutConfig, *, keeps_gpus: bool) -> RolloutConfig:
    """The same servers with fakes for engines, as a run of its own.

    Args:
        keeps_gpus: the groups reserve the GPUs that their engines would have, because trainers are
            placed beside them; else they need no GPU.
    """
    logger.warning("no engine runs: fakes take pushes, and drivers return the groups of a file")
    servers = {name: _server(server, keeps_gpus) for name, server in config.servers.items()}
    cluster = config.cluster
    return config.model_copy(
        update={
            "run_id": _replay_id(config.run_id),
            "servers": servers,
            "cluster": cluster if keeps_gpus else cluster.model_copy(update={"trainer_gpus": 0}),
        }
    )


def replay_of(run: str | Path) -> Path:
    """What names the replay of a run, so that no script reaches the run itself by its old name.

    Args:
        run: the run's folder or that of one of its servers, or its id; or that of the replay.
    """
    path = Path(run)
    if (path / JOURNAL_FILE).is_file():
        return replay_of(path.parent) / path.name
    return path if path.name.endswith(_SUFFIX) else path.with_name(_replay_id(path.name))


def _replay_id(run_id: str) -> str:
    return run_id[: _MOST_CHARACTERS - len(_SUFFIX)] + _SUFFIX


def _server(server: ServerConfig, keeps_gpus: bool) -> ServerConfig:
    weights = {
        "transport": Transport.AUTO,
        "encoding": EncodingChoice.FULL,
        "disk_path": None,
        "store": None,
    }
    return server.model_copy(
        update={
            "groups": {name: _group(group, keeps_gpus) for name, group in server.groups.items()},
            "weights": server.weights.model_copy(update=weights),
            "health": server.health.model_copy(update={"weights_path": None}),
        }
    )


def _group(group: GroupConfig, keeps_gpus: bool) -> GroupConfig:
    settings = group.engine
    engine = EngineConfig.model_validate(
        {
            "kind": "fake",
            "gpus": settings.gpus if keeps_gpus else 0,
            "nodes": settings.nodes if keeps_gpus else 1,
            "cpus": _FAKE_CPUS,
            "weights_cpu_backup": settings.weights_cpu_backup,
        }
    )
    is_reserved = group.worker_type is WorkerType.PLACEHOLDER
    worker_type = group.worker_type if is_reserved else WorkerType.REGULAR
    return group.model_copy(update={"engine": engine, "worker_type": worker_type, "standby": 0})
