"""The NCCL that ``rollout doctor`` finds, with real torch and a double of its answers."""

import sys
from importlib.metadata import distributions

import pytest

from rollout.weights.routes.nccl import nccl_of_torch


def test_without_torch_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert nccl_of_torch().startswith("none: torch cannot be imported: ")


@pytest.mark.torch
def test_it_is_that_of_the_installed_torch() -> None:
    """PyTorch's builds for CUDA bring NCCL as a package of its own; those for CPUs have none."""
    torch = pytest.importorskip("torch")
    installed = {one.name: one.version for one in distributions()}
    packages = [version for name, version in installed.items() if name.startswith("nvidia-nccl-")]
    built = f"torch {torch.__version__}"
    without = f"none: {built} is built without it; broadcasts go by gloo, through host memory"
    assert nccl_of_torch() in (without, *(f"{version}, in {built}" for version in packages))
    assert (nccl_of_torch() == without) == (torch.version.cuda is None)


@pytest.mark.torch
@pytest.mark.parametrize("version", [(2, 27, 3), (2, 27, 3, "+suffix")])
def test_a_torch_with_nccl_is_named_with_its_version(
    monkeypatch: pytest.MonkeyPatch, version: tuple[object, ...]
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert nccl_of_torch() == f"2.27.3, in torch {torch.__version__}"
