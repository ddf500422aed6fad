"""A GPU does what it is given after the call has returned, and a forward pass is on a stream of its
own, which waits for none.  The device is a double.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from engines.embedded.core.config import EmbeddedConfig
from engines.embedded.memory.regions import Layout, Memory
from engines.embedded.server.app import make_app
from engines.embedded.server.embedded_engine import EmbeddedEngine
from engines.embedded.server.http_server import load
from engines.embedded.weights.model_weights import place
from engines.protocol import MemoryTag
from safetensors.torch import save_file
from tests.engines.embedded import reference
from tests.engines.embedded.engine_client import PROMPT, payload, sampling

pytestmark = pytest.mark.embedded
LATE = ("copy_", "index_fill_", "normal_", "scatter_")


class LateMemory(Memory):
    """Memory of a device that is late with everything but a forward pass.

    Attributes:
        waiting: what it has not done.
        num_late: what it was given so far.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), saver=False, weights_backup=False)
        self.waiting: list[Callable[[], object]] = []
        self.num_late = 0
        self._own: list[tuple[int, int]] = []
        self._is_in_pass = False

    def allocate(self, tag: MemoryTag, layout: Layout) -> list[torch.Tensor]:
        tensors = super().allocate(tag, layout)
        self._own += [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors]
        return tensors

    def finish_work(self) -> None:
        super().finish_work()
        self._do_all()

    def delay(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The same operation on a tensor, but later if that is in this memory."""

        def late(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
            work = partial(operation, tensor, *arguments, **options)
            if self._is_in_pass or not self._has(tensor):
                work()
            else:
                self.num_late += 1
                self.waiting.append(work)
            return tensor

        return late

    def begin_pass(self, *_: Any) -> None:
        self._is_in_pass = True

    def end_pass(self, *_: Any) -> None:
        """By then the device has done the rest, too."""
        self._is_in_pass = False
        self._do_all()

    def _has(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and any(
            begin <= tensor.data_ptr() < end for begin, end in self._own
        )

    def _do_all(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()


def copy_one_by_one(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@pytest.fixture
def memory() -> LateMemory:
    return LateMemory()


@pytest.fixture
async def engine(
    memory: LateMemory, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EmbeddedEngine]:
    config = EmbeddedConfig(str(models["first"]), max_total_tokens=1024, device="cpu")
    model, text, _ = load(config)
    place(model, memory)
    model.register_forward_pre_hook(memory.begin_pass)
    model.register_forward_hook(memory.end_pass)
    engine = EmbeddedEngine(config, model, text, memory)
    for name in LATE:
        monkeypatch.setattr(torch.Tensor, name, memory.delay(getattr(torch.Tensor, name)))
    monkeypatch.setattr(torch, "_foreach_copy_", copy_one_by_one)
    yield engine
    monkeypatch.undo()
    engine.stop(5)


@pytest.fixture
async def http(engine: EmbeddedEngine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_new_blocks_of_the_cache_are_zero_before_a_pass_writes_its_keys(
    http: httpx.AsyncClient, memory: LateMemory, models: dict[str, Path]
) -> None:
    expected = reference.greedy(models["first"], PROMPT * 3, 40)
    options = sampling(max_new_tokens=40, ignore_eos=True)
    reply = await post(http, "/generate", input_ids=PROMPT * 3, sampling_params=options)
    assert memory.num_late > 1, "a block was zeroed in the first step, and in later ones"
    assert reply["output_ids"] == expected


def changed(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the model; of another dtype than the model's, so that none is only read."""
    return {name: tensor.to(torch.bfloat16) for name, tensor in reference.state_dict(path).items()}


async def by_value(http: httpx.AsyncClient, path: Path, folder: Path) -> None:
    await post(http, "/begin_weight_update")
    named = payload(changed(path))
    await post(http, "/update_weights_from_tensor", serialized_named_tensors=named)


async def by_value_while_paused(http: httpx.AsyncClient, path: Path, folder: Path) -> None:
    await post(http, "/pause_generation")
    await by_value(http, path, folder)


async def from_disk(http: httpx.AsyncClient, path: Path, folder: Path) -> None:
    save_file(changed(path), folder / "model.safetensors")
    await post(http, "/update_weights_from_disk", model_path=str(folder))


async def reset(http: httpx.AsyncClient, path: Path, folder: Path) -> None:
    await post(http, "/weights_checker", action="reset_tensors")


@pytest.mark.parametrize("change", [by_value, by_value_while_paused, from_disk, reset])
async def test_weights_are_there_when_the_engine_has_answered(
    http: httpx.AsyncClient,
    memory: LateMemory,
    models: dict[str, Path],
    tmp_path: Path,
    change: Callable[..., Any],
) -> None:
    await change(http, models["second"], tmp_path)
    assert memory.num_late > 10
    assert not memory.waiting


def test_only_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    for name in ("cpu", "cuda"):
        Memory(torch.device(name), saver=False, weights_backup=False).finish_work()
    assert waited == [torch.device("cuda")]
