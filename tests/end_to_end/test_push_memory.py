"""The memory of pushes to a real engine: peaks of processes, beside what a plan computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rollout import RolloutConfig, launch
from rollout.config import Transport
from rollout.runtime.preflight import push_sizes
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.push.push_memory import push_memory

pytestmark = [pytest.mark.exec, pytest.mark.embedded, pytest.mark.slow, pytest.mark.timeout(180)]
# Of allocators, threads and requests.
SLACK_BYTES = 24 << 20


def anonymous_bytes(pid: int | str) -> int:
    """Memory of a process that is in no file, also in none of shared memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


@contextmanager
def peaks(*pids: int | str) -> Iterator[Callable[[], list[int]]]:
    """How much each process takes at most beyond what it has at the beginning."""
    before = [anonymous_bytes(pid) for pid in pids]
    most = list(before)
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.002):
            for place, pid in enumerate(pids):
                most[place] = max(most[place], anonymous_bytes(pid))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield lambda: [found - first for found, first in zip(most, before, strict=True)]
    finally:
        is_over.set()
        watching.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 270 MiB, in tensors of up to 8."""
    folder = tmp_path_factory.mktemp("model") / "model"
    return make_tiny_model(folder, "qwen3", hidden_size=1024, num_layers=8, num_heads=8)


@pytest.mark.parametrize("transport", ["shared_memory", "distributed"])
def test_trainer_and_engine_take_no_more_than_a_plan_says(
    model: Path, tmp_path: Path, transport: str
) -> None:
    weights = {"transport": transport, "bucket_bytes": 32 << 20}
    server: dict[str, Any] = {
        "model_path": str(model),
        "groups": {"main": {"engine": {"kind": "embedded"}}},
        "weights": weights,
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    sizes = push_sizes(str(model))
    assert sizes is not None
    computed = next(push_memory(sizes, config.servers["policy"].weights))
    assert computed.route == Transport(transport)
    assert computed.trainer_bytes + SLACK_BYTES < sizes.model_bytes / 2.5
    tensors = load_file(model / "model.safetensors")
    with launch(config) as deployment, deployment["policy"].pusher() as pusher:
        (engine,) = deployment["policy"].status().result().groups[0].engines
        engine_pid = engine.processes[0].pid
        with peaks("self", engine_pid) as found:
            pusher.push(tensors)
        in_files = pusher.rank.pool.num_bytes()
        of_trainer, of_engine = found()
    assert of_trainer <= computed.trainer_bytes + SLACK_BYTES
    assert of_engine <= computed.engine_bytes + SLACK_BYTES
    assert in_files <= computed.shared_memory_bytes + (1 << 20)
    assert (in_files > 0) is (computed.shared_memory_bytes > 0)
