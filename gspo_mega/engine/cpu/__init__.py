"""Megatron-Core, and where it is asked for Transformer Engine, on a machine without a GPU.

Owns every difference between such a machine and a cluster. It changes objects in memory and no file of a dependency.

    backend.py         what Megatron asks of CUDA; `install`
    te_loading.py      finds Transformer Engine's released Python and lets it be imported
    te_extension.py    the module that stands in for its compiled extension; the `te_*.py` beside it are its kernels
"""

from gspo_mega.engine.cpu.backend import install, is_cpu_backend

__all__ = ["install", "is_cpu_backend"]
