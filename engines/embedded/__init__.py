"""An inference engine in plain torch that speaks SGLang's HTTP protocol.

For Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE, on CPU or CUDA: ``python -m engines.embedded
--model-path DIR --port P``.  Importing this package starts nothing and does not import torch.
"""
