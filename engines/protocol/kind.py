"""What this library asks of a kind of engine before one runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from engines.protocol import Endpoint, Engine, Loads
from engines.protocol.logprob_kind import BEFORE_CUTS, LogprobRule
from engines.protocol.old_state import NOTHING_KEPT, OldState
from engines.protocol.spec import EngineSpec, Invocation

Invoke = Callable[[EngineSpec, Endpoint, Mapping[str, str]], Invocation]
"""Command and environment of an engine; the mapping is the environment that it inherits."""


ReadConfig = Callable[[str], Mapping[str, Any]]
"""Reads the ``generation_config.json`` of a checkpoint's folder, or empty if there is none."""


def _before_cuts(
    raw: Mapping[str, Any], env: Mapping[str, str], read_config: ReadConfig
) -> LogprobRule:
    return BEFORE_CUTS


@dataclass(frozen=True, slots=True)
class Shards:
    """Over how many GPUs an engine divides each part of its model.

    Attributes:
        attention: also embeddings and KV cache.
        dense: feed-forward blocks without experts, and the head.
        pipeline: stages, each with a part of the layers.
        pools: KV caches with requests of their own.
    """

    attention: int = 1
    dense: int = 1
    experts: int = 1
    pipeline: int = 1
    pools: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of engine: what is true of all its versions.

    What a running server has, by its version and its flags, is in ``engines.protocol.features``.

    Attributes:
        name: value of ``EngineSpec.kind``.
        title: its name in text.
        client: makes the client of one that runs, from ``endpoint``, ``engine_id``,
            ``weights_cpu_backup`` and, where they are not the default ones, ``deadlines``.
        invocation: how one is started, or None where only other programs start it.
        resume_path: path of its endpoint that ends a pause.
        is_numbered_at_start: its command line gives it the number of its weight version.
        why_open: why one must not listen at a host, by whether calls that change it need a key, or
            empty if it may.
        can_attach: one of this kind that runs already can be named by its URL.
        spans_nodes: one engine can be on several nodes.
        modules: modules that its interpreter must have.
        plugin: module of this package that an interpreter of its own must have too.
        extra: extra of this package that brings its modules.
        cpu_head_sizes: elements of an attention head that it takes on a CPU, or empty for all.
        quantises_at_start: its options can quantise a checkpoint that is not.
        old_state: what it keeps of old weights, and what is done about it.
        num_stages: its pipeline stages, by its options.
        num_gpus: the GPUs of an engine whose settings do not say how many, by its options.
        shards: how it divides a model, by its options and its number of GPUs, or None if they do
            not fit each other, or for a kind that has no such sizes.
        gpu_share: its option, in ``spelled`` form, for the share of a GPU that weights and KV cache
            take, and its default, or None for a default that only the engine knows.
        tied_on_stages: types of models (``model_type``) whose last stage has a head that a push of
            the tied embedding reaches, or None for all.
        nccl_cumem: its ``NCCL_CUMEM_ENABLE``, by options, environment and nodes of an engine; the
            result is None if only its hosts know.  None for a kind that leaves it to NCCL.
        preloads_saver: the library of its memory saver is preloaded on GPUs, see
            ``engines.process.cuda_runtime``.
        graph_copy_bytes: host memory of one GPU's CUDA graphs while they are released, about.
        asleep_bytes: host memory of an engine whose memory is released, for each of its GPUs or on
            the CPU, about.
        packs_at_each_load: a load from a path restores and packs all modules again.
        why_no_adapters: why no adapter can be pushed to it.
        adapter_stacks: modules that it serves as one -> those of them that an adapter with any of
            them needs.
        loads_path: path of its endpoint that reports its queue and its tokens.
        read_loads: the reply of that; a malformed one raises as ``WRONG_FORM`` has.
        generate_path: path of its endpoint that takes and gives token ids.
        body_names: in a request's body, of its id and of its key of cached prefixes.
        abort_path: path of its endpoint that ends requests.
        aborted_ids: what its abort names for a request with id ``{}``, one for each endpoint that
            generates; none where it takes SGLang's body.
        has_model_info: it has ``/model_info``.
        why_undrivable: why a version with these endpoints cannot be driven.
        is_retract_safe: a version may be flushed and released while requests are retracted.
        experts_option: its option, in ``spelled`` form, with which it reports routed experts, if it
            computes those of a retracted request again; else empty.
        draft: what drafts its tokens and has weights, by options or its own report, or empty if
            nothing does.
        draft_backup_option: its option, in ``spelled`` form, that keeps a copy of the draft's
            weights alone through a release, or empty where only one of all weights does.
        pushes_reach_draft: tensors of a push whose names the draft has are loaded into it too.
        dialect: dialect of its routes that generate, in the router's table.
        refusal_in_pause: status of its reply to a request that comes in a pause; 0 if it holds it.
        has_part_of_prompt_logprobs: asked for the log-probs of a prompt's end, it may take the
            beginning from its prefix cache.
        logprob_rule: at which step of sampling one takes its log-probs, by the ``raw`` of its
            ``ServerInfo`` and the environment that its settings give it.  Raises ``ValueError`` if
            what it calls log-probs are none.
        known_options: options of the pinned version, in ``spelled`` form, or empty if all are
            checked before a start.
        outlives_its_core: it answers requests with errors when its core has ended.
    """

    name: str
    title: str
    client: Callable[..., Engine]
    invocation: Invoke | None = None
    resume_path: str = "/continue_generation"
    is_numbered_at_start: bool = True
    why_open: Callable[[str, bool], str] = lambda host, has_key: ""
    can_attach: bool = False
    spans_nodes: bool = False
    modules: tuple[str, ...] = ()
    plugin: str = ""
    extra: str = ""
    cpu_head_sizes: tuple[int, ...] = ()
    quantises_at_start: bool = False
    old_state: OldState = NOTHING_KEPT
    num_stages: Callable[[Mapping[str, Any]], int] = lambda options: 1
    num_gpus: Callable[[Mapping[str, Any]], int] = lambda options: 0
    shards: Callable[[Mapping[str, Any], int], Shards | None] = lambda options, num_gpus: None
    gpu_share: tuple[str, float | None] = ("", None)
    tied_on_stages: frozenset[str] | None = None
    nccl_cumem: Callable[[Mapping[str, Any], Mapping[str, str], int], str | None] | None = None
    preloads_saver: bool = False
    graph_copy_bytes: int = 0
    asleep_bytes: int = 0
    packs_at_each_load: bool = False
    why_no_adapters: str = ""
    adapter_stacks: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    read_loads: Callable[[bytes], Loads]
    loads_path: str = "/v1/loads"
    generate_path: str = "/generate"
    body_names: tuple[str, str] = ("rid", "extra_key")
    abort_path: str = "/abort_request"
    aborted_ids: tuple[str, ...] = ()
    has_model_info: bool = True
    why_undrivable: Callable[[str, Set[str]], str] = lambda version, endpoints: ""
    is_retract_safe: Callable[[str], bool] = lambda version: True
    experts_option: str = ""
    draft: Callable[[Mapping[str, Any]], str] = lambda options: ""
    draft_backup_option: str = ""
    pushes_reach_draft: bool = False
    dialect: str = "sglang"
    refusal_in_pause: int = 0
    has_part_of_prompt_logprobs: bool = True
    logprob_rule: Callable[[Mapping[str, Any], Mapping[str, str], ReadConfig], LogprobRule] = (
        _before_cuts
    )
    known_options: Callable[[], Set[str]] = frozenset
    outlives_its_core: bool = False
