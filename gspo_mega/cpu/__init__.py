"""Stand-ins for a GPU: Transformer Engine's kernels, parts of SGLang, and batch-invariant operations.

Nothing here changes a file of a dependency. `backend.py` and `sglang_hooks.py` change objects in memory.
"""
