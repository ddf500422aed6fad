"""How the GPUs of one engine are divided among its ranks, as SGLang's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.protocol.kind import Shards
from engines.protocol.spec import normalized, spelled

# Longest name first: what SGLang calls each size, and the shorter names it also takes.
_SPELLINGS = {
    "tp_size": ("tensor_parallel_size", "tp_size", "tp"),
    "pp_size": ("pipeline_parallel_size", "pp_size", "pp"),
    "dp_size": ("data_parallel_size", "dp_size", "dp"),
    "ep_size": ("expert_parallel_size", "ep_size", "ep"),
}


_ATTENTION_REPLICAS = ("attn_dp_size", "attention_data_parallel_size")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes of one engine.

    Attributes:
        num_ranks: processes of the model over all nodes.
        flags: the sizes to put on the command line.
    """

    num_ranks: int
    flags: Mapping[str, int]


def divide(options: dict[str, Any], num_gpus: int) -> Parallel:
    """Take the sizes out of ``options``; what is not given follows from the number of GPUs.

    Args:
        num_gpus: of the engine over all its nodes; 0 on the CPU, where the sizes decide alone.

    Raises:
        ValueError: sizes that do not multiply to the GPUs there are, or one given twice.
    """
    given = {size: _take(options, size) for size in _SPELLINGS}
    pipeline = given["pp_size"] or 1
    data = given["dp_size"] or 1
    # With attention data parallelism the replicas share the tensor-parallel ranks.
    replicas = 1 if options.get("enable_dp_attention") else data
    tensor = given["tp_size"] or max(1, num_gpus // (pipeline * replicas))
    num_ranks = tensor * pipeline * replicas
    if num_gpus and num_ranks != num_gpus:
        raise ValueError(
            f"tp {tensor} x pp {pipeline} x dp {replicas} = {num_ranks} ranks, but the engine has "
            f"{num_gpus} GPUs; make engine.gpus fit, or leave tp out"
        )
    sizes = {
        "tp_size": tensor,
        "pp_size": pipeline,
        "dp_size": data,
        "ep_size": given["ep_size"] or 1,
    }
    return Parallel(num_ranks, {name: size for name, size in sizes.items() if size != 1})


def num_ranks(options: Mapping[str, Any]) -> int:
    """Ranks that options ask for, in any spelling; 1 if they do not, or wrongly."""
    try:
        return divide(normalized(options), 0).num_ranks
    except ValueError:
        return 1


def shards(options: Mapping[str, Any], num_gpus: int) -> Shards | None:
    """How an engine with these options divides its model, or None if they do not fit the GPUs.

    Expert parallelism divides among the tensor-parallel ranks, so it changes no sum.
    """
    try:
        given = normalized(options)
        flags = divide(given, num_gpus).flags
    except ValueError:
        return None
    tensor, replicas = flags.get("tp_size", 1), flags.get("dp_size", 1)
    # Of 0.5.23; "enable-dp-attention" is its older spelling.
    within = max(given.get(name) or 1 for name in _ATTENTION_REPLICAS)
    if given.get("enable_dp_attention"):
        within = replicas
    return Shards(
        attention=max(1, tensor // within),
        dense=tensor,
        experts=tensor,
        pipeline=flags.get("pp_size", 1),
        pools=max(replicas, within),
    )


def num_stages(options: Mapping[str, Any]) -> int:
    """Pipeline stages that options ask for, in any spelling; 1 if they do not, or wrongly."""
    found = [
        value
        for name, value in options.items()
        if spelled(name) in _SPELLINGS["pp_size"] and isinstance(value, int)
    ]
    return max(found, default=1)


def _take(options: dict[str, Any], size: str) -> int | None:
    found = [name for name in _SPELLINGS[size] if name in options]
    if len(found) > 1:
        raise ValueError(f"options {' and '.join(found)} are the same thing; give one")
    if not found:
        return None
    value = options.pop(found[0])
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"option {found[0]} = {value!r}: a number of ranks, 1 or more")
    return value
