"""Weights from one engine to another: all of them, or a refusal that says what is left."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.embedded.errors import Invalid
from engines.embedded.peers import take
from engines.embedded.weights import Weights
from engines.protocol import Endpoint
from safetensors.torch import load_file, save
from tests.engines.embedded import reference
from tests.engines.embedded.asking import PROMPT, Asker

pytestmark = pytest.mark.embedded


class Model(torch.nn.Module):
    """Parameters of a checkpoint, all zero."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.held = {
            name: torch.nn.Parameter(torch.zeros_like(one), requires_grad=False)
            for name, one in tensors.items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self.held.items())


@contextlib.contextmanager
def peer(act: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """Something that does ``act`` with whoever connects, and closes."""

    def serve() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.recv(1 << 16)
            act(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def answer(content: bytes, sent: int | None = None) -> Callable[[socket.socket], None]:
    head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    return lambda connection: connection.sendall(head + content[:sent])


def endpoint_of(engine: Asker) -> Endpoint:
    return Endpoint("127.0.0.1", engine.server.port)


async def test_all_weights_of_an_engine_arrive(engine: Asker, models: dict[str, Path]) -> None:
    path = str(models["second"])
    await engine.post("/update_weights_from_disk", model_path=path, weight_version="2")
    expected = load_file(models["second"] / "model.safetensors")
    model = Model(expected)
    await asyncio.to_thread(take, Weights(model), endpoint_of(engine))
    assert model.held.keys() == expected.keys()
    assert all(torch.equal(model.held[name], one) for name, one in expected.items())


async def test_an_engine_without_its_weights_gives_none(
    engine: Asker, models: dict[str, Path]
) -> None:
    model = Model(load_file(models["first"] / "model.safetensors"))
    await engine.post("/pause_generation", mode="abort")
    await engine.post("/release_memory_occupation", tags=["weights"])
    with pytest.raises(Invalid, match="nothing was updated"):
        await asyncio.to_thread(take, Weights(model), endpoint_of(engine))


async def test_an_engine_takes_them_and_answers_as_its_peer(
    engine: Asker, models: dict[str, Path]
) -> None:
    content = (models["second"] / "model.safetensors").read_bytes()
    with peer(answer(content)) as there:
        await engine.post("/update_weights_from_peer", url=there.url, weight_version="5")
    assert (await engine.get("/model_info"))["weight_version"] == "5"
    assert (await engine.generate())["output_ids"] == reference.greedy(models["second"], PROMPT)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda held: held.pop("b"), "it has no 'b'"),
        (lambda held: held.update(c=torch.zeros(1)), "unknown weight 'c'"),
        (lambda held: held.update(b=torch.zeros(5)), "shape"),
    ],
)
def test_other_tensors_than_its_own_are_refused(
    spoil: Callable[[dict[str, torch.Tensor]], None], why: str
) -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    model = Model(tensors)
    spoil(tensors)
    with peer(answer(save(tensors))) as there, pytest.raises(Invalid, match=why) as refused:
        take(Weights(model), there)
    assert "nothing was updated" in str(refused.value)
    assert not model.held["a"].any()


def test_a_peer_that_dies_on_the_way_leaves_a_mixture_and_says_so() -> None:
    tensors = {"a": torch.ones(3), "b": torch.ones(1 << 18)}
    content = save(tensors)
    with (
        peer(answer(content, len(content) - 5)) as there,
        pytest.raises(Invalid, match=r"broke off.*mixture"),
    ):
        take(Weights(Model(tensors)), there)


def test_a_peer_that_is_silent_is_given_up() -> None:
    ended = threading.Event()
    with peer(lambda connection: ended.wait(20)) as there:
        with pytest.raises(Invalid, match=r"timed out.*nothing was updated"):
            take(Weights(Model({"a": torch.ones(3)})), there, timeout_s=0.1)
        ended.set()


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x02" + bytes(7) + b"[]", b"no header"])
def test_what_is_no_safetensors_file_is_refused(content: bytes) -> None:
    with (
        peer(answer(content)) as there,
        pytest.raises(Invalid, match="nothing was updated"),
    ):
        take(Weights(Model({"a": torch.ones(3)})), there)
