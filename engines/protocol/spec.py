"""Specification of one engine, for every kind, and how its process is started."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.protocol import Endpoint, EngineAccess, GpuId, WorkerType

AT_LAUNCH = {
    "model_path": "the server's model_path",
    "host": "chosen at launch",
    "port": "chosen at launch",
    "weight_version": "chosen at launch",
    "nnodes": "follows from the placement",
    "node_rank": "follows from the placement",
    "dist_init_addr": "follows from the placement",
}
"""Options of every kind that ``EngineSpec.launch_options`` sets -> which setting each follows."""


_SHARE_OF_KILL = 0.4


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Specification of one engine.

    Attributes:
        kind: ``embedded``, ``sglang`` or ``vllm``; ``attached`` is one that runs already.
        gpu_ids: physical GPUs it gets on this node; empty runs it on the CPU.
        num_cpus: cores it may use on this node when it runs on the CPU.
        memory_saver: it must be able to give its memory back.
        weights_cpu_backup: it keeps a host copy of its weights while they are released.
        keeps_embeddings: it may keep what it computed of an image or a sound, because no push
            changes the weights that compute it.
        options: more options in the engine's own names, without the leading dashes.
        log_path: its standard output and error.
        worker_type: its part in a server that separates prefill, decode or encoding.
        kill_timeout_s: from its kill until its memory is known to be free, all attempts counted.
        python: the interpreter to run it in, or empty for this one.
        access: its keys, or None for new ones, made at its launch.
        run: the run that launches it; calls to it name that run.
        url: where it listens, for one that is attached; one of kind ``vllm`` with a url is.
        claim: called before it is attached; what it returns is called when it is used no more.
        num_nodes: nodes it spans; each is launched with a spec of its own.
        node_rank: which of them this is; rank 0 takes the requests.
        dist_init_addr: ``host:port`` where its nodes meet, see ``LocalLauncher.hold_address``.
    """

    engine_id: str
    kind: str
    model_path: str
    log_path: str
    gpu_ids: tuple[GpuId, ...] = ()
    num_cpus: float = 1.0
    memory_saver: bool = True
    weights_cpu_backup: bool = False
    keeps_embeddings: bool = False
    weight_version: int = 0
    start_timeout_s: float = 300.0
    kill_timeout_s: float = 25.0
    host: str = "127.0.0.1"
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    worker_type: WorkerType = WorkerType.REGULAR
    python: str = ""
    access: EngineAccess | None = None
    run: str = ""
    url: str = ""
    claim: Callable[[], Callable[[], None]] | None = None
    num_nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""

    @property
    def is_on_cpu(self) -> bool:
        """It has no GPUs, or they are only logical: its option ``device`` says so."""
        return not self.gpu_ids or self.options.get("device") == "cpu"

    @property
    def has_key(self) -> bool:
        """Calls that change it need a key."""
        return self.access is None or bool(self.access.control or self.access.sampling)

    @property
    def is_attached(self) -> bool:
        """It runs already, and is never stopped from here."""
        return bool(self.url)

    @property
    def process_kill_s(self) -> float:
        """The part of ``kill_timeout_s`` for its processes on one node; another attempt may follow
        from elsewhere."""
        return _SHARE_OF_KILL * self.kill_timeout_s

    @property
    def visible_gpus(self) -> dict[str, str]:
        """The environment in which it sees only its GPUs, numbered as NVML and Ray do."""
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(str(gpu_id) for gpu_id in self.gpu_ids),
        }

    def launch_options(self, endpoint: Endpoint) -> dict[str, Any]:
        """The options whose names all kinds share."""
        options: dict[str, Any] = {
            "model_path": self.model_path,
            "host": endpoint.host,
            "port": endpoint.port,
            "weight_version": self.weight_version,
        }
        if self.num_nodes > 1:
            options |= {
                "nnodes": self.num_nodes,
                "node_rank": self.node_rank,
                "dist_init_addr": self.dist_init_addr,
            }
        return options


NCCL_CUMEM = "NCCL_CUMEM_ENABLE"
"""The variable that must be equal in all processes of an NCCL group."""
OF_THIS_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""Variables that are meant for the interpreter that launches, and wrong for another one."""
# What torchrun gives to each rank.  With its store setting, an engine waits for ever to be joined.
_OF_TORCHRUN = re.compile(
    r"TORCHELASTIC_\w+|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
)
# What configures the trainer's own memory saver and allocator.
_OF_ITS_MEMORY = re.compile(r"TMS_\w+|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF")
_MEMORY_SAVER = "torch_memory_saver"


def inherited_environment(environ: Mapping[str, str], python: str = "") -> dict[str, str]:
    """The environment that an engine inherits: without what configures its launcher as a trainer.

    An engine that got it would not start, or would make all its memory pausable.

    Args:
        python: the interpreter it runs in, where that is another than this one.
    """
    env = {
        name: value
        for name, value in environ.items()
        if not _OF_TORCHRUN.fullmatch(name) and not _OF_ITS_MEMORY.fullmatch(name)
    }
    if "TORCHELASTIC_RUN_ID" in environ and env.get("OMP_NUM_THREADS") == "1":
        del env["OMP_NUM_THREADS"]  # torchrun's own default
    libraries = re.split(r"[ :]+", env.pop("LD_PRELOAD", ""))
    if kept := [library for library in libraries if library and _MEMORY_SAVER not in library]:
        env["LD_PRELOAD"] = ":".join(kept)
    if python:
        for name in OF_THIS_PYTHON:
            env.pop(name, None)
        # Tools that came with it, such as ninja, are found by name.
        env["PATH"] = f"{Path(python).parent}:{env.get('PATH', '')}"
    return env


SEMAPHORES = ("/dev/shm/sem.mp-*", "/dev/shm/sem.loky-{pid}-*")
"""What a killed Python program leaves: of multiprocessing, and of joblib under scikit-learn."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """How one engine process is started.

    Attributes:
        command: program and arguments.
        env: its whole environment.
        cleanup: patterns of files a killed engine leaves, as ``EngineProcess.spawn`` takes them.
        defaults: options that this library chooses, unless the spec's options name them.
        folder_variable: variable with a folder that is removed with the engine, as
            ``EngineProcess.spawn`` takes it, or empty for none.
        ports: others on its host at which no other program may listen.
    """

    command: Sequence[str]
    env: Mapping[str, str] = field(repr=False)  # it has the keys
    cleanup: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    folder_variable: str = ""
    ports: Sequence[int] = ()


def spelled(option: str) -> str:
    """The name of an option in one spelling: underscores, no leading dashes."""
    return option.lstrip("-").replace("-", "_")


def normalized(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options in one spelling: underscores, no leading dashes.

    Raises:
        ValueError: an option is given twice, in two spellings.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        key = spelled(name)
        if key in found:
            raise ValueError(f"option {key} is given twice, in two spellings")
        found[key] = value
    return found


def refuse(options: Collection[str], owners: Mapping[str, str]) -> None:
    """Refuse options that are set elsewhere, written out or cut short.

    Args:
        owners: option -> which setting it follows from.

    Raises:
        ValueError: naming each such option and what to set in its place.
    """
    # Command lines take unique beginnings of a flag for the whole of it.
    taken = [
        f"{name} ({reason})"
        for name in sorted(options)
        for owned, reason in owners.items()
        if name == owned or (owned.startswith(name) and name not in owners)
    ]
    if taken:
        raise ValueError(f"options that cannot be set here: {'; '.join(taken)}")


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """A command line: True is a bare flag, False and None are left out, a list is several words.

    A mapping becomes JSON, which is how SGLang takes structured options.
    """
    flags: list[str] = []
    for name, value in options.items():
        if value is False or value is None:
            continue
        flags.append("--" + name.replace("_", "-"))
        if isinstance(value, Mapping):
            flags.append(json.dumps(dict(value)))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flags += [str(item) for item in value]
        elif value is not True:
            flags.append(str(value))
    return flags
