"""The model: a decoder in plain torch, its position embeddings and its attention."""
