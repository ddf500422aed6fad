"""Every benchmark as a program: it runs in its smallest size, and its JSON has these keys."""

import json
import os
from typing import Any

import pytest

from tests.support.processes import program, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RATE = {"gib_per_s", "cpu_s_per_gib"}
PUSH = RATE | {"first_gib_per_s", "of_memcpy"}
FINGERPRINT = RATE | {"of_memcpy"}
PUSHES = {
    "tensors": None,
    "bytes": None,
    "shared_memory_copied": PUSH,
    "shared_memory_copied_unchecked": PUSH,
    "shared_memory_streamed": PUSH,
    "shared_memory_streamed_unchecked": PUSH,
    "by_value_copied": PUSH,
    "by_value_streamed": PUSH,
    "distributed_gloo": PUSH,
    "disk": PUSH,
    "fingerprint_xxh3": FINGERPRINT,
    "fingerprint_sums": FINGERPRINT,
}
OF_LINK = {"seconds", "link_bytes", "density", "of_information"}
LINK: dict[str, Any] = {"why_not": str}
if not os.geteuid():  # network namespaces need root
    LINK = {
        "1gbit": {
            "bytes": None,
            **{
                f"{density:g}_{way}": OF_LINK
                for density in (0.001, 0.01, 0.03, 0.1, 0.5)
                for way in ("full", "delta", "auto", "peer")
            },
            **{f"trained_{way}": OF_LINK for way in ("full", "delta", "peer")},
        }
    }
SECONDS = {"seconds", "paused_s", "first_seconds"}
GATE = {"tensors": None, "bytes": None, "copied": SECONDS, "streamed": SECONDS}
STORE = {
    "write_first": RATE,
    "write_reused": RATE,
    "restore_local": RATE,
    "restore_local_verified_before": RATE,
    "restore_local_safe_open": RATE,
    "verify_local": RATE,
    "restore_half_remote": RATE,
    "restore_three_peers": RATE,
    "disk_warm": RATE,
    "disk_warm_verified": RATE,
    "disk_warm_safe_open": RATE,
    "disk_cold": RATE,
    **{
        f"node_{what}": {"seconds", "sent_bytes", "of_whole"}
        for what in ("whole", *(f"delta_{one:g}" for one in (0.001, 0.01, 0.03, 0.1)))
    },
}
NUMS_OF_RANKS = ("2",)
RANKS = {
    "tensors": None,
    "bytes": None,
    "bucket_bytes": None,
    **{
        num: {
            **{
                way: {
                    "seconds": None,
                    "cpu_s_per_gib": None,
                    "sent_bytes": {str(rank) for rank in range(int(num))},
                    "largest_share": None,
                }
                for way in ("replicated", "sharded", "generator", "peer")
            },
            "gather": {"seconds": None, "cpu_s_per_gib": None},
            "cpu_to_one_rank": None,
            "cpu_to_one_rank_sharded": None,
            "beyond_model_buckets": None,
            "peak_rss_mib": None,
        }
        for num in NUMS_OF_RANKS
    },
}
MODE = {"samples_per_s", "engine_busy", "driver_cpu_s_per_1k"}
ROUTER = {
    "requests_per_s",
    "cpu_ms_per_1k",
    "peak_rss_mib",
    "added_p50_ms",
    "added_p99_ms",
    "errors",
}
NUMS_OF_ENGINES = {"4", "64", "1024"}
OF_SIMULATED = {"cached", "cached_ratio", "makespan_s", "makespan_ratio"}
SIMULATED = {
    *("clairvoyant", "affinity", "least_in_flight", "sticky_hash", "bounded_hash"),
    *("sglang_cache_aware", "smg_cache_aware", "kv_aware", "llm_d"),
}
TURNS = {"first_s", "turns_per_s", "cpu_ms_per_turn", "errors", "rendered"}
LOST_ACTOR = {
    *("kills", "serving_s", "worst_serving_s", "command_s", "worst_command_s"),
    *("lost_requests", "lost_tokens"),
}
RECOVERY = {
    *("kills", "detect", "boot", "admit", "restore", "verify", "total", "beyond_load"),
    *("worst_total", "worst_beyond_load"),
}
SAVER = {
    f"{command}{kind}_gib_per_s"
    for command in ("release", "resume")
    for kind in ("", "_first", "_worst")
}
UPDATE = {
    f"{part}_s" for part in ("make", "handle", "apply", "update", "verify", "continue_generation")
}
SYNC = UPDATE | {
    f"{part}_s" for part in ("pause_generation", "flush_cache", "rest", "median", "worst")
}
SYNC |= {"repeats"}
STEP = SYNC | {"offload_s", "onload_s", "release_memory_occupation_s"}
STEP |= {"onload_weights_s", "onload_kv_s"}
STEP_SHARE = "share of one core, a step of 10 s (%)"

OF_SERVER = {
    f"{what}_{count}" for what in ("tokens_per_s", "cpu_ms_per_token") for count in (1, 32)
}

KEYS: dict[str, dict[str, Any]] = {
    "embedded": {
        "embedded": OF_SERVER | {"boot_cpu_s"},
        "generate_batch": OF_SERVER,
        "llama_cpp": {"why_not": str},
        "repeats": None,
    },
    "gpu": {
        "limits": {
            "host_memcpy",
            "pcie_in",
            "pcie_out",
            "pageable_out",
            "gpu_copy",
            "fingerprint",
            "fingerprint_worst",
        },
        "saver": {"goal": str, "none_1_gib": SAVER, "backup_1_gib": SAVER},
        "qwen3-0.6b": {
            "goal": str,
            "routes": str,
            "verified_by": str,
            "start_s": None,
            "tensors": None,
            "bytes": None,
            "sync": SYNC | {"gib_per_s"},
            "step": STEP,
            "peak_bytes": {"sync_trainer", "sync_engine", "step_trainer", "step_engine"},
        },
        "is_real": None,
        "repeats": None,
    },
    "lifecycle": {
        "repeats": None,
        "overhead_s": {"2"},
        "cycle_s": {"2"},
        "unverified_s": {"2"},
        "sequential_s": {"2"},
        "rpcs": {"2"},
        "coordinator_cpu_ms_per_engine": {"2"},
        "verify_unchanged_s_per_engine": None,
        "in_memory_cpu_ms_per_engine": {"2", "16"},
        "in_memory_growth": None,
    },
    "recovery": {
        "model_bytes": None,
        "disk": RECOVERY,
        "standby": RECOVERY | {"asleep_bytes"},
        "boot_s": None,
        "lost_actors": dict.fromkeys(("none", "router", "group", "server"), LOST_ACTOR),
        "driver_journal": {"plain_cpu_ms", "journal_cpu_ms", "journal_bytes"},
        "step_delay_s": {
            "generate",
            "pause_generation",
            "flush_cache",
            "update_weights_from_tensor",
        },
    },
    "rollout": {
        "gather_all": MODE,
        "sync": MODE,
        "partial": MODE,
        "one_ahead": MODE,
        "async": MODE,
        "ideal_samples_per_s": None,
        "in_flight": None,
        "repeats": None,
    },
    "router": {
        "ours": {"small": ROUTER, "sse": ROUTER},
        "direct": {"small": ROUTER, "sse": ROUTER},
        "peers": set(),
        "choice_ns": {
            "least_in_flight": NUMS_OF_ENGINES,
            "affinity": NUMS_OF_ENGINES,
            "prefix": NUMS_OF_ENGINES,
        },
        "turns": {kind: {"p50_ms", "cpu_ms_per_1k", "errors"} for kind in ("turn", "turn_sse")},
        "agents": {"4k": dict.fromkeys(("agents", "renderers", "spliced"), TURNS)},
        "cached_share": {"least_in_flight", "prefix"},
        "affinity": {
            "agents": dict.fromkeys(SIMULATED, OF_SIMULATED),
        },
        "ray_call": {
            "idle_p50_ms",
            "idle_p99_ms",
            "loaded_p50_ms",
            "loaded_p99_ms",
            "requests_per_s_meanwhile",
        },
        "repeats": None,
    },
    "timeline": {
        "span_with_call_us": {"in memory", "and in a file"},
        "counted, 2 engines": {"spans in a step, each with a call in it", "cpu_ms", STEP_SHARE},
        "live, 2 engines": {
            "requests in a step",
            "cpu_ms, on",
            "cpu_ms, off",
            "cpu_ms of recording",
            "its first quartile",
            "its third quartile",
            "share of the CPU of such a step (%)",
            STEP_SHARE,
        },
    },
    "weights": {
        "memcpy": RATE,
        "delta": {
            "bytes": None,
            **{
                f"{transport}_{density:g}_{encoding}": dict.fromkeys(
                    ("seconds", "sent_bytes", "of_information", "is_delta")
                )
                for transport in ("by_value", "shared_memory")
                for density in (0.001, 0.01, 0.03, 0.1, 0.5)
                for encoding in ("full", "delta", "auto")
            },
        },
        "link": LINK,
        "push": {"dense": PUSHES, "experts": PUSHES},
        "store": {"dense": STORE, "experts": STORE},
        "gate": {"dense": GATE, "moe": GATE},
        "beside": {
            "model_bytes": None,
            "push_s": {"store_on", "store_off"},
            "keep_s": None,
            "on_to_off": None,
        },
        "ranks": {"experts": RANKS},
        "bytes": None,
        "repeats": None,
    },
}
MACHINE = {"cores", "memory_gib", "versions"}
# Where Mooncake is installed.
OPTIONAL = {"restore_half_mooncake"}
ARGUMENTS = {"gpu": ["--families", "limits", "saver", "qwen3-0.6b"]}
MARKS = {
    "embedded": [pytest.mark.embedded],
    "gpu": [pytest.mark.embedded],
    "lifecycle": [pytest.mark.ray],
    "recovery": [pytest.mark.ray, pytest.mark.embedded],
    "router": [pytest.mark.ray, pytest.mark.embedded],
    "weights": [pytest.mark.embedded],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, [])) for name in sorted(KEYS)]
)
def test_a_benchmark_runs_and_reports_its_figures(name: str) -> None:
    more = ARGUMENTS.get(name, [])
    with program("-m", f"benchmarks.{name}", "--smoke", "--json", *more) as benchmark:
        assert benchmark.finish(400) == 0, benchmark.output
        assert wait_until(lambda: not benchmark.descendants(), 20), benchmark.descendants()
    lines = [line for line in benchmark.output.splitlines() if line.startswith("{")]
    # The others are rows, printed as they were measured.
    (result,) = [one for one in map(json.loads, lines) if "machine" in one]
    assert set(result.pop("machine")) == MACHINE
    assert_keys(result, KEYS[name], name)


def assert_keys(figures: Any, expected: Any, path: str) -> None:
    """Compare keys on all levels; a leaf is a number, or a text where ``str`` is expected."""
    if expected in (None, str):
        assert isinstance(figures, expected or int | float), f"{path}: {figures!r}"
        return
    assert set(figures) - OPTIONAL == set(expected), path
    for key in expected:
        inner = expected[key] if isinstance(expected, dict) else None
        assert_keys(figures[key], inner, f"{path}.{key}")
