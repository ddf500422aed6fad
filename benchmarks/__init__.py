"""Side-by-side measurements, ``python -m benchmarks.NAME [--quick] [--json]``; no timed tests."""
