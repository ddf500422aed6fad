"""One place to look at a server: a live page, its data, and all metrics."""
