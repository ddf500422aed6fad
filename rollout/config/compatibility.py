"""What does not go together, in one place: each function has the rows of one moment.

Always true: a row is checked at the first moment when all that it needs is known.  It names the
setting to change, below the path of what is checked, and says what would go together.  A section
refuses what is wrong in itself; a kind of engine refuses options of its own
(``engines.launch.check_spec``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.protocol import ModelInfo, ServerInfo
from engines.protocol.features import Features
from engines.protocol.kind import Kind
from engines.protocol.spec import spelled
from rollout.config.groups import EngineConfig, GroupConfig
from rollout.config.lifecycle import Drain, HealthConfig, LifecycleConfig
from rollout.config.weights import (
    EncodingChoice,
    Transport,
    VerifyConfig,
    WeightsConfig,
    WeightUpdate,
    why_only_whole,
)

Conflicts = Iterator[tuple[str, str]]
_WITH_TENSORS = (WeightUpdate.FULL, WeightUpdate.PARTIAL)


@dataclass(frozen=True, slots=True)
class TiedHead:
    """A head that is tied to the model's embedding.

    Attributes:
        model_type: of the checkpoint's config.
        may_be_left_out: the checkpoint has it as a tensor too, and pushes need not have it.
    """

    model_type: str
    may_be_left_out: bool = False


def of_server(
    weights: WeightsConfig,
    verify: VerifyConfig,
    lifecycle: LifecycleConfig,
    health: HealthConfig,
    groups: Mapping[str, GroupConfig],
) -> Conflicts:
    """When a configuration is read: what a push could not do after the training of a step."""
    if weights.encoding is not EncodingChoice.FULL and not verify.fingerprints:
        yield "weights.encoding", why_only_whole(weights.encoding)
    if weights.store is not None and not verify.fingerprints:
        yield (
            "weights.store",
            "the store verifies what it reads by the fingerprints of the push; set "
            "verify.fingerprints to true",
        )
    is_broadcast = weights.transport is Transport.DISTRIBUTED
    is_broadcast &= weights.update is not WeightUpdate.FROZEN
    for name, group in groups.items():
        kind = group.engine.of_kind
        if group.standby and not health.recover:
            yield (
                f"groups.{name}.standby",
                "health.recover is false, so nothing lets it take the place of an engine; leave "
                "standby out, or set health.recover to true",
            )
        if weights.update is WeightUpdate.LORA and kind.why_no_adapters:
            yield (
                f"groups.{name}.engine.kind",
                f"weights.update = lora: {kind.why_no_adapters}; use full, or kind sglang",
            )
        named = {spelled(name): value for name, value in group.engine.options.items()}
        if named.get(kind.experts_option) and (
            why := why_no_experts(weights.update, lifecycle.drain)
        ):
            yield f"groups.{name}.engine.options", f"{why}, or leave the option out"
        if is_broadcast and (stages := kind.num_stages(group.engine.options)) > 1:
            yield (
                f"groups.{name}.engine.options",
                f"{stages} pipeline stages with weights.transport = distributed: their ranks "
                "cannot all be in a broadcast; use shared_memory, by_value or disk, or one stage",
            )
    if is_broadcast and weights.backend == "nccl" and (why := why_no_nccl(groups)):
        yield (
            "weights.backend",
            f"{why}, and NCCL needs a GPU for each process; use weights.transport "
            "shared_memory or cuda_ipc, or weights.backend gloo (engines with GPUs of their "
            "own: needs_offload false)",
        )


def why_no_experts(update: WeightUpdate, drain: Drain) -> str:
    """Why an engine that computes routed experts of retracted requests again must not report them,
    and what would work."""
    if drain is not Drain.RETRACT or update is WeightUpdate.FROZEN:
        return ""
    return (
        "enable-return-routed-experts with lifecycle.drain = retract: a retracted request is "
        "computed again, so its old tokens would get the experts that the new weights choose; set "
        "lifecycle.drain to abort or finish"
    )


def why_no_nccl(groups: Mapping[str, GroupConfig]) -> str:
    """Why their engines cannot be in one NCCL group with the trainer."""
    reasons = ((name, group.why_no_nccl) for name, group in groups.items())
    return next((f"group {name}: {why}" for name, why in reasons if why), "")


def of_checkpoint(
    engine: EngineConfig,
    update: WeightUpdate,
    *,
    is_quantised: bool,
    head_size: int | None,
    tied: TiedHead | None = None,
) -> Conflicts:
    """Before a launch: engines that are launched, and the checkpoint on this machine.

    Args:
        is_quantised: as it is on disk.
        head_size: elements of an attention head, or None if unknown.
        tied: its head, where that is tied to the embedding.
    """
    kind, named = engine.of_kind, {spelled(name): value for name, value in engine.options.items()}
    if (
        kind.quantises_at_start
        and named.get("quantization") not in (None, "none", "unquant")
        and named.get("load_format") != "flash_rl"
        and not is_quantised
        and update in _WITH_TENSORS
    ):
        yield (
            "engine.options.quantization",
            "the checkpoint is not quantised, so SGLang quantises it at start, and the first push "
            "would end the engine; use a checkpoint in fp8 and push with "
            "rollout.fp8_block_quantiser, or leave quantization out (with "
            "load-format flash_rl it is accepted, and not tested)",
        )
    yield from of_stages(kind, kind.num_stages(engine.options), update, tied, "engine.options")
    sizes = () if engine.gpus else kind.cpu_head_sizes
    if head_size and sizes and head_size not in sizes:
        yield (
            "engine.kind",
            f"the model has attention heads of {head_size} elements, and {kind.title}'s CPU "
            f"kernels know those of {', '.join(map(str, sizes))}; use another model, or kind "
            "sglang or embedded",
        )


def of_stages(
    kind: Kind, num_stages: int, update: WeightUpdate, tied: TiedHead | None, setting: str
) -> Conflicts:
    """At a launch, and when an engine runs: a head in the last of its pipeline stages that pushes
    of the tied embedding in the first may not reach."""
    if num_stages == 1 or tied is None or update not in _WITH_TENSORS:
        return
    stages = (
        f"{num_stages} pipeline stages of {kind.title}, and a head that is tied to the embedding"
    )
    known = kind.tied_on_stages
    if known is not None and tied.model_type not in known:
        yield (
            setting,
            f"{stages} in a model of type {tied.model_type}: the last stage has a head of its own, "
            "which a push of the embedding may not reach (it is known to in models of type "
            f"{' and '.join(sorted(known))}); use one stage, kind vllm, or a checkpoint with "
            "tie_word_embeddings false and a head",
        )
    elif tied.may_be_left_out:
        yield (
            setting,
            f"{stages}, which the checkpoint has as a tensor too: a push without lm_head.weight "
            "would leave the old one in the last stage; set weights.update to full and push "
            "lm_head.weight (not in weights.not_pushed), use one stage, or a checkpoint without "
            "lm_head.weight",
        )


def of_engine(
    engine_id: str,
    features: Features,
    group: GroupConfig,
    drain: Drain,
    *,
    memory_saver: bool,
    weights_cpu_backup: bool,
) -> Conflicts:
    """Before an engine that runs joins its group.

    Args:
        memory_saver: the group releases its memory.
        weights_cpu_backup: its weights must survive a release.
    """
    if features.undrivable:
        yield "engine", f"engine {engine_id}: {features.undrivable}"
    if memory_saver and not features.has_memory_saver:
        yield (
            "needs_offload",
            f"engine {engine_id} runs without a memory saver, so a release would free "
            "no memory; start it with --enable-memory-saver, or set needs_offload to false",
        )
    if memory_saver and not weights_cpu_backup and features.why_draft_lost:
        yield (
            "needs_offload",
            f"engine {engine_id}: {features.why_draft_lost}, or set needs_offload to false",
        )
    if weights_cpu_backup and not features.has_weights_cpu_backup:
        yield (
            "engine.weights_cpu_backup",
            f"engine {engine_id} keeps no copy of its weights while they "
            "are released, and not all of them are pushed; start it with "
            "--enable-weights-cpu-backup, or set needs_offload to false",
        )
    if drain is Drain.RETRACT and not features.is_retract_safe:
        yield (
            "engine",
            f"engine {engine_id}: {features.engine} {features.version} crashes when "
            "memory is released while requests are retracted; set lifecycle.drain to abort "
            "or finish, or use SGLang 0.5.21 or later",
        )
    if features.worker_type is not group.worker_type:
        yield (
            "worker_type",
            f"engine {engine_id} is a {features.worker_type} worker, and this is a group of "
            f"{group.worker_type} ones; put it in a group of its own type",
        )
    if not features.streams_are_cumulative:
        yield (
            "engine",
            f"engine {engine_id} streams only new tokens; start it without "
            "--incremental-streaming-output",
        )


def of_pushes(
    engine_id: str,
    features: Features,
    update: WeightUpdate,
    transport: Transport,
    drain: Drain,
    encoding: EncodingChoice = EncodingChoice.FULL,
) -> Conflicts:
    """At the same moment: pushes that would not reach the engine, or would falsify its replies."""
    if update is WeightUpdate.FROZEN:
        return
    if features.recomputes_experts and (why := why_no_experts(update, drain)):
        yield "engine", f"engine {engine_id}: {why}"
    if why := features.why_no_pushes:
        yield (
            "engine",
            f"engine {engine_id}: {why}; or freeze the model (weights.update: frozen)",
        )
    if not features.takes_tensors:
        yield (
            "engine",
            f"engine {engine_id} has data-parallel replicas, which refuse pushed weights; "
            "start one engine per replica, or freeze the model (weights.update: frozen)",
        )
    whys = {
        Transport.DISTRIBUTED: features.why_no_groups,
        Transport.CUDA_IPC: features.why_no_handles,
    }
    if why := whys.get(transport, ""):
        yield (
            "engine",
            f"weights.transport = {transport} does not reach engine {engine_id}: {why}; "
            "use shared_memory, by_value or disk, or leave weights.transport out",
        )
    if encoding not in (EncodingChoice.FULL, EncodingChoice.AUTO, *features.encodings):
        yield (
            "engine",
            f"weights.encoding = {encoding}: engine {engine_id} of kind {features.engine} applies "
            "whole tensors only; use auto or full, or engines of kind embedded or vllm",
        )


def of_embeddings(
    engine_id: str, config: EngineConfig, info: ServerInfo, model: ModelInfo, encoder: str
) -> Conflicts:
    """Then, of one that may keep embeddings because somebody else launched it.

    Args:
        encoder: what pushes may change that computes embeddings, in words, or empty if nothing.
    """
    variable = config.of_kind.old_state.embeddings_variable
    kinds = [kind for kind in ("image", "audio") if model.raw.get(f"has_{kind}_understanding")]
    # With this option SGLang keeps none.
    if encoder and kinds and info.raw.get("rl_on_policy_target") is None:
        yield (
            "engine",
            f"engine {engine_id} understands {' and '.join(kinds)} input and keeps the "
            f"embeddings that it computed; after a push that changes {encoder} it would go on "
            f"with old ones. Start it with {variable}=0, and say so in engine.env "
            f'({variable}: "0"); or name those tensors in weights.not_pushed',
        )


def of_attached_model(engine_id: str, model: ModelInfo, model_path: str) -> Conflicts:
    """When an engine is attached: its weights have no number of a push, so they are those of its
    own ``model_path``, which is another folder of this machine."""
    theirs, ours = Path(model.model_path), Path(model_path)
    if theirs.is_dir() and ours.is_dir() and not theirs.samefile(ours):
        yield (
            "engine.urls",
            f"engine {engine_id} has the weights of {theirs}, and model_path is {ours}. Start it "
            f"again with these; or set model_path to {theirs}, if that is a copy, or the model to "
            "begin with",
        )


def of_old_state(
    engine_id: str, kind: Kind, info: ServerInfo, *, keeps_embeddings: bool
) -> Conflicts:
    """When an engine of a group runs: options that it was started with and that keep old state.

    Args:
        info: its own report.
        keeps_embeddings: no push changes what computes embeddings.
    """
    for why in kind.old_state.why_refused(info.raw, keeps_embeddings=keeps_embeddings):
        yield "engine", f"engine {engine_id} was started with {why}"


def of_window(weights: WeightsConfig, *, is_copy: bool, is_only_streamed: bool) -> Conflicts:
    """When ``offloaded`` begins: what would be refused at its end, when it pushes.

    Args:
        is_copy: it copies the tensors while it is open; else a function gives them at its end.
        is_only_streamed: the transport reads tensors while engines load them.
    """
    if weights.update is WeightUpdate.FROZEN and not is_copy:
        yield (
            "update",
            "offloaded(weights): weights.update is frozen, so the server never takes new weights; "
            "leave the function out",
        )
    if is_copy and is_only_streamed and weights.update in _WITH_TENSORS:
        yield "transport", why_no_copy(weights.transport)


def why_no_copy(transport: Transport) -> str:
    """Why a push whose tensors are copied before it is sent cannot use this transport."""
    return (
        f"weights.transport = {transport}: it reads the tensors while engines load them, so "
        "make_push and window.push cannot copy them; use offloaded(weights=function), or "
        "offload() and then push(tensors) or pusher.push(tensors)"
    )
