"""The router beside its peers, on the same stub engines, in one run.

stub.py    engines that answer by script            (a process)
load.py    clients: as fast as they can, or paced
serve.py   our router, and a plain FastAPI and httpx proxy  (a process)
choice.py  what choosing an engine costs
affinity.py what prefix affinity saves, on embedded engines
peers.py   the Rust routers, installed into an environment of their own
"""
