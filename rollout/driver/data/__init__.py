"""Prompts that come in, and the samples that go out as arrays or Parquet files."""
