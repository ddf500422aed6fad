"""A fake SGLang in memory, with the real one's failure semantics.

For tests of whatever drives engines: a ``FakeLauncher`` starts ``FakeEngine``s whose calls can be
held at a gate, made to fail, or robbed of their answer (``engine.faults``).  It needs neither
torch nor a socket.  README.md beside this file shows how to break each phase by hand.
"""

from engines.fake.checkpoint import write_checkpoint
from engines.fake.engine import FakeEngine
from engines.fake.faults import Call, Fault, FaultKind, FaultPlan, Gate
from engines.fake.launcher import FakeLauncher, FakeRunningEngine
from engines.fake.weights import FakeTensor, fingerprint_of, pack_tensors

__all__ = [
    "Call",
    "FakeEngine",
    "FakeLauncher",
    "FakeRunningEngine",
    "FakeTensor",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "Gate",
    "fingerprint_of",
    "pack_tensors",
    "write_checkpoint",
]
