"""What does not go together, and the message about it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from engines.kinds import KINDS
from engines.protocol import ModelInfo, ServerInfo, WorkerType
from engines.protocol.features import Features, read_features
from rollout.config import (
    Drain,
    EncodingChoice,
    EngineConfig,
    EngineKind,
    GroupConfig,
    RolloutConfig,
    ServerConfig,
    Transport,
    WeightUpdate,
)
from rollout.config.compatibility import (
    TiedHead,
    of_checkpoint,
    of_embeddings,
    of_engine,
    of_pushes,
)
from rollout.core.errors import ConfigError

GROUP = GroupConfig(engine=EngineConfig(kind=EngineKind.EMBEDDED))
GOOD = Features(
    engine="sglang",
    version="0.5.23",
    worker_type=WorkerType.REGULAR,
    has_weight_session=True,
    is_retract_safe=True,
    has_memory_saver=True,
    has_weights_cpu_backup=True,
    num_payloads=1,
    takes_tensors=True,
    streams_are_cumulative=True,
    moves_experts=False,
    undrivable="",
)


def why(
    update: WeightUpdate = WeightUpdate.FULL,
    drain: Drain = Drain.ABORT,
    transport: Transport = Transport.AUTO,
    **changed: Any,
) -> str:
    """All that keeps such an engine out of a group that offloads."""
    features = replace(GOOD, **changed)
    conflicts = chain(
        of_engine(
            "policy-0",
            features,
            GROUP,
            drain,
            memory_saver=True,
            weights_cpu_backup=True,
        ),
        of_pushes("policy-0", features, update, transport, drain),
    )
    return "; ".join(f"{setting}: {reason}" for setting, reason in conflicts)


def test_an_engine_with_everything_is_let_in() -> None:
    assert why() == ""


@pytest.mark.parametrize(
    ("changed", "mending"),
    [
        ({"undrivable": "SGLang 0.4 cannot be driven"}, "cannot be driven"),
        ({"has_memory_saver": False}, "--enable-memory-saver"),
        ({"has_weights_cpu_backup": False}, "--enable-weights-cpu-backup"),
        ({"worker_type": WorkerType.DECODE}, "group of its own type"),
        ({"takes_tensors": False}, "one engine per replica"),
        ({"streams_are_cumulative": False}, "--incremental-streaming-output"),
    ],
)
def test_what_an_engine_lacks_is_reported_with_what_fixes_it(
    changed: dict[str, Any], mending: str
) -> None:
    said = why(**changed)
    assert mending in said
    assert "engine policy-0" in said


def test_a_draft_that_a_release_would_lose_is_refused_with_what_keeps_it() -> None:
    lost = "its draft /d has no copy; start it with --enable-draft-weights-cpu-backup"
    features = replace(GOOD, why_draft_lost=lost)

    def refusals(*, memory_saver: bool, weights_cpu_backup: bool) -> list[tuple[str, str]]:
        settings = {"memory_saver": memory_saver, "weights_cpu_backup": weights_cpu_backup}
        return list(
            of_engine(
                "a",
                features,
                GROUP,
                Drain.ABORT,
                **settings,
            )
        )

    ((setting, reason),) = refusals(memory_saver=True, weights_cpu_backup=False)
    assert setting == "needs_offload"
    assert reason == f"engine a: {lost}, or set needs_offload to false"
    assert refusals(memory_saver=True, weights_cpu_backup=True) == []
    assert refusals(memory_saver=False, weights_cpu_backup=False) == []


@pytest.mark.parametrize(
    ("engine", "raw", "way_out"),
    [
        ("sglang", {"speculative_algorithm": "EAGLE3"}, "--enable-draft-weights-cpu-backup"),
        ("sglang", {"speculative_algorithm": "NGRAM"}, ""),
        ("sglang", {"speculative_algorithm": None}, ""),
        ("sglang", {}, ""),
        (
            "sglang",
            {"speculative_algorithm": "NEXTN", "enable_draft_weights_cpu_backup": True},
            "",
        ),
        ("sglang", {"speculative_algorithm": "EAGLE", "enable_weights_cpu_backup": True}, ""),
        ("vllm", {"speculative_config": {"method": "mtp"}}, "engine.weights_cpu_backup to true"),
        ("vllm", {"speculative_config": {"method": "ngram"}}, ""),
        ("embedded", {"speculative_algorithm": "EAGLE"}, ""),
    ],
)
def test_a_server_says_whether_a_release_would_lose_its_draft(
    engine: str, raw: dict[str, Any], way_out: str
) -> None:
    info = ServerInfo("0.5.23", engine, True, bool(raw.get("enable_weights_cpu_backup")), raw=raw)
    found = read_features(info, frozenset(), KINDS[engine]).why_draft_lost
    assert way_out in found
    assert bool(found) is bool(way_out)


def test_a_frozen_model_may_have_replicas() -> None:
    assert why(WeightUpdate.FROZEN, takes_tensors=False) == ""


def test_an_engine_that_is_never_released_needs_no_memory_saver() -> None:
    bare = replace(GOOD, has_memory_saver=False, has_weights_cpu_backup=False)
    group = GROUP.model_copy(update={"needs_offload": False})
    assert not list(
        of_engine("a", bare, group, Drain.FINISH, memory_saver=False, weights_cpu_backup=False)
    )


@pytest.mark.parametrize("drain", list(Drain))
def test_requests_are_retracted_only_where_the_engine_survives_that(drain: Drain) -> None:
    reason = why(drain=drain, is_retract_safe=False)
    if drain is Drain.RETRACT:
        assert "crashes when memory is released while requests are retracted" in reason
        assert "set lifecycle.drain to abort or finish" in reason
    else:
        assert reason == ""
    assert why(drain=drain) == ""


@pytest.mark.parametrize("drain", list(Drain))
@pytest.mark.parametrize("update", [WeightUpdate.FULL, WeightUpdate.FROZEN])
def test_an_engine_that_computes_routed_experts_again_keeps_no_request_over_a_push(
    drain: Drain, update: WeightUpdate
) -> None:
    said = why(update, drain, recomputes_experts=True)
    is_refused = drain is Drain.RETRACT and update is WeightUpdate.FULL
    assert bool(said) is is_refused
    if is_refused:
        for part in ("engine policy-0", "return-routed-experts", "lifecycle.drain = retract"):
            assert part in said
        assert "set lifecycle.drain to abort or finish" in said
    assert why(update, drain) == ""


@pytest.mark.parametrize(
    ("kind", "drain", "options", "is_refused"),
    [
        ("sglang", "retract", {"enable-return-routed-experts": True}, True),
        ("sglang", "retract", {"--enable_return_routed_experts": True}, True),
        ("sglang", "retract", {"enable-return-routed-experts": False}, False),
        ("sglang", "retract", {}, False),
        ("sglang", "abort", {"enable-return-routed-experts": True}, False),
        ("sglang", "finish", {"enable-return-routed-experts": True}, False),
        ("vllm", "retract", {"enable-return-routed-experts": True}, False),
    ],
)
def test_routed_experts_and_a_drain_by_retracting_are_refused_when_a_configuration_is_read(
    kind: str, drain: str, options: dict[str, Any], is_refused: bool
) -> None:
    engine = {"kind": kind, "options": options}
    groups = {"main": {"engine": engine, "needs_offload": False}}
    server = {"model_path": "/m", "groups": groups, "lifecycle": {"drain": drain}}
    values = {"servers": {"policy": server}}
    if not is_refused:
        RolloutConfig.from_dict(values)
        return
    refusal = (
        r"enable-return-routed-experts with lifecycle\.drain = retract: .*; "
        r"set lifecycle\.drain to abort or finish, or leave the option out"
    )
    with pytest.raises(ConfigError, match=refusal) as caught:
        RolloutConfig.from_dict(values)
    (mistake,) = caught.value.mistakes
    assert mistake.setting == "servers.policy.groups.main.engine.options"


@pytest.mark.parametrize(
    ("engine", "raw", "recomputes"),
    [
        ("sglang", {"enable_return_routed_experts": True}, True),
        ("sglang", {"enable_return_routed_experts": False}, False),
        ("sglang", {}, False),
        ("vllm", {"enable_return_routed_experts": True}, False),
        ("embedded", {"enable_return_routed_experts": True}, False),
    ],
)
def test_a_server_says_whether_it_computes_routed_experts_again(
    engine: str, raw: dict[str, Any], recomputes: bool
) -> None:
    info = ServerInfo("0.5.23", engine, True, False, raw=raw)
    assert read_features(info, frozenset(), KINDS[engine]).recomputes_experts is recomputes


@pytest.mark.parametrize(
    ("transport", "update", "is_refused"),
    [
        (Transport.DISTRIBUTED, WeightUpdate.FULL, True),
        (Transport.DISTRIBUTED, WeightUpdate.PARTIAL, True),
        (Transport.DISTRIBUTED, WeightUpdate.FROZEN, False),
        (Transport.SHARED_MEMORY, WeightUpdate.FULL, False),
        (Transport.AUTO, WeightUpdate.FULL, False),
        (Transport.CUDA_IPC, WeightUpdate.FULL, True),
        (Transport.CUDA_IPC, WeightUpdate.FROZEN, False),
    ],
)
def test_a_named_transport_that_the_engine_does_not_take_is_refused(
    transport: Transport, update: WeightUpdate, is_refused: bool
) -> None:
    whys = {Transport.DISTRIBUTED: "it joins none", Transport.CUDA_IPC: "it opens none"}
    said = why(
        update, transport=transport, why_no_groups="it joins none", why_no_handles="it opens none"
    )
    refusal = f"transport = {transport} does not reach engine policy-0: {whys.get(transport)}; use"
    assert (refusal in said) is is_refused
    assert bool(said) is is_refused


def server_of(settings: dict[str, Any]) -> ServerConfig:
    groups = {"main": {"engine": {"kind": "fake"}}}
    return ServerConfig.model_validate({"model_path": "/m", "groups": groups, **settings})


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"weights": {"update": "full"}}, False),
        ({"weights": {"update": "lora"}}, True),
        ({"weights": {"update": "partial"}}, True),
        ({"verify": {"fingerprints": False}}, True),
    ],
)
@pytest.mark.parametrize("encoding", ["delta", "auto"])
def test_deltas_need_full_pushes_with_fingerprints(
    settings: dict[str, Any], encoding: str, is_refused: bool
) -> None:
    server_of(settings)
    refusal = pytest.raises(ValueError, match="a delta is verified by the fingerprints")
    weights = settings.get("weights", {})
    with refusal if is_refused else nullcontext():
        server_of(settings | {"weights": weights | {"encoding": encoding}})


def test_a_store_needs_fingerprints() -> None:
    server_of({"weights": {"store": True}})
    with pytest.raises(ValueError, match=r"set verify\.fingerprints to true"):
        server_of({"weights": {"store": True}, "verify": {"fingerprints": False}})


@pytest.mark.parametrize(
    ("options", "update", "is_quantised", "is_refused"),
    [
        ({"quantization": "fp8"}, WeightUpdate.FULL, False, True),
        ({"--quantization": "w8a8_int8"}, WeightUpdate.PARTIAL, False, True),
        ({"quantization": "fp8"}, WeightUpdate.FULL, True, False),
        ({"quantization": "fp8"}, WeightUpdate.FROZEN, False, False),
        ({"quantization": "fp8"}, WeightUpdate.LORA, False, False),
        ({"quantization": "fp8", "load-format": "flash_rl"}, WeightUpdate.FULL, False, False),
        ({"quantization": None}, WeightUpdate.FULL, False, False),
        ({}, WeightUpdate.FULL, False, False),
    ],
)
def test_an_engine_that_quantises_its_checkpoint_itself_takes_no_push(
    options: dict[str, Any], update: WeightUpdate, is_quantised: bool, is_refused: bool
) -> None:
    engine = EngineConfig(kind=EngineKind.SGLANG, options=options)
    found = dict(of_checkpoint(engine, update, is_quantised=is_quantised, head_size=7))
    said = found.get("engine.options.quantization", "")
    assert ("rollout.fp8_block_quantiser" in said) is is_refused
    assert bool(said) is is_refused


@pytest.mark.parametrize(
    ("kind", "stages", "update", "tied", "advice"),
    [
        ("sglang", 2, WeightUpdate.FULL, TiedHead("glm4"), "kind vllm"),
        ("sglang", 2, WeightUpdate.PARTIAL, TiedHead("llama"), "kind vllm"),
        ("sglang", 2, WeightUpdate.FULL, TiedHead("qwen3"), ""),
        ("sglang", 2, WeightUpdate.FULL, TiedHead("qwen2"), ""),
        ("sglang", 2, WeightUpdate.FULL, None, ""),
        ("sglang", 1, WeightUpdate.FULL, TiedHead("glm4"), ""),
        ("sglang", 2, WeightUpdate.FROZEN, TiedHead("glm4"), ""),
        ("vllm", 2, WeightUpdate.FULL, TiedHead("glm4"), ""),
        ("vllm", 2, WeightUpdate.FULL, TiedHead("qwen3", may_be_left_out=True), "push lm_head"),
        ("vllm", 1, WeightUpdate.FULL, TiedHead("qwen3", may_be_left_out=True), ""),
    ],
)
def test_a_head_of_a_last_stage_that_a_push_may_not_reach_is_refused(
    kind: str, stages: int, update: WeightUpdate, tied: TiedHead | None, advice: str
) -> None:
    engine = EngineConfig(kind=EngineKind(kind), options={"pipeline-parallel-size": stages})
    found = dict(of_checkpoint(engine, update, is_quantised=False, head_size=None, tied=tied))
    why = found.get("engine.options", "")
    assert bool(why) is bool(advice)
    assert advice in why
    assert not why or "2 pipeline stages of" in why


@pytest.mark.parametrize(
    ("model", "info", "encoder", "kinds"),
    [
        ({"has_image_understanding": True}, {}, "tensor 'visual.x'", "image input"),
        (
            {"has_image_understanding": True, "has_audio_understanding": True},
            {"rl_on_policy_target": None},
            "tensor 'visual.x'",
            "image and audio input",
        ),
        ({"has_image_understanding": False}, {}, "tensor 'visual.x'", ""),
        ({"has_image_understanding": True}, {}, "", ""),
        ({"has_image_understanding": True}, {"rl_on_policy_target": "fsdp"}, "tensor 'v'", ""),
    ],
)
def test_an_engine_that_keeps_embeddings_of_an_encoder_that_is_pushed_is_refused(
    model: dict[str, Any], info: dict[str, Any], encoder: str, kinds: str
) -> None:
    engine = EngineConfig(kind=EngineKind.SGLANG)
    server = ServerInfo("0.5.23", "sglang", True, False, raw=info)
    found = dict(of_embeddings("a", engine, server, ModelInfo("/m", "0", model), encoder))
    said = found.get("engine", "")
    assert bool(said) is bool(kinds)
    assert kinds in said
    assert encoder in said or not said
    assert "Start it with SGLANG_VLM_CACHE_SIZE_MB=0" in said or not said


@pytest.mark.parametrize("encoding", EncodingChoice)
@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("sglang", {}),
        ("vllm", {"encodings": []}),
        ("vllm", {"encodings": ["delta"]}),
        ("embedded", {"encodings": ["delta"]}),
    ],
)
def test_an_engine_that_applies_whole_tensors_only_is_refused_where_deltas_are_named(
    kind: str, raw: dict[str, Any], encoding: EncodingChoice
) -> None:
    server = ServerInfo("1", kind, True, False, raw=raw)
    features = read_features(server, frozenset(), KINDS[kind])
    found = of_pushes("a", features, WeightUpdate.FULL, Transport.AUTO, Drain.ABORT, encoding)
    said = dict(found).get("engine", "")
    is_refused = encoding == "delta" and raw != {"encodings": ["delta"]}
    assert said.startswith("weights.encoding = delta: engine a of kind ") is is_refused
    assert ("use auto or full, or engines of kind embedded or vllm" in said) is is_refused


def test_a_standby_without_recovery_is_refused() -> None:
    settings = {
        "model_path": "/m",
        "groups": {"main": {"standby": 1, "engine": {"kind": "embedded"}}},
    }
    assert ServerConfig.model_validate(settings).groups["main"].standby == 1
    with pytest.raises(ValueError, match=r"health\.recover is false"):
        ServerConfig.model_validate(settings | {"health": {"recover": False}})
