"""Test doubles and tiny models for code that uses this library; tests here compare the doubles with
the real thing.

A name is imported at its first use: the doubles need no torch, and the tiny model needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.fake import FakeEngine, FakeTensor, faults, pack_tensors
    from engines.fake import write_checkpoint as fake_checkpoint
    from rollout.testing import stub_ray
    from rollout.testing.fakes import fake_push, launch_fakes
    from rollout.testing.tiny_model import make_tiny_model

_HOME = {
    "FakeEngine": "engines.fake.FakeEngine",
    "FakeTensor": "engines.fake.FakeTensor",
    "fake_checkpoint": "engines.fake.write_checkpoint",
    "fake_push": "rollout.testing.fakes.fake_push",
    "faults": "engines.fake.faults",
    "launch_fakes": "rollout.testing.fakes.launch_fakes",
    "make_tiny_model": "rollout.testing.tiny_model.make_tiny_model",
    "pack_tensors": "engines.fake.pack_tensors",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, there = _HOME[name].rpartition(".")
        value = globals()[name] = getattr(import_module(module), there)
        return value


__all__ = [
    "FakeEngine",
    "FakeTensor",
    "fake_checkpoint",
    "fake_push",
    "faults",
    "launch_fakes",
    "make_tiny_model",
    "pack_tensors",
    "stub_ray",
]
