"""The most memory that a piece of work held beyond what was there before, from the allocator's own record."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


def peak_extra_bytes(work: Callable[[], object]) -> int:
    """Bytes on the CPU, temporaries inside operators included (not those of the BLAS library, which allocates by
    itself).
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = work()
    del result
    changes = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())  # stable: events of one nanosecond keep their order
    return max(accumulate((event.nbytes() for event in changes), initial=0))


def peak_extra_bytes_cuda(work: Callable[[], object]) -> int:
    """The same on the current CUDA device."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
