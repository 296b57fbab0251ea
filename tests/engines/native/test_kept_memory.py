"""A process with a native engine reuses the memory of freed tensors, without new pages from the system."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from slipstream.engines.native.resources import compute_thread

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(2**24)  # 64 MiB, which are written and freed
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults()
compute_thread("engine", 1).shutdown()
faults()
print(plain, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is part of glibc")
def test_freed_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    plain, kept = map(int, done.stdout.split())
    assert plain > 100, "otherwise this test proves nothing"
    assert kept < plain / 4
