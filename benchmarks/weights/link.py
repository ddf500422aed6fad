"""Deltas to an engine behind a link of 1 or 10 Gbit/s, beside whole tensors and a peer's way.

Two network namespaces are joined by a veth pair, each end limited by ``tc tbf``; it needs root.
Seconds are from the trainer's tensors until the engine has them; bytes are those that the kernel
counts on the trainer's end of the link, with all headers.

The peer's way is that of TRL #5417, prime-rl #2823 and AReaL #1125, written from their texts: for
each changed tensor ``NAME.indices`` (int32) and ``NAME.values`` as safetensors in a file, which is
fetched once; the engine's worker keeps a dense copy on the CPU, changes it, and loads whole
tensors from it.  It has no base, no fingerprint and no comparison.

``trained`` is a tiny model with float32 masters under AdamW at a learning rate of 1e-6, whose
bfloat16 values are pushed after each step.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.report import Rows
from benchmarks.weights.delta import DENSITIES, Changing
from benchmarks.weights.push import receiver, specs_of
from engines.tensors.torch_fingerprint import dtype_name
from rollout.config import Transport
from rollout.weights.format.manifest import TensorSpec

_BYTES_OF_CHANGE = 6
_MOST_BYTES = 256 << 20
# Less than this is the size of ``--smoke``.
_SMALL_BYTES = 64 << 20
# With the bytes that go at once; the smallest size runs only the first.
_RATES = {"1gbit": "256kb", "10gbit": "2560kb"}
_TRAINER, _ENGINE = "rollout-bench-trainer", "rollout-bench-engine"
_ADDRESSES = {_TRAINER: "10.77.0.1", _ENGINE: "10.77.0.2"}
_CLONE_NEWNET = 0x40000000


def measure(num_bytes: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    if os.geteuid():
        return {"why_not": "it needs root, for network namespaces"}
    rates = list(_RATES)[: 1 if num_bytes < _SMALL_BYTES else None]
    with _link(), ThreadPoolExecutor(1) as threads:
        threads.submit(_enter, _TRAINER).result()
        measured = partial(_measure, min(num_bytes, _MOST_BYTES), repeats)
        return {rate: threads.submit(measured, rate).result() for rate in rates}


def _measure(num_bytes: int, repeats: int, rate: str) -> dict[str, Any]:
    _limit(rate)
    rows = Rows(f"link.{rate}")
    tensors = {
        spec.name: torch.randn(spec.shape).to(torch.bfloat16)
        for spec in specs_of("dense", num_bytes)
    }
    rows["bytes"] = sum(tensor.nbytes for tensor in tensors.values())
    with _far_engine(tensors) as pushing:
        for density in DENSITIES:
            for way in ("full", "delta", "auto", "peer"):
                changed = [partial(pushing.change, density)] * (repeats + 1)
                rows[f"{density:g}_{way}"] = _row(pushing, way, changed)
    is_smoke = num_bytes < _SMALL_BYTES
    trained, steps = _training(hidden_size=64 if is_smoke else 512, num_steps=repeats + 1)
    with _far_engine(trained) as pushing:
        for way in ("full", "delta", "peer"):
            rows[f"trained_{way}"] = _row(pushing, way, steps)
    return rows


def _row(pushing: _Far, way: str, changes: list[Callable[[], int]]) -> dict[str, Any]:
    """Of all pushes but the first, by which ``auto`` knows the density."""
    pushing.begin(Transport.BY_VALUE, "delta" if way == "peer" else way)
    pushing.pushed()
    if way == "peer":
        pushing.keep()
    push = pushing.peer if way == "peer" else pushing.pushed
    seconds, sent, changed = [], [], []
    for number, change in enumerate(changes):
        num_changed, before = change(), _sent_bytes()
        began = time.perf_counter()
        push()
        if number:
            seconds.append(time.perf_counter() - began)
            sent.append(_sent_bytes() - before)
            changed.append(num_changed)
    pushing.check()
    return {
        "seconds": statistics.median(seconds),
        "link_bytes": statistics.median(sent),
        "density": sum(changed) / len(changed) / pushing.num_elements,
        "of_information": sum(sent) / max(1, sum(changed) * _BYTES_OF_CHANGE),
    }


class _Far(Changing):
    """Pushes to an engine in the other namespace."""

    @property
    def num_elements(self) -> int:
        return sum(tensor.numel() for tensor in self._tensors.values())

    def keep(self) -> None:
        """The peer's copy of what the engine holds."""
        self._kept = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def peer(self) -> None:
        """A push by the peer's way."""
        found = {}
        for name, tensor in self._tensors.items():
            new, old = tensor.view(-1), self._kept[name].view(-1)
            at = (new.view(torch.int16) != old.view(torch.int16)).nonzero().view(-1)
            if len(at):
                found[f"{name}.indices"] = at.to(torch.int32)
                found[f"{name}.values"] = old[at] = new[at]
        path = self._folder / "delta.safetensors"
        save_file(found, path)
        url = f"http://{_ADDRESSES[_ENGINE]}:{self._port}/peer_delta"
        request = urllib.request.Request(url, path.read_bytes())
        with urllib.request.urlopen(request, timeout=300) as response:
            response.read()


@contextmanager
def _far_engine(tensors: dict[str, torch.Tensor]) -> Iterator[_Far]:
    specs = [TensorSpec(name, dtype_name(one.dtype), one.shape) for name, one in tensors.items()]
    prefix = ["ip", "netns", "exec", _ENGINE]
    with tempfile.TemporaryDirectory() as name:
        folder, host = Path(name), _ADDRESSES[_ENGINE]
        with receiver(specs, folder, host, prefix) as (_, port):
            pushing = _Far(tensors, port, folder, host)
            try:
                yield pushing
            finally:
                pushing.close()


def _training(
    hidden_size: int, num_steps: int
) -> tuple[dict[str, torch.Tensor], list[Callable[[], int]]]:
    """The bfloat16 tensors of a model, and steps that change them; each returns how many."""
    from transformers import AutoModelForCausalLM

    from rollout.testing.tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(
            Path(folder) / "model", "qwen3", hidden_size=hidden_size, num_layers=4
        )
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    masters = dict(model.named_parameters())
    tensors = {name: one.detach().to(torch.bfloat16) for name, one in masters.items()}
    text = torch.tensor(list(Path(__file__).read_bytes()[:2048])).view(8, 256)

    def step() -> int:
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        num_changed = 0
        for name, master in masters.items():
            new = master.detach().to(torch.bfloat16)
            num_changed += int((new.view(torch.int16) != tensors[name].view(torch.int16)).sum())
            tensors[name].copy_(new)
        return num_changed

    return tensors, [step] * num_steps


# -- the link ---------------------------------------------------------------------------------


@contextmanager
def _link() -> Iterator[None]:
    _remove()  # those of a run that was killed
    _run(f"netns add {_TRAINER}")
    try:
        _run(f"netns add {_ENGINE}")
        _run(f"link add veth0 netns {_TRAINER} type veth peer name veth0 netns {_ENGINE}")
        for name, address in _ADDRESSES.items():
            _run(f"-n {name} addr add {address}/24 dev veth0")
            _run(f"-n {name} link set lo up")
            _run(f"-n {name} link set veth0 up")
        yield
    finally:
        _remove()


def _limit(rate: str) -> None:
    limit = f"tc qdisc replace dev veth0 root tbf rate {rate} burst {_RATES[rate]} latency 50ms"
    for name in _ADDRESSES:
        _run(f"netns exec {name} {limit}")


def _remove() -> None:
    for name in _ADDRESSES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def _enter(name: str) -> None:
    """This thread, and those that it starts, are in the namespace from now on."""
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    finally:
        os.close(descriptor)


def _sent_bytes() -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "veth0":
            return int(counts.split()[8])
    raise RuntimeError("this thread is not in a namespace of the link")
