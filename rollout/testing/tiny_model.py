"""Tiny random models with a byte-level tokenizer and a chat template; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    path: str | Path,
    architecture: str = "llama",
    seed: int = 0,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_length: int = 4096,
    tie_embeddings: bool = False,
    dtype: str = "float32",
    num_experts: int = 5,
) -> Path:
    """Write a model directory that ``python -m engines.embedded`` can serve.

    Args:
        architecture: ``llama``, ``qwen3`` or ``qwen3_moe``.
        seed: of the random weights; two seeds answer differently.
        max_length: the model's context length in tokens.
        num_experts: of each layer of a mixture, two of which see a token.

    Returns:
        The directory.
    """
    from transformers import AutoConfig

    path = Path(path)
    tokenizer = make_byte_tokenizer()
    more: dict[str, Any] = {}
    if architecture == "qwen3_moe":
        more = {
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden_size // 2,
        }
    config = AutoConfig.for_model(
        architecture,
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=tie_embeddings,
        initializer_range=0.2,  # spread logits, so that greedy choices are not near ties
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    _write_random_model(path, config, seed, dtype)
    tokenizer.save_pretrained(path)
    return path


def _write_random_model(path: Path, config: Any, seed: int, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=getattr(torch, dtype))
    model.save_pretrained(path)


def make_byte_tokenizer() -> Any:
    """One token per byte and three special ones: ids 0-255 in the alphabet's order, then theirs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make: Any = PreTrainedTokenizerFast
    fast = make(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],  # transformers 5 reads this name, too
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
