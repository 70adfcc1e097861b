"""The process that traces one rank: the fake device first, then PyTorch, then Megatron-Core.

    python -m gspo_mega.verify.trace.entry REQUEST.json

The request is a `TraceRequest` as JSON. What was traced goes to its `out` file. Exit codes are those of the command.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.garbage import uncollected
from gspo_mega.cpu.fake_device import load_device
from gspo_mega.verify.trace.request import TraceRequest


def main(arguments: list[str]) -> int:
    # Nothing is compiled or computed. Megatron requires the one connection with tensor parallelism.
    os.environ.update(TORCHDYNAMO_DISABLE="1", CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1")
    request = TraceRequest(**json.loads(Path(arguments[0]).read_text()))
    try:
        load_device()
        with uncollected():
            rank = importlib.import_module("gspo_mega.verify.trace.rank")
        rank.trace_rank(request)
    except GspoMegaError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
