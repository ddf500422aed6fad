"""Regions of a memory saver, on a double of ``torch_memory_saver`` in host memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from engines.protocol import MemoryTag

pytestmark = pytest.mark.embedded


class Saver:
    """As ``torch_memory_saver`` 0.0.10: its first use deletes what another mode would need."""

    def __init__(self) -> None:
        self._arguments: dict[str, Any] | None = {"hook_mode": "preload"}
        self.regions: list[tuple[str, bool]] = []
        self.calls: list[tuple[str, str]] = []

    @property
    def hook_mode(self) -> None:
        raise NotImplementedError

    @hook_mode.setter
    def hook_mode(self, mode: str) -> None:
        if self._arguments is None:
            raise AttributeError("_impl_ctor_kwargs")
        self._arguments["hook_mode"] = mode

    @contextmanager
    def region(self, tag: str, *, enable_cpu_backup: bool) -> Iterator[None]:
        if self._arguments is not None:
            assert self._arguments == {"hook_mode": "torch"}
            self._arguments = None
        self.regions.append((tag, enable_cpu_backup))
        yield

    def pause(self, tag: str) -> None:
        self.calls.append(("pause", tag))

    def resume(self, tag: str) -> None:
        self.calls.append(("resume", tag))


def test_weights_and_kv_cache_are_two_regions_of_one_memory_saver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from engines.embedded.memory.regions import Memory, memory_saver

    saver = Saver()
    monkeypatch.setitem(
        sys.modules, "torch_memory_saver", SimpleNamespace(torch_memory_saver=saver)
    )
    memory_saver.cache_clear()
    try:
        # "meta" stands for a GPU: its tensors have a size and no contents.
        memory = Memory(torch.device("meta"), saver=True, weights_backup=True)
        layout = [(torch.Size([4, 8]), torch.float32)]
        memory.allocate(MemoryTag.WEIGHTS, layout)
        memory.allocate(MemoryTag.KV_CACHE, layout)
        assert saver.regions == [("weights", True), ("kv_cache", False)]
        assert memory.resident_bytes() == {"weights": 128, "kv_cache": 128}
        memory.release([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE])
        assert memory.resident_bytes() == {"weights": 0, "kv_cache": 0}
        memory.resume([MemoryTag.WEIGHTS])
        assert memory.resident_bytes() == {"weights": 128, "kv_cache": 0}
        assert saver.calls == [("pause", "weights"), ("pause", "kv_cache"), ("resume", "weights")]
    finally:
        memory_saver.cache_clear()


def test_without_the_memory_saver_the_start_fails_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from engines.embedded.memory.regions import Memory, memory_saver

    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    memory_saver.cache_clear()
    memory = Memory(torch.device("meta"), saver=True, weights_backup=False)
    with pytest.raises(ValueError, match="pip install torch-memory-saver, or set needs_offload"):
        memory.allocate(MemoryTag.WEIGHTS, [(torch.Size([4]), torch.float32)])


def test_regions_of_two_threads_set_the_memory_saver_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from engines.embedded.memory import regions

    two_at_once, num_set = threading.Barrier(2), list[str]()

    class SlowSaver(Saver):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "hook_mode":
                num_set.append(value)
                with suppress(threading.BrokenBarrierError):
                    two_at_once.wait(0.3)
            super().__setattr__(name, value)

    saver = SlowSaver()
    monkeypatch.setitem(
        sys.modules, "torch_memory_saver", SimpleNamespace(torch_memory_saver=saver)
    )
    monkeypatch.setattr(regions, "memory_saver", cache(regions.memory_saver.__wrapped__))
    layout, device = [(torch.Size([2]), torch.float32)], torch.device("cpu")
    with ThreadPoolExecutor(2) as threads:
        made = [
            threads.submit(regions.DeviceRegion, tag, layout, device, saver=True, backup=False)
            for tag in (MemoryTag.WEIGHTS, MemoryTag.KV_CACHE)
        ]
        assert len({id(region.result()._saver) for region in made}) == 1
    assert num_set == ["torch"]
