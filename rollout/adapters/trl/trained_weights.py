"""A trained model's weights under the names of its checkpoint.

Always true: after the block the model is bit for bit what it was before; adapters of PEFT are
merged into the weights only in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout.core.errors import ConfigError


@contextmanager
def trained_weights(model: Any) -> Iterator[Mapping[str, Any]]:
    """The weights to push, sharded or whole.

    Raises:
        ConfigError: this kind of model cannot be pushed.
    """
    if why := _why_not(model):
        raise ConfigError(why)
    if not _is_peft(model):
        yield model.state_dict()
        return
    # What unmerging subtracts again is rounded, and the error would grow from push to push.
    kept = [
        (parameter, parameter.detach().clone())
        for name, parameter in model.named_parameters()
        if ".base_layer." in name
    ]
    model.merge_adapter()
    try:
        yield _merged_state(model)
    finally:
        model.unmerge_adapter()
        for parameter, before in kept:
            parameter.data.copy_(before)


def checkpoint_name(name: str, prefix: str, adapters: Collection[str]) -> str:
    """The checkpoint's name of a tensor of a PEFT model, or empty for one it does not have.

    Args:
        prefix: begins the names of the adapter's own tensors, for example ``lora_``.
        adapters: the active ones.
    """
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    if any(part.startswith(prefix) or part == "original_module" for part in name.split(".")):
        return ""
    before, is_saved, rest = name.partition(".modules_to_save.")
    if not is_saved:
        return name
    adapter, _, last = rest.partition(".")
    return f"{before}.{last}" if adapter in adapters else ""


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _merged_state(model: Any) -> dict[str, Any]:
    prefix, adapters = model.base_model.prefix, model.active_adapters
    named = (
        (checkpoint_name(name, prefix, adapters), tensor)
        for name, tensor in model.state_dict().items()
    )
    return {name: tensor for name, tensor in named if name}


def _why_not(model: Any) -> str:
    parameters = list(model.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        return "DeepSpeed ZeRO-3 keeps no whole parameters; use ZeRO-2, or FSDP2 (fsdp_version: 2)"
    if not _is_peft(model):
        return ""
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return (
            "a PEFT model that is sharded by FSDP2 cannot be merged for a push; "
            "train the adapter with DDP, or all weights with FSDP2"
        )
    if not hasattr(model.base_model, "merge_adapter"):
        kinds = sorted({type(config).__name__ for config in model.peft_config.values()})
        return (
            f"an adapter of {' and '.join(kinds)} cannot be merged into the weights for a push; "
            "use LoraConfig"
        )
    return ""
