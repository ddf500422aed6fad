"""How the buckets of a push reach an engine: a file for each route, with both ends of it.

``choice`` has a row for each route, and is the only place that chooses.  The end of the engines is
a plain value, which is pickled to where they are called; the end of the trainer needs torch, which
it imports when it is opened.
"""
