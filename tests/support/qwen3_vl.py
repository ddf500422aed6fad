"""A tiny random model of Qwen3-VL's shape, and what transformers computes with it."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUM_BYTES = 256
_SIDE, _PATCH, _MERGE = 32, 16, 2
"""Pixels of a side of the square that is one token, and how it is divided."""
_MARKS = [f"<|{name}|>" for name in ("vision_start", "image_pad", "video_pad", "vision_end")]
_START, _IMAGE, _VIDEO, _END = _MARKS
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": _PATCH,
    "merge_size": _MERGE,
    "temporal_patch_size": 2,
    # Images of these tests are not resized: resizing differs between SGLang's way and PIL's.
    "size": {"shortest_edge": _SIDE**2, "longest_edge": 64 * _SIDE**2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
# In the form of Qwen3-VL's own.
TEMPLATE = """
{%- for message in messages %}
  {{- '<|im_start|>' + message.role + '\n' }}
  {%- if message.content is string %}{{- message.content }}{% else %}
    {%- for part in message.content %}
      {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
        {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
      {%- elif 'text' in part %}{{- part.text }}{% endif %}
    {%- endfor %}
  {%- endif %}
  {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


def make_qwen3_vl(path: Path, seed: int) -> Path:
    """Write a checkpoint whose greedy tokens are bytes: most are no text, so that no new
    tokenisation of an answer gives its ids."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from rollout.testing.tiny_model import make_byte_tokenizer

    tokenizer = make_byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _MARKS})
    identify = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "bos_token_id": None,
        "eos_token_id": identify("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    make: Any = Qwen3VLConfig
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
        model: Any = Qwen3VLForConditionalGeneration(config).to(torch.float32)
    model.lm_head.weight.data[_NUM_BYTES:] = 0.0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    video = _PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return path


def noise(seed: int, height: int, width: int) -> Any:
    """An image of noise, of so many tokens in each direction."""
    import numpy as np
    from PIL import Image

    shape = (height * _SIDE, width * _SIDE, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def file_of(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def part_of(image: Any) -> dict[str, Any]:
    """The image as clients of OpenAI's protocol send it."""
    url = f"data:image/png;base64,{base64.b64encode(file_of(image)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class Qwen3VlReference:
    """Transformers' own model and image processor."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as processing

        load: Any = Qwen3VLForConditionalGeneration.from_pretrained
        self._model = load(path, dtype=torch.float32).eval()
        self._processor: Any = processing.Qwen2VLImageProcessorPil.from_pretrained(path)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def ids(self, text: str, images: Sequence[Any]) -> list[int]:
        """Of a text with one placeholder for each image, as transformers' processor expands it."""
        grids = self._processor(images=list(images), return_tensors="pt")["image_grid_thw"]
        first, *others = text.split(_IMAGE)
        sizes = [int(grid.prod()) // _MERGE**2 for grid in grids]
        parts = [_IMAGE * size + other for size, other in zip(sizes, others, strict=True)]
        ids: list[int] = self._tokenizer(first + "".join(parts))["input_ids"]
        return ids

    def logprobs(self, ids: Sequence[int], images: Sequence[Any]) -> list[float]:
        """Of each of these tokens but the first."""
        import torch

        seen = self._processor(images=list(images), return_tensors="pt")
        tensor = torch.tensor([list(ids)])
        placeholder = self._tokenizer.convert_tokens_to_ids(_IMAGE)
        with torch.no_grad():
            types = (tensor == placeholder).int()
            logits = self._model(input_ids=tensor, mm_token_type_ids=types, **seen).logits[0]
        found = torch.log_softmax(logits[:-1].double(), -1)
        return [float(row[token]) for row, token in zip(found, ids[1:], strict=True)]
