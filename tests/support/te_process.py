"""One process with Transformer Engine over the CPU kernels, for tests whose own process must not see it.

Megatron looks for Transformer Engine once per process, and the other unit tests are written for a process without it.
`@in_te_process` lets the body of a test run in a process that loaded it; what the body raises is raised in the test.
All tests share the process, so it starts once.
"""

import concurrent.futures
import functools
import importlib
import multiprocessing
import os
import warnings

from gspo_mega.base.garbage import uncollected


def _load() -> None:
    os.environ.update(GSPO_TRANSFORMER_ENGINE="1", OMP_NUM_THREADS="1")
    warnings.filterwarnings("ignore")
    with uncollected():
        import torch

        import gspo_mega.engine  # noqa: F401  loads Transformer Engine

    torch.set_num_threads(1)


@functools.cache
def _process() -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=_load)


def _body(module: str, name: str, arguments: dict) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def in_te_process(test):
    @functools.wraps(test)
    def run(**arguments):
        _process().submit(_body, test.__module__, test.__name__, arguments).result()

    return run
