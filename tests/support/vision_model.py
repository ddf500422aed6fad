"""A tiny random vision-language model, and what transformers computes with it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SIDE = 56
"""Of an image, in pixels: two tokens, so that no image is resized."""

_PATCH, _MERGE = 14, 2
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "patch_size": _PATCH,
    "merge_size": _MERGE,
    "temporal_patch_size": 2,
    "min_pixels": SIDE**2,
    "max_pixels": SIDE**2,
}
_START, _IMAGE, _VIDEO, _END = (
    f"<|{name}|>" for name in ("vision_start", "image_pad", "video_pad", "vision_end")
)
_TOKENS_OF_IMAGE = (SIDE // _PATCH // _MERGE) ** 2
PROMPT = f"look {_START}{_IMAGE}{_END} say"


def make_vision_model(path: Path, seed: int) -> Path:
    """Write a checkpoint of Qwen2-VL's shape, which SGLang serves with its own image processor."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    from rollout.testing.tiny_model import make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [_START, _IMAGE, _VIDEO, _END]})
    identify = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
        "bos_token_id": None,
        "eos_token_id": identify("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "in_chans": 3,  # the name that SGLang reads
        "embed_dim": 64,
        "hidden_size": 64,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "initializer_range": 0.2,
    }
    make: Any = Qwen2VLConfig
    config = make(
        text_config=text,
        vision_config=vision,
        image_token_id=identify(_IMAGE),
        video_token_id=identify(_VIDEO),
        vision_start_token_id=identify(_START),
        vision_end_token_id=identify(_END),
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = Qwen2VLForConditionalGeneration(config).to(torch.float32)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return path


def make_image(seed: int) -> Any:
    """An image of noise."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_base64(image: Any) -> str:
    """The image as requests carry it."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class VisionReference:
    """Transformers' own model and image processor, over weights of the checkpoint's shape."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as processing

        load: Any = Qwen2VLForConditionalGeneration.from_pretrained
        self._model = load(path, dtype=torch.float32).eval()
        self._processor: Any = processing.Qwen2VLImageProcessorPil.from_pretrained(path)
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._image_id = tokenizer.convert_tokens_to_ids(_IMAGE)
        self._prompt: list[int] = tokenizer(PROMPT.replace(_IMAGE, _IMAGE * _TOKENS_OF_IMAGE))[
            "input_ids"
        ]

    def logprobs(self, image: Any, output_ids: Sequence[int]) -> list[float]:
        """Of these tokens after ``PROMPT`` with the image."""
        import torch

        seen = self._processor(images=[image], return_tensors="pt")
        ids = torch.tensor([[*self._prompt, *output_ids]])
        with torch.no_grad():
            logits = self._model(
                input_ids=ids, mm_token_type_ids=(ids == self._image_id).int(), **seen
            ).logits[0]
        found = torch.log_softmax(logits[len(self._prompt) - 1 : -1].double(), -1)
        return [float(row[token]) for row, token in zip(found, output_ids, strict=True)]

    def with_tower_of(self, other: VisionReference) -> VisionReference:
        """This model, with the other's vision tower."""
        mixed = object.__new__(VisionReference)
        mixed.__dict__.update(self.__dict__)
        mixed._model = _copied(self._model, other._model.state_dict())
        return mixed


def _copied(model: Any, state: Mapping[str, Any]) -> Any:
    import copy

    mixed = copy.deepcopy(model)
    towers = {name: tensor for name, tensor in state.items() if "visual" in name}
    assert towers
    mixed.load_state_dict(towers, strict=False)
    return mixed
