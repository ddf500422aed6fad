"""Batches of sample groups from one source of prompts."""
