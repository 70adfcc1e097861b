"""What `engine.batch_invariant` costs on a CPU: its operations against those that are used without it.

    python tests/benchmarks/batch_invariance.py            # one thread, the quickstart's wide dense shape

Each row is a pair of times of one operation, taken in turns, the best of several; the ratio is what counts. Linear
layers by the number of rows (a decode step has one row per request), attention of a pack and of a decode step, the LM
head with the log-prob. Forward passes only, as backward passes are the usual ones. Nothing of SGLang or Megatron is
called: the plain operations here are what both call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear, log_softmax, scaled_dot_product_attention, silu

from gspo_mega.cpu import batch_invariant as rows
from gspo_mega.cpu.batch_invariant import attend

HIDDEN, INTERMEDIATE, HEADS, DIM, VOCABULARY = 256, 512, 2, 128, 512
PACKED, LENGTH = 4096, 64


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call, the mean of as many as take a twentieth of a second; other processes do not count."""
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < 0.05 or calls < 2:
        work()
        calls += 1
    return spent / calls


def compare(title: str, plain: Callable[[], object], invariant: Callable[[], object], repeats: int) -> None:
    """Print one row: both times in microseconds and their ratio."""
    times = [(seconds(plain), seconds(invariant)) for _ in range(repeats)]
    first, second = (min(column) for column in zip(*times, strict=True))
    print(f"| {title} | {first * 1e6:.0f} | {second * 1e6:.0f} | {second / first:.2f} |", flush=True)


def linears(dtype: torch.dtype, repeats: int) -> None:
    weight = torch.randn(2 * INTERMEDIATE, HIDDEN).to(dtype)
    for count in (1, 4, 16, 64, 1024):
        x = torch.randn(count, HIDDEN).to(dtype)
        compare(f"linear, {count} rows", lambda x=x: linear(x, weight), lambda x=x: rows.linear(x, weight), repeats)
    gate = torch.randn(PACKED, INTERMEDIATE).to(dtype)
    compare(f"SiLU, {PACKED} rows", lambda: silu(gate), lambda: rows.silu(gate), repeats)


def attentions(dtype: torch.dtype, repeats: int) -> None:
    batch = PACKED // LENGTH
    q, k, v = (torch.randn(batch, LENGTH, HEADS, DIM).to(dtype) for _ in range(3))
    last = torch.arange(LENGTH).expand(batch, -1)

    def packed() -> torch.Tensor:
        return scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)

    compare(f"attention, {batch} sequences of {LENGTH}", packed, lambda: attend(q, k, v, last, DIM**-0.5), repeats)
    one = q[:, -1:]

    def decoded() -> torch.Tensor:
        return scaled_dot_product_attention(*(part.transpose(1, 2) for part in (one, k, v)))

    compare(
        f"attention, a decode step of {batch} requests",
        decoded,
        lambda: attend(one, k, v, last[:, -1:], DIM**-0.5),
        repeats,
    )


def heads(dtype: torch.dtype, repeats: int) -> None:
    weight, labels = torch.randn(VOCABULARY, HIDDEN).to(dtype), torch.zeros(PACKED, 1, dtype=torch.int64)
    for count in (1, 64, PACKED):
        hidden, label = torch.randn(count, HIDDEN).to(dtype), labels[:count]
        compare(
            f"LM head and log-prob, {count} rows",
            lambda h=hidden, i=label: log_softmax(linear(h, weight).float(), -1).gather(1, i),
            lambda h=hidden, i=label: rows.label_log_probs(rows.logits(h, weight), i),
            repeats,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        print(f"\n{dtype}, {arguments.threads} threads, torch {torch.__version__}\n")
        print("| operation | plain, microseconds | batch-invariant | ratio |\n|---|---|---|---|")
        with torch.no_grad():
            for measured in (linears, attentions, heads):
                measured(dtype, arguments.repeats)


if __name__ == "__main__":
    main()
