"""The kinds of engines, one row each: ask ``kind_of(name)``, not for a kind by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module, resources
from typing import Any

from engines.http import sglang_json
from engines.plain_json import read_json
from engines.protocol import Engine, Loads, old_state
from engines.protocol.kind import Kind, ReadConfig
from engines.protocol.logprob_kind import LogprobRule
from engines.protocol.spec import spelled
from engines.sglang import draft as sglang_draft
from engines.sglang import features as sglang_features
from engines.sglang.environment import nccl_cumem
from engines.sglang.parallel import num_ranks, num_stages, shards
from engines.vllm import command as vllm_command
from engines.vllm import features as vllm_features
from engines.vllm import routes, vllm_json


def _late(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is loaded with its first call: a configuration needs none."""

    def call(*args: Any, **named: Any) -> Any:
        return getattr(import_module(module), name)(*args, **named)

    return call


def _sglang_client(*args: Any, weights_cpu_backup: bool = False, **named: Any) -> Engine:
    """Whether weights outlive a release is decided at the start of an engine that takes these."""
    from engines.http.client import EngineClient

    return EngineClient(*args, **named)


def _sglang_loads(reply: bytes) -> Loads:
    return sglang_json.read_loads(read_json(reply))


def _vllm_loads(reply: bytes) -> Loads:
    return vllm_json.read_loads(reply.decode(errors="replace"))


def _embedded_logprobs(
    raw: Mapping[str, Any], env: Mapping[str, str], read_config: ReadConfig
) -> LogprobRule:
    return LogprobRule(has_temperature=not raw.get("returns_original_logprob"))


def _options_in(package: str) -> Callable[[], frozenset[str]]:
    """The options in the file ``options.txt`` of a package, which tests compare with the server's.

    Read when asked: a configuration without options needs none.
    """

    def read() -> frozenset[str]:
        text = resources.files(package).joinpath("options.txt").read_text()
        return frozenset(map(spelled, text.split()))

    return read


_SGLANG = Kind(
    name="sglang",
    title="SGLang",
    client=_sglang_client,
    read_loads=_sglang_loads,
    invocation=_late("engines.sglang.invocation", "invocation"),
    spans_nodes=True,
    modules=("sglang",),
    quantises_at_start=True,
    old_state=old_state.SGLANG,
    num_stages=num_stages,
    num_gpus=num_ranks,
    shards=shards,
    gpu_share=("mem_fraction_static", None),
    # Run with 0.5.23.  A glm4 never loads its last stage's head, and a llama ends at its start.
    tied_on_stages=frozenset({"qwen2", "qwen3"}),
    nccl_cumem=nccl_cumem,
    preloads_saver=True,
    graph_copy_bytes=800 << 20,  # SGLang's pull request 32718, with GLM-4.7-Flash
    asleep_bytes=1600 << 20,  # 0.5.23 on the CPU, a tiny model
    packs_at_each_load=True,
    why_undrivable=sglang_features.why_undrivable,
    known_options=_options_in("engines.sglang"),
    is_retract_safe=sglang_features.is_retract_safe,
    logprob_rule=sglang_features.logprob_rule,
    # It reads its records by places of the KV cache, once, at the end of a request.
    experts_option="enable_return_routed_experts",
    draft=sglang_draft.draft_of,
    draft_backup_option=sglang_draft.BACKUP_OPTION,
    # SGLang 0.5.23 (managers/scheduler_components/weight_updater.py): the runners of an update are
    # "all" unless the request names others.
    pushes_reach_draft=True,
    # SGLang 0.5.23 (srt/lora/lora.py): without v_proj it refuses a q_proj; without q_proj or
    # gate_proj, the first request with the adapter ends its scheduler.  It adds zeros for k_proj
    # and up_proj itself.
    adapter_stacks={
        ("q_proj", "k_proj", "v_proj"): ("q_proj", "v_proj"),
        ("gate_proj", "up_proj"): ("gate_proj",),
        ("q_a_proj", "kv_a_proj_with_mqa"): ("q_a_proj", "kv_a_proj_with_mqa"),
    },
)
_VLLM = Kind(
    name="vllm",
    title="vLLM",
    client=_late("engines.vllm.client", "VllmClient"),
    old_state=old_state.VLLM,
    invocation=_late("engines.vllm.invocation", "invocation"),
    resume_path=routes.RESUME,
    is_numbered_at_start=False,
    why_open=vllm_features.why_open,
    why_undrivable=vllm_features.why_undrivable,
    known_options=_options_in("engines.vllm"),
    logprob_rule=vllm_features.logprob_rule,
    can_attach=True,
    modules=("vllm",),
    plugin="engines",
    cpu_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),  # 0.32.0
    why_no_adapters="vLLM loads adapters from a folder only",
    loads_path=routes.METRICS,
    read_loads=_vllm_loads,
    generate_path=routes.GENERATE,
    body_names=("request_id", "cache_salt"),
    abort_path=routes.ABORT,
    # Of token ids, of completions, of chats.
    aborted_ids=(f"{routes.REQUEST_PREFIX}{{}}", "cmpl-{}-0", "chatcmpl-{}"),
    has_model_info=False,
    dialect="vllm",
    refusal_in_pause=503,  # 0.33
    has_part_of_prompt_logprobs=False,
    outlives_its_core=True,
    num_stages=num_stages,
    num_gpus=vllm_command.num_ranks,
    shards=vllm_features.shards,
    gpu_share=("gpu_memory_utilization", 0.92),  # 0.32.0
    draft=vllm_features.draft_of,
    asleep_bytes=1150 << 20,  # 0.32.0 on the CPU, a tiny model
)
_EMBEDDED = Kind(
    name="embedded",
    title="the embedded engine",
    client=_sglang_client,
    read_loads=_sglang_loads,
    invocation=_late("engines.embedded.command", "invocation"),
    logprob_rule=_embedded_logprobs,
    has_part_of_prompt_logprobs=False,
    modules=("torch", "safetensors", "tokenizers", "jinja2", "numpy"),
    extra="embedded",
    asleep_bytes=400 << 20,  # a tiny model
)
_FAKE = Kind(
    name="fake",
    title="the fake",
    client=_sglang_client,
    read_loads=_sglang_loads,
    invocation=_late("engines.fake.command", "invocation"),
    old_state=old_state.FAKE,
    spans_nodes=True,
    draft=sglang_draft.draft_of,
    draft_backup_option=sglang_draft.BACKUP_OPTION,
)
# SGLang that another program launched.
_ATTACHED = replace(
    _SGLANG,
    name="attached",
    invocation=None,
    num_gpus=lambda options: 0,
    can_attach=True,
    modules=(),
    preloads_saver=False,
)

KINDS = {kind.name: kind for kind in (_EMBEDDED, _SGLANG, _ATTACHED, _VLLM, _FAKE)}
"""All of them, by name; one more is one more row."""


def kind_of(name: str) -> Kind:
    """The row of a kind.

    Raises:
        ValueError: there is none.
    """
    try:
        return KINDS[name]
    except KeyError:
        known = ", ".join(KINDS)
        raise ValueError(f"engine kind {name!r} is not known; known: {known}") from None
