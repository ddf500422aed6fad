"""Judgements of mathematics, in processes of their own: the texts are a model's."""
