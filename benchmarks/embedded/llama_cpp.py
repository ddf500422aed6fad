"""llama.cpp's server on a Llama model of Hugging Face's form, which is converted first.

    python llama_cpp.py MODEL_FOLDER PORT NUM_THREADS NUM_PARALLEL

Runs in an environment of its own, with xllamacpp (llama.cpp and its server as a wheel), gguf and
safetensors (``servers.py`` installs them); so it imports nothing of this project.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

CONTEXT = 512  # tokens of each request

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def convert(folder: Path, target: Path) -> None:
    """Write a GGUF file with the same numbers, in float32."""
    from gguf import GGUFWriter
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(target, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters", config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, tokenizer, config["eos_token_id"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, short = _parts(name)
        values = tensor
        if num_heads := heads.get(short):  # llama.cpp rotates neighbours, and not halves
            halves = values.reshape(num_heads, 2, -1, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape).copy()
        writer.add_tensor(f"{layer}{short}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts(name: str) -> tuple[str, str]:
    """Where a tensor is (``blk.3.``, or empty), and llama.cpp's name for it."""
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return "", _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.", _NAMES[rest]


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any], end: int) -> None:
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    special = [token["content"] for token in tokenizer["added_tokens"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*words, *special])
    writer.add_token_types([1] * len(words) + [3] * len(special))
    writer.add_token_merges(["a b"])  # it must have one; prompts here are ids
    writer.add_eos_token_id(end)


def main() -> None:
    folder, port, num_threads, num_parallel = Path(sys.argv[1]), *map(int, sys.argv[2:])
    file = folder / "model.gguf"
    if not file.exists():
        convert(folder, file)
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path = str(file)
    params.port = port
    params.n_parallel = num_parallel
    params.n_ctx = num_parallel * CONTEXT
    params.cpuparams.n_threads = num_threads
    params.cpuparams_batch.n_threads = num_threads
    server = Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main()
