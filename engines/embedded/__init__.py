"""An inference engine on transformers' continuous batching that speaks SGLang's HTTP protocol.

For any Hugging Face causal language model, on CPU or CUDA: ``python -m engines.embedded
--model-path DIR --port P``.  Importing this package starts nothing and imports neither torch
nor transformers.
"""
