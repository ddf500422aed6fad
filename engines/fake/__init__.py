"""A fake SGLang in memory, with the real one's failure semantics.

For tests of code that drives engines: a ``FakeLauncher`` starts ``FakeEngine``s whose calls can be
held at a gate, made to fail, or lose their reply (``engine.faults``).  It needs neither
torch nor a socket.  README.md beside this file shows how to break each phase by hand.
"""

from engines.fake.engine import faults
from engines.fake.engine.fake_engine import FakeEngine
from engines.fake.engine.fake_weights import (
    FakeTensor,
    fingerprint_of,
    pack_tensors,
    write_checkpoint,
)
from engines.fake.engine.faults import CallGate, Fault, FaultKind, FaultPlan, RecordedCall
from engines.fake.launcher import FakeLauncher, FakeRunningEngine

__all__ = [
    "CallGate",
    "FakeEngine",
    "FakeLauncher",
    "FakeRunningEngine",
    "FakeTensor",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "RecordedCall",
    "faults",
    "fingerprint_of",
    "pack_tensors",
    "write_checkpoint",
]
