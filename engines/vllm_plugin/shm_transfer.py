"""The weight transfer backend ``rollout_shm``: pushed safetensors become the weights of a model.

Always true:
- a bucket is checked whole, names and shapes, before a tensor of it is loaded;
- an encoded tensor is loaded as the whole one that it makes of the model's own;
- when a request returns, nothing refers to the pushed file or memory any more, and the device has
  read it;
- a session that fails gives the layers it did not complete their old tensors back, so that the
  engine lives; its weights are then a mixture, which the next whole push replaces;
- a session that leaves a layer half loaded, or tensors missing after the weights were lost, ends
  with an error that names them.  vLLM itself would only write a warning to its log.

On a GPU vLLM copies from the mapping to the device, opens the trainer's memory by CUDA IPC, or
receives by NCCL; none of these was tested on one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import BoundArguments
from traceback import clear_frames
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)

from engines.tensors.payload.encodings import (
    ENCODINGS,
    Encoded,
    decoded,
    is_encoded,
    why_not_for,
)
from engines.vllm_plugin.checkpoint_names import parts_of, tied_names
from engines.vllm_plugin.kept_tensors import let_go
from engines.vllm_plugin.pushed_broadcasts import PushedBroadcasts
from engines.vllm_plugin.pushed_files import tensors_at, tensors_in
from engines.vllm_plugin.pushed_handles import tensors_behind

_SHOWN = 3


@dataclass
class ShmInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on."""


@dataclass
class ShmUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket: a path, a content, handles with their layout, or a broadcast.

    Attributes:
        path: of a folder with safetensors files, or of one file, on this host.
        content: a safetensors file in base64.
        handles: of memory on each GPU, by its UUID; see ``pushed_handles``.
        layout: the tensors in that memory.
        broadcast: the bucket that the trainer sends to a group; see ``pushed_broadcasts``.
        base: the weight version of the server, which encoded tensors must begin from.
    """

    path: str = ""
    content: str = ""
    handles: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    broadcast: dict[str, Any] = field(default_factory=dict)
    base: str = ""


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the model takes under one name."""

    shape: tuple[int, ...]
    layer: str
    own: torch.Tensor


class ShmTransfer(WeightTransferEngine[ShmInit, ShmUpdate]):  # type: ignore[misc]
    """One worker's end.

    Attributes:
        is_lost: the weights were released without a backup, and no whole push has come since.
        broadcasts: the groups that this worker is in.
        encodings: that it applies: none, unless its tensors are those of the checkpoint.
    """

    init_info_cls = ShmInit
    update_info_cls = ShmUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.is_lost = False
        self.broadcasts = PushedBroadcasts(device)
        self._loaded: set[str] = set()
        self._is_partial = False
        parts = parts_of(model, vllm_config)
        self._tied = tied_names(model)
        self._expected = {
            part.name: _Expected(tuple(part.tensor.shape), part.layer, part.tensor)
            for part in parts
        }
        # Where names are vLLM's own, or in another stage, those of the checkpoint are not checked.
        is_whole = vllm_config.parallel_config.world_size == 1
        self._is_known = is_whole and all(part.is_known for part in parts)
        # Nor does what was encoded fit where vLLM has cast the checkpoint.
        dtype = getattr(self.model_config.hf_config, "dtype", None)
        is_same = self._is_known and {part.tensor.dtype for part in parts} == {dtype}
        self.encodings = ENCODINGS if is_same else ()
        self._is_quantised = vllm_config.quant_config is not None

    def init_transfer_engine(self, init_info: ShmInit) -> None:
        """Nothing to do; may be called again."""

    def start_weight_update(self) -> None:
        self._loaded, self._is_partial = set(), False
        initialize_layerwise_reload(self.model)

    @torch.no_grad()
    def receive_weights(self, update_info: ShmUpdate) -> None:
        try:
            self._load(update_info)
        except BaseException as error:
            self._abandon()
            _forget_frames(error)
            raise

    def finish_weight_update(self) -> None:
        if self._is_partial:
            self._load_unchanged()
        if reason := self._why_incomplete():
            self._abandon()
            raise ValueError(reason)
        finalize_layerwise_reload(self.model, self.model_config)
        self.broadcasts.free()
        self.is_lost = False

    def shutdown(self) -> None:
        """Leave all groups."""
        self.broadcasts.leave_all()

    def _load(self, update_info: ShmUpdate) -> None:
        tensors = self._tensors_of(update_info)
        try:
            whole = self._whole(tensors, update_info.base)
            self.model.load_weights(iter(whole.items()))
            self._loaded |= whole.keys()
            let_go(_kept(self.model), tensors.values())
        finally:  # the device must have read the memory before it is closed
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self.broadcasts.done()

    def _tensors_of(self, update: ShmUpdate) -> dict[str, torch.Tensor]:
        """The bucket's tensors, checked against the model."""
        given = [update.path, update.content, update.handles, update.broadcast]
        if sum(map(bool, given)) != 1 or bool(update.handles) != bool(update.layout):
            raise ValueError(
                "update_info needs either path or content, or handles with a layout, or broadcast"
            )
        if update.broadcast:
            return self.broadcasts.receive(update.broadcast, self._check)
        tensors = _read(update, self.device)
        self._check({name: tensor.shape for name, tensor in tensors.items()})
        return tensors

    def _whole(self, tensors: Mapping[str, torch.Tensor], base: str) -> dict[str, torch.Tensor]:
        """A bucket with whole tensors in the place of encoded ones."""
        found = {name: tensor for name, tensor in tensors.items() if not is_encoded(name)}
        for name in tensors.keys() - found.keys():
            encoded = decoded(name, tensors[name])
            if not self._is_left_out(encoded.name):
                found[encoded.name] = self._base(encoded, base).clone()
                encoded.apply(found[encoded.name])
            # Tensors that are equal are not pushed.
            self._is_partial = True
        return found

    def _base(self, encoded: Encoded, base: str) -> torch.Tensor:
        """The model's own tensor, which an encoded one begins from.

        Raises:
            ValueError: it begins from another one.
        """
        self._check({encoded.name: encoded.shape})
        name = self._tied.get(encoded.name, encoded.name)
        own = self._expected[name].own if self.encodings else torch.empty(0)
        why = why_not_for(encoded, own, "" if self.is_lost else base)
        if name in self._loaded:
            why = f"{encoded} came twice"
        if why:
            raise ValueError(f"{why}; push whole tensors")
        return own

    def _load_unchanged(self) -> None:
        """The other tensors of each layer that has begun: vLLM loads a layer whole."""
        begun = {self._expected[name].layer for name in self._loaded & self._expected.keys()}
        rest = {
            name: expected.own
            for name, expected in self._expected.items()
            if expected.layer in begun and name not in self._loaded
        }
        self.model.load_weights(iter(rest.items()))
        self._loaded |= rest.keys()

    def _check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        if not self._is_known:
            return
        for name, shape in shapes.items():
            if is_encoded(name):
                continue
            expected = self._expected.get(self._tied.get(name, name))
            if expected is None and not self._is_left_out(name):
                raise ValueError(f"the model has no tensor {name!r}; {self._known_text()}")
            if expected is not None and tuple(shape) != expected.shape:
                raise ValueError(
                    f"tensor {name!r} has shape {list(shape)}; "
                    f"the model takes {list(expected.shape)}"
                )

    def _is_left_out(self, name: str) -> bool:
        """Whether vLLM skips it: a model with tied embeddings has no head of its own."""
        is_tied = getattr(self.model_config.hf_config, "tie_word_embeddings", False)
        return is_tied and name == "lm_head.weight"

    def _known_text(self) -> str:
        return f"it has {len(self._expected)}, for example {next(iter(self._expected))!r}"

    def _why_incomplete(self) -> str:
        """Why this session must not end."""
        if not self._is_known:
            return "" if self._is_quantised else self._why_half_loaded()
        missing: dict[str, list[str]] = defaultdict(list)
        begun: set[str] = set()
        for name, expected in self._expected.items():
            if name in self._loaded:
                begun.add(expected.layer)
            else:
                missing[expected.layer].append(name)
        halves = [name for layer in begun for name in missing.get(layer, ())]
        if halves:
            return f"a part of a layer was not pushed: {_some(halves)}; push the whole layer"
        if self.is_lost and missing:
            names = [name for names in missing.values() for name in names]
            return (
                f"the weights were released without a backup, and {len(names)} of "
                f"{len(self._expected)} tensors were not pushed: {_some(names)}; push all tensors"
            )
        return ""

    def _why_half_loaded(self) -> str:
        """Why a joined layer must not be loaded as it is.

        vLLM would leave memory in it that was never written.  Other layers may have elements that
        no push has, such as a padding.
        """
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            is_begun = info.can_load() and info.load_numel > 0
            if hasattr(layer, "output_sizes") and is_begun:  # a complete one cannot load more
                return f"a part of layer {name} was not pushed; push the whole layer"
        return ""

    def _abandon(self) -> None:
        """Give the layers that are not complete their old tensors back."""
        self.broadcasts.free()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()


def _read(update: ShmUpdate, device: torch.device) -> dict[str, torch.Tensor]:
    if update.handles:
        return tensors_behind(update.layout, update.handles, device)
    return tensors_at(update.path) if update.path else tensors_in(update.content)


def _forget_frames(error: BaseException | None) -> None:
    """Their variables refer to the pushed memory for as long as the error exists."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


def _kept(model: Any) -> Iterator[BoundArguments]:
    """What vLLM loads when a layer is complete."""
    for layer in model.modules():
        for _, bound in get_layerwise_info(layer).loaded_weights:
            yield bound


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
