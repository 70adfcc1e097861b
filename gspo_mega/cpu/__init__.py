"""What stands in for a GPU: Transformer Engine's kernels, parts of SGLang, operations that do not depend on the batch.

Nothing here changes a file of a dependency. `backend.py` and `sglang_hooks.py` change objects in memory.
"""
