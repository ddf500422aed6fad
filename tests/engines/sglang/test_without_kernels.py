"""The hooks for SGLang without its kernel library, over packages of its names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = Path(__file__).parents[3] / "tests/support/gpu/without_kernels"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A package with SGLang's modules that the hooks change."""
    for name in ("kernels/jit/utils", "kernels/ops/gemm"):
        folder = tmp_path / "sglang" / name
        folder.mkdir(parents=True)
        for package in (folder, *folder.parents[: len(Path(name).parts)]):
            (package / "__init__.py").touch()
    (tmp_path / "sglang/kernels/jit/utils/compile.py").write_text("def load_jit(): return 'made'")
    (tmp_path / "sglang/kernels/ops/gemm/cutedsl_dual_gemm.py").write_text("import cutlass")
    return tmp_path


def run(site: Path, program: str, **env: str) -> str:
    """What a program prints whose path begins with the hooks, as in the bundle."""
    path = os.pathsep.join([str(HOOKS), str(site)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "SGLANG_WITHOUT_KERNELS": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("import sgl_kernel; sgl_kernel.rmsnorm(1)", "sgl_kernel.rmsnorm"),
        ("from sgl_kernel.quantization import gguf; gguf()", "sgl_kernel.quantization.gguf"),
        ("from sgl_kernel import ops; ops.one.default()", "sgl_kernel.ops.one.default"),
    ],
)
def test_a_kernel_that_is_called_says_its_name(site: Path, program: str, name: str) -> None:
    assert run(site, program) == f"NotImplementedError: {name}: the kernel library is not on " + (
        "this machine"
    )


def test_kernels_are_not_compiled_unless_they_are_turned_on(site: Path) -> None:
    program = "from sglang.kernels.jit.utils.compile import load_jit; print(load_jit())"
    assert "kernels are not compiled here" in run(site, program)
    assert run(site, program, SGLANG_JIT="1") == "made"


def test_the_dual_gemm_of_blackwell_says_that_it_cannot_be_used(site: Path) -> None:
    program = (
        "from sglang.kernels.ops.gemm.cutedsl_dual_gemm import can_use_dual_gemm; "
        "print(can_use_dual_gemm(1, other=2))"
    )
    assert run(site, program) == "False"


def test_a_process_that_did_not_ask_is_left_alone(site: Path) -> None:
    program = "from sglang.kernels.jit.utils.compile import load_jit; print(load_jit())"
    assert run(site, program, SGLANG_WITHOUT_KERNELS="") == "made"
