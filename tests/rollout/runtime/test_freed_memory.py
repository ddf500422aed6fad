"""A router's process keeps the memory that it frees: page faults of blocks that come again."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from rollout.runtime.worker_process import keep_freed_memory

def num_faults(num_bytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * num_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {is_kept}:
    keep_freed_memory()
num_faults(8 << 20)
print(num_faults(8 << 20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_block_that_was_freed_comes_again_without_page_faults():
    faults = {}
    for is_kept in (True, False):
        command = [sys.executable, "-c", PROGRAM.format(is_kept=is_kept)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        faults[is_kept] = int(done.stdout)
    assert faults[True] < 100  # 8 MiB are 2048 pages, or four large ones
    assert faults[False] > faults[True]
