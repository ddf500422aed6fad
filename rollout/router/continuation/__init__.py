"""The tokens of a request so far, over several engines (pure).

core.py       what was kept and shown, and where a continuation may start; no JSON
reply.py      a core that is read from bytes and written as bytes, by its dialects
fast_path.py  the same for ``/generate``, without parsing its ids and text
dialects/     how bodies and events are read and written, in a table by route and kind of engine
"""
