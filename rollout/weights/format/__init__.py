"""Manifests, fingerprints and file layouts of weights."""
