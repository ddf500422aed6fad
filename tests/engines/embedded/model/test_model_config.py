"""Both forms of ``config.json``, and what is refused before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines.embedded.core.model_config import model_config, read_model_config

SIZES = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
QWEN = {"model_type": "qwen3", "num_key_value_heads": 2, **SIZES}


def test_both_forms_are_one_model() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 2.0, "original_max_position_embeddings": 64}
    old = {
        "rope_theta": 5e5,
        "rope_scaling": {"type": "llama3", **scaling},
        "torch_dtype": "float16",
    }
    new = {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling},
        "dtype": "float16",
    }
    first, second = (model_config({**QWEN, **form}, {}) for form in (old, new))
    assert first == second
    assert (first.rope.rope_type, first.rope.rope_theta, first.dtype) == ("llama3", 5e5, "float16")


def test_a_null_is_no_scaling_and_a_missing_theta_is_the_default_one() -> None:
    rope = model_config({**QWEN, "rope_scaling": None}, {}).rope
    assert (rope.rope_type, rope.rope_theta) == ("default", 10000.0)


def test_ends_of_a_sequence_are_those_of_both_files() -> None:
    assert model_config({**QWEN, "eos_token_id": 3}, {"eos_token_id": [4, 5]}).eos_ids == {3, 4, 5}
    assert model_config(QWEN, {}).eos_ids == frozenset()
    llama = {**QWEN, "model_type": "llama"}
    assert model_config(llama, {}).eos_ids == {2}  # transformers' own
    assert model_config({**llama, "eos_token_id": None}, {}).eos_ids == frozenset()


@pytest.mark.parametrize(
    ("family", "more", "windows"),
    [
        ("llama", {"sliding_window": 5}, (None, None, None)),
        ("mistral", {}, (4096, 4096, 4096)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 5, "max_window_layers": 1}, (None, None, None)),
        (
            "qwen2",
            {"sliding_window": 5, "max_window_layers": 1, "use_sliding_window": True},
            (None, 5, 5),
        ),
        (
            "qwen3",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (5, None, 5),
        ),
        ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True}, (5, 5, 5)),
    ],
)
def test_windows(family: str, more: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert model_config({**QWEN, "model_type": family, **more}, {}).windows == windows


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope.rope_type"),
        ({"max_position_embeddings": 0}, "max_position"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "each kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "no quantized checkpoints"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"use_sliding_window": True, "layer_types": ["chunked"] * 3}, "'chunked'"),
        ({"vocab_size": None}, "vocab_size"),
        ({"model_type": ["qwen2"]}, "model of type"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_in_one_sentence(
    more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        model_config({**QWEN, **more}, {})
    assert "\n" not in str(refused.value)


def test_an_unknown_architecture_is_refused_with_those_that_work(tmp_path: Path) -> None:
    text = '{"model_type": "gemma3", "architectures": ["Gemma3ForCausalLM"]}'
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="gemma3") as refused:
        read_model_config(tmp_path)
    assert str(refused.value) == (
        "the embedded engine cannot run a model of type 'gemma3' (Gemma3ForCausalLM): it runs "
        "Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE; SGLang and vLLM run others"
    )
    program = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['torch', 'transformers', 'safetensors'])\n"
        f"sys.argv = ['engine', '--model-path', {str(tmp_path)!r}, '--port', '0']\n"
        "from engines.embedded.__main__ import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == f"engines.embedded: model path {tmp_path}: {refused.value}\n"
