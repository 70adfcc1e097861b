"""A process keeps the memory of its freed tensors, so that the kernel does not fill it with zeros again each step."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, sys
from gspo_mega.base.garbage import keep_freed_memory

if sys.argv[1] == "keeps":
    keep_freed_memory(os.environ)

def step():
    for _ in range(4):
        b"x" * (48 << 20)

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 16 * (48 << 20) // os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    ("mode", "variables", "pages"),
    [
        ("as_it_is", {}, PAGES),
        ("keeps", {}, 0),
        ("keeps", {"MALLOC_ARENA_MAX": "2"}, PAGES),  # what the user chose stays
        ("keeps", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1048576"}, PAGES),
    ],
)
def test_later_steps_use_the_pages_of_earlier_ones(mode, variables, pages):
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, mode]
    found = subprocess.run(command, env=bare | variables, capture_output=True, text=True, check=True, timeout=60)
    assert int(found.stdout) == pytest.approx(pages, abs=PAGES / 100)
