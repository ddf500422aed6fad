"""What a checkpoint's files say of a head that is tied to the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import TensorInfo
from rollout.config import WeightUpdate
from rollout.config.compatibility import TiedHead
from rollout.weights.format.tied_head import tied_head
from tests.support.builders import write_checkpoint

EMBEDDING = TensorInfo("model.embed_tokens.weight", "float32", (4, 2))
HEAD = TensorInfo("lm_head.weight", "float32", (4, 2))
TIED: dict[str, Any] = {"model_type": "qwen3", "tie_word_embeddings": True}
FULL, PARTIAL = WeightUpdate.FULL, WeightUpdate.PARTIAL


@pytest.mark.parametrize(
    ("config", "has_head", "update", "not_pushed", "expected"),
    [
        (TIED, False, FULL, [], TiedHead("qwen3")),
        (TIED, False, PARTIAL, [], TiedHead("qwen3")),
        (TIED, True, FULL, ["visual.*"], TiedHead("qwen3")),
        (TIED, True, FULL, ["lm_head.*"], TiedHead("qwen3", may_be_left_out=True)),
        (TIED, True, PARTIAL, [], TiedHead("qwen3", may_be_left_out=True)),
        ({"model_type": "vl", "text_config": TIED}, False, FULL, [], TiedHead("vl")),
        ({"model_type": "qwen3", "tie_word_embeddings": False}, True, PARTIAL, [], None),
        ({}, True, PARTIAL, [], None),
        # transformers: gemma's are tied by default, and the files have no head.
        ({"model_type": "gemma3"}, False, FULL, [], TiedHead("gemma3")),
    ],
)
def test_a_tied_head_that_the_files_have_may_be_left_out_of_a_push(
    tmp_path: Path,
    config: dict[str, Any],
    has_head: bool,
    update: WeightUpdate,
    not_pushed: list[str],
    expected: TiedHead | None,
) -> None:
    model = write_checkpoint(tmp_path, (EMBEDDING, HEAD) if has_head else (EMBEDDING,))
    (Path(model) / "config.json").write_text(json.dumps(config))
    assert tied_head(model, update, not_pushed) == expected
