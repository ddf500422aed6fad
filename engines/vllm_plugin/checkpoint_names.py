"""The tensors of a checkpoint, found again in the parameters of a vLLM model.

Always true: every tensor is a view of a parameter, so that its bytes are those the model computes
with.

vLLM joins some linear layers (``qkv_proj``) and pads the vocabulary.  With one rank in each
pipeline stage and without quantisation, both can be undone: the names are then those of the
checkpoint.  Elsewhere a tensor is listed as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a checkpoint.

    Attributes:
        name: in the checkpoint; or vLLM's own, where ``is_known`` is false.
        layer: the module that holds it.
        tensor: a view of the parameter.
        is_known: whether name and shape are those of the checkpoint.
    """

    name: str
    layer: str
    tensor: torch.Tensor
    is_known: bool = True


def parts_of(model: Any, vllm_config: Any) -> list[Part]:
    """All parameters of this stage, as the tensors that a checkpoint has for them; tied ones
    once."""
    parallel = vllm_config.parallel_config
    is_whole = parallel.world_size == parallel.pipeline_parallel_size
    joined = dict(getattr(model, "packed_modules_mapping", None) or {})
    is_plain = is_whole and vllm_config.quant_config is None and not _renames(model)
    layers = dict(model.named_modules())
    found: list[Part] = []
    for name, parameter in model.named_parameters():
        place, _, leaf = name.rpartition(".")
        whole = Part(name, place, parameter.detach(), is_known=False)
        found += _cut(whole, layers[place], leaf, joined) if is_plain else [whole]
    return found


def _renames(model: Any) -> bool:
    """Whether it loads a tensor under another name, besides joining layers."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    ways = ("renaming", "regex", "substr", "prefix", "suffix")
    return any(getattr(mapper, f"orig_to_new_{way}", None) for way in ways)


def _cut(whole: Part, layer: Any, leaf: str, joined: dict[str, list[str]]) -> Iterator[Part]:
    folder, _, own = whole.layer.rpartition(".")
    sizes = list(getattr(layer, "output_sizes", ()))
    rows = whole.tensor.shape[0] if whole.tensor.dim() else 0
    if own in joined and len(sizes) == len(joined[own]) and sum(sizes) == rows:
        pieces = whole.tensor.split(sizes)
        for part, tensor in zip(joined[own], pieces, strict=True):
            yield Part(f"{folder}.{part}.{leaf}", whole.layer, tensor)
    elif own in joined or "experts" in whole.layer.split("."):
        yield whole
    else:
        num_rows = getattr(layer, "org_vocab_size", rows)
        tensor = whole.tensor[:num_rows] if num_rows < rows else whole.tensor
        yield Part(whole.name, whole.layer, tensor)


def packed_elsewhere(model: Any) -> str:
    """The first layer whose weight a kernel keeps for itself, in no parameter, or empty for none.

    vLLM's int8 layers on a CPU are such: oneDNN packs their weights.
    """
    for name, layer in model.named_modules():
        is_made_by_vllm = getattr(layer, "quant_method", None) is not None
        if is_made_by_vllm and layer._parameters.get("weight", layer) is None:
            return str(name)
    return ""


def tied_names(model: Any) -> dict[str, str]:
    """Parameters that are another one: name -> the name it is listed under."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied
