"""The router beside its peers, over the same stub engines, in one run.

stub.py      stub engines with fixed replies                         (a process)
load.py      clients, in a closed loop or at a steady rate
serve.py     our router, and a plain FastAPI and httpx proxy         (a process)
choice.py    CPU of choosing an engine
affinity.py  prompt tokens that prefix affinity finds in the caches of embedded engines
calls.py     time of a Ray call to the router's actor, idle and under load
peers.py     the Rust routers, installed into an environment of their own
"""
