"""Peak memory and time of the LM head's log-probs at 32k tokens, beyond hidden states, head and its gradient.

    python tests/gpu/head_memory.py [--device cpu --hidden 32 --rows 64 --chunks 16,32]

In chunks of several sizes, as a run computes them, in bf16 on a GPU and fp32 on a CPU; forward with backward.
tests/benchmarks/log_prob_head.py compares with whole logits. Bound: memory no larger than five tensors of one chunk's
logits in fp32.
"""

from __future__ import annotations

import sys

import torch
from gpu_engine import ROOT, Rows, arguments, finish, one_rank

sys.path.insert(0, str(ROOT / "tests/benchmarks"))
from log_prob_head import VOCABULARY, Bench, ours

from gspo_mega.engine.process_groups import create_groups, destroy_groups

MOST_CHUNKS = 5


def main() -> None:
    args = arguments(__doc__, hidden="2560,4096", rows=32768, chunks="512,2048", repeats=3)
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    rows, failures = Rows(), []
    with one_rank():
        tensor_group = create_groups().tensor
        for hidden in map(int, args.hidden.split(",")):
            bench = Bench(hidden, device, dtype, args.repeats)
            for chunk in map(int, args.chunks.split(",")):
                path = ours(chunk, False, tensor_group)
                peak, took = bench.peak(path, args.rows), bench.seconds(path, args.rows)
                row = dict(hidden=hidden, tokens=args.rows, chunk=chunk, peak_gib=peak / 2**30)
                rows.append(row | dict(forward_seconds=took["forward"], seconds=took["backward"]))
                most = MOST_CHUNKS * chunk * VOCABULARY * 4 + bench.weight.numel() * bench.weight.element_size()
                if peak > most:
                    failures.append(
                        f"hidden {hidden}, chunk {chunk}: {peak / 2**30:.2f} GiB; at most {most / 2**30:.2f}"
                    )
        destroy_groups()
    finish("head", rows, failures)


if __name__ == "__main__":
    main()
