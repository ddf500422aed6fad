"""The fake's second face: vLLM's HTTP, with the calls that kill or fool vLLM.

``FakeVllm`` answers vLLM's paths.  ``VllmFakeLauncher`` starts such engines in memory, and its
``connect`` gives the real client of ``engines/vllm`` over them, without a socket.
"""

from engines.fake.vllm.fake_vllm import FakeVllm
from engines.fake.vllm.in_memory import VllmFakeLauncher, connect_in_memory, make_vllm

__all__ = ["FakeVllm", "VllmFakeLauncher", "connect_in_memory", "make_vllm"]
