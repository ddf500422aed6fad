"""Command lines of SGLang servers; no SGLang needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engines.protocol import Endpoint, WorkerType
from engines.protocol.spec import EngineSpec
from engines.sglang.command import build_command
from engines.sglang.invocation import invocation

HERE = Endpoint("10.0.0.1", 1234)


def flags(options: dict[str, Any] | None = None, **fields: Any) -> dict[str, list[str]]:
    """The command line by flag."""
    spec = EngineSpec("e-0", "sglang", "/models/m", "/e-0.log", options=options or {}, **fields)
    command = build_command(spec, HERE)
    assert command[1:3] == ["-m", "sglang.launch_server"]
    found: dict[str, list[str]] = {}
    for word in command[3:]:
        if word.startswith("--"):
            assert word not in found, f"{word} is given twice"
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_a_spec_becomes_sglangs_flags() -> None:
    found = flags(weight_version=7, weights_cpu_backup=True, gpu_ids=(4,))
    assert found == {
        "--model-path": ["/models/m"],
        "--host": ["10.0.0.1"],
        "--port": ["1234"],
        "--weight-version": ["7"],
        "--enable-cache-report": [],
        "--enable-memory-saver": [],
        "--enable-weights-cpu-backup": [],
        "--cuda-graph-backend-prefill": ["disabled"],
    }


def test_prefill_graphs_are_off_only_where_gpu_memory_is_released() -> None:
    name = "--cuda-graph-backend-prefill"
    assert name not in flags()
    assert name not in flags(gpu_ids=(0,), memory_saver=False)
    assert name not in flags({"cuda-graph-backend-prefill": None}, gpu_ids=(0,))
    assert flags({"cuda_graph_backend_prefill": "full"}, gpu_ids=(0,))[name] == ["full"]


def test_a_draft_model_that_no_push_contains_is_backed_up() -> None:
    name, draft = "--enable-draft-weights-cpu-backup", {"speculative-algorithm": "EAGLE3"}
    assert flags(draft, gpu_ids=(0,))[name] == []
    assert flags(draft, gpu_ids=())[name] == []
    assert name not in flags(draft, gpu_ids=(), memory_saver=False)
    assert name not in flags({}, gpu_ids=(0,))
    assert name not in flags(draft | {"enable-draft-weights-cpu-backup": False}, gpu_ids=(0,))


def test_a_group_that_keeps_its_gpus_runs_without_a_memory_saver() -> None:
    assert "--enable-memory-saver" not in flags(memory_saver=False)


def test_other_options_travel_as_they_are() -> None:
    found = flags(
        {
            "lora-paths": ["a=/a", "b=/b"],
            "--enable-lora": True,
            "max_lora_rank": 16,
            "json-model-override-args": {"rope": 1},
            "disable-radix-cache": False,
            "chat-template": None,
        },
        gpu_ids=(0,),
    )
    assert found["--lora-paths"] == ["a=/a", "b=/b"]
    assert found["--enable-lora"] == []
    assert found["--max-lora-rank"] == ["16"]
    assert found["--json-model-override-args"] == ['{"rope": 1}']
    assert not {"--disable-radix-cache", "--chat-template"} & found.keys()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("port", "chosen at launch"),
        ("--model-path", "model_path"),
        ("enable_memory_saver", "needs_offload"),
        ("base-gpu-id", "placement"),
        ("disaggregation-mode", "worker_type"),
        ("device", "engine.gpus"),
        ("incremental-streaming-output", "cumulative"),
        # argparse takes the beginning of a flag for the flag.
        ("weight-ver", "chosen at launch"),
    ],
)
def test_an_option_that_another_setting_owns_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"{name.lstrip('-').replace('-', '_')} \(.*{reason}"):
        flags({name: 1})


def test_an_option_in_two_spellings_is_refused() -> None:
    with pytest.raises(ValueError, match="page_size is given twice"):
        flags({"page-size": 1, "page_size": 16})


@pytest.mark.parametrize(
    ("worker_type", "expected"),
    [
        (WorkerType.REGULAR, {}),
        (WorkerType.PREFILL, {"--disaggregation-mode": ["prefill"]}),
        (WorkerType.DECODE, {"--disaggregation-mode": ["decode"]}),
        (WorkerType.ENCODER, {"--encoder-only": []}),
    ],
)
def test_a_worker_type_becomes_a_role(
    worker_type: WorkerType, expected: dict[str, list[str]]
) -> None:
    found = flags(worker_type=worker_type)
    roles = {"--disaggregation-mode", "--encoder-only"}
    assert {name: found[name] for name in roles & found.keys()} == expected


def test_each_prefill_engine_has_a_bootstrap_port_of_its_own() -> None:
    name, option = "--disaggregation-bootstrap-port", "disaggregation-bootstrap-port"
    prefill = EngineSpec("p-0", "sglang", "/m", "/log", worker_type=WorkerType.PREFILL)

    def found(spec: EngineSpec, port: int) -> tuple[str, Sequence[int]]:
        start = invocation(spec, Endpoint("10.0.0.1", port), {"PATH": "/bin"})
        command = list(start.command)
        return command[command.index(name) + 1] if name in command else "", start.ports

    ports = [found(prefill, port)[1][0] for port in range(20_000, 22_767)]
    assert (min(ports), max(ports), len(set(ports))) == (30_001, 32_767, 2767)
    assert found(prefill, 20_000) == (str(ports[0]), (ports[0],))
    assert found(replace(prefill, options={option: 9000}), 20_000) == ("9000", (9000,))
    wide = replace(prefill, num_nodes=2, gpu_ids=(0,), dist_init_addr="10.0.0.1:1")
    assert found(wide, 20_000) == ("", ())
    for worker_type in (WorkerType.REGULAR, WorkerType.DECODE, WorkerType.ENCODER):
        assert found(replace(prefill, worker_type=worker_type), 20_000) == ("", ())


def test_a_placeholder_is_no_server() -> None:
    with pytest.raises(ValueError, match="placeholder group starts no engines"):
        flags(worker_type=WorkerType.PLACEHOLDER)


def test_tensor_parallelism_fills_the_gpus() -> None:
    assert flags(gpu_ids=(4, 5, 6, 7))["--tp-size"] == ["4"]
    found = flags({"pp": 2, "ep": 2}, gpu_ids=(4, 5, 6, 7))
    assert (found["--tp-size"], found["--pp-size"], found["--ep-size"]) == (["2"], ["2"], ["2"])
    found = flags({"data-parallel-size": 2}, gpu_ids=(0, 1, 2, 3))
    assert (found["--tp-size"], found["--dp-size"]) == (["2"], ["2"])
    found = flags({"dp-size": 4, "enable-dp-attention": True}, gpu_ids=(0, 1, 2, 3))
    assert (found["--tp-size"], found["--dp-size"]) == (["4"], ["4"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp 3 x pp 1 x dp 1 = 3 ranks, but the engine has 4 GPUs"),
        ({"tp": 2, "tp-size": 4}, "tp_size and tp are the same thing"),
        ({"pp": 0}, "pp = 0: a number of ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flags(options, gpu_ids=(0, 1, 2, 3))


def test_an_engine_over_two_nodes_says_where_they_meet() -> None:
    nodes = {"num_nodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.9:20005"}
    found = flags(gpu_ids=(0, 1), **nodes)
    assert (found["--nnodes"], found["--node-rank"]) == (["2"], ["1"])
    assert found["--dist-init-addr"] == ["10.0.0.9:20005"]
    assert found["--tp-size"] == ["4"]


def test_nodes_without_a_meeting_point_are_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes needs dist_init_addr"):
        flags(num_nodes=2)
    with pytest.raises(ValueError, match="node_rank 2 of 2 nodes"):
        flags(num_nodes=2, node_rank=2, dist_init_addr="h:1")


def test_an_engine_on_the_cpu_gets_defaults_that_options_override() -> None:
    found = flags()
    assert found["--device"] == ["cpu"]
    assert found["--attention-backend"] == ["torch_native"]
    assert found["--max-total-tokens"] == ["16384"]
    found = flags({"max-total-tokens": 99, "attention-backend": None})
    assert found["--max-total-tokens"] == ["99"]
    assert "--attention-backend" not in found
    on_logical_gpus = flags({"device": "cpu"}, gpu_ids=(0, 1))
    assert on_logical_gpus["--device"] == ["cpu"]
    assert on_logical_gpus["--attention-backend"] == ["torch_native"]


def test_an_engine_for_adapters_knows_all_modules_unless_some_are_named() -> None:
    assert flags({"enable-lora": True, "max-lora-rank": 8})["--lora-target-modules"] == ["all"]
    named = {"enable-lora": True, "lora-target-modules": ["q_proj", "v_proj"]}
    assert flags(named)["--lora-target-modules"] == ["q_proj", "v_proj"]
    assert "--lora-target-modules" not in flags({"enable-lora": True, "lora-paths": ["/a"]})
    assert "--lora-target-modules" not in flags()
