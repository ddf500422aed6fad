"""The command line that launchers build, read back by the engine's own parser."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines.embedded.command import build_command, invocation
from engines.embedded.core.config import parse_args
from engines.launch import EngineSpec
from engines.protocol import Endpoint

HERE = Endpoint("127.0.0.1", 1234)


def spec(**options: object) -> EngineSpec:
    return EngineSpec(
        "e-0", "embedded", "/models/m", "/logs/e-0.log", num_cpus=1.5, options=options
    )


def test_a_spec_becomes_flags_the_engine_understands() -> None:
    command = build_command(spec(max_total_tokens=64, **{"random-seed": 3}), HERE)
    config = parse_args(command[command.index("engines.embedded") + 1 :])
    assert (config.model_path, config.port, config.weight_version) == ("/models/m", 1234, "0")
    assert (config.max_total_tokens, config.random_seed, config.num_threads) == (64, 3, 2)
    assert config.enable_memory_saver
    assert not config.enable_weights_cpu_backup
    assert config.device == "cpu"


def test_a_second_gpu_is_refused() -> None:
    on_one = build_command(replace(spec(), gpu_ids=(3,)), HERE)
    assert on_one[on_one.index("--device") + 1] == "cuda"
    with pytest.raises(ValueError, match=r"uses one GPU, and engine\.gpus is 2"):
        build_command(replace(spec(), gpu_ids=(3, 4)), HERE)


@pytest.mark.parametrize("name", ["port", "model-path", "no_such_option"])
def test_an_option_that_is_ours_or_nobodys_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace("-", "_")):
        build_command(spec(**{name: 1}), HERE)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        # Freed memory stays with the engine.
        ("MALLOC_MMAP_THRESHOLD_", str(32 << 20)),
        ("MALLOC_TRIM_THRESHOLD_", str(128 << 20)),
    ],
)
def test_what_its_library_is_told_of_memory_can_be_told_otherwise(name: str, told: str) -> None:
    own = replace(spec(), env={name: "2"})
    assert invocation(spec(), HERE, {}).env[name] == told
    assert invocation(spec(), HERE, {name: "1"}).env[name] == "1"
    assert invocation(own, HERE, {name: "1"}).env[name] == "2"


def test_on_a_gpu_the_host_copy_of_released_weights_stays_pinned() -> None:
    name, on_gpu = "TMS_RETAIN_CPU_BACKUP", replace(spec(), gpu_ids=(0,))
    assert invocation(on_gpu, HERE, {name: "0"}).env[name] == "1"
    assert invocation(replace(on_gpu, env={name: "0"}), HERE, {}).env[name] == "0"
    assert name not in invocation(spec(), HERE, {}).env
