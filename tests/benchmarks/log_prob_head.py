"""Time and peak memory of the LM head's log-probs: in chunks, by whole logits, and by Megatron's cross-entropy.

    python tests/benchmarks/log_prob_head.py [--hidden 256 1024] [--rows 1024] [--peak-rows 8192] [--chunks 128 256 512]
    [--entropy] python tests/benchmarks/log_prob_head.py --device cuda --dtype bf16 --hidden 4096 --rows 8192
    --peak-rows 65536 --chunks 512 2048

Three paths from the same hidden states [T, H] and head [V, H], V = 151 936, all ranks' work on one rank:
- plain: all logits in fp32, log-softmax, gather;
- Megatron: all logits, then its `vocab_parallel_cross_entropy` over a tensor group of one rank;
- ours, for each chunk size, and on request with entropy.
The weight gradient ends in an fp32 main gradient that exists beforehand, as under Megatron's DDP: ours adds to it, the
other two hand autograd a gradient that is added afterwards. Times are medians of `--repeats` runs of forward alone and
of forward with backward. Where a whole-logits path would take more than `--most-gib` at the T of the peaks, its peak
there is marked *: the straight line through those measured at T = `--rows` and half of it.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parents[1] / "numerics"), str(Path(__file__).parents[2])]
warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from peak_memory import peak_extra_bytes, peak_extra_bytes_cuda

import gspo_mega.engine  # noqa: F401  the CPU backend comes before Megatron
from gspo_mega.engine.log_probs import token_log_probs
from gspo_mega.engine.process_groups import create_groups

VOCABULARY = 151_936
LogProbs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax((hidden @ weight.t()).float(), dim=-1).gather(1, labels[:, None])[:, 0]


def megatron(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -vocab_parallel_cross_entropy((hidden @ weight.t())[:, None], labels[:, None])[:, 0]


def ours(chunk: int, with_entropy: bool, tensor_group) -> LogProbs:
    def path(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return token_log_probs(
            hidden[:, None],
            weight,
            torch.arange(labels.size(0), device=labels.device),
            labels,
            vocab_size=VOCABULARY,
            temperature=1.0,
            tensor_group=tensor_group,
            sequence_parallel=False,
            chunk_rows=chunk,
            with_entropy=with_entropy,
        )[0]

    return path


class Bench:
    """One hidden size on one device: the head with its main gradient, and the two measures of a path."""

    def __init__(self, hidden_size: int, device: torch.device, dtype: torch.dtype, repeats: int) -> None:
        self.device, self.repeats, self.hidden_size, self.dtype = device, repeats, hidden_size, dtype
        generator = torch.Generator(device=device).manual_seed(0)
        weight = torch.randn(VOCABULARY, hidden_size, generator=generator, device=device) / hidden_size**0.5
        self.weight = torch.nn.Parameter(weight.to(dtype))
        self.weight.main_grad = torch.zeros(weight.shape, device=device)
        self.weight.grad_added_to_main_grad = False

    def inputs(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device=self.device).manual_seed(1)
        hidden = torch.randn(num_rows, self.hidden_size, generator=generator, device=self.device).to(self.dtype)
        return hidden, torch.randint(VOCABULARY, (num_rows,), generator=generator, device=self.device)

    def works(self, path: LogProbs, num_rows: int) -> dict[str, Callable[[], None]]:
        hidden, labels = self.inputs(num_rows)

        def forward() -> None:
            with torch.no_grad():
                path(hidden, self.weight, labels)

        def both() -> None:
            leaf = hidden.detach().requires_grad_()
            self.weight.grad_added_to_main_grad = False
            path(leaf, self.weight, labels).mean().backward()
            if not self.weight.grad_added_to_main_grad:
                self.weight.main_grad.add_(self.weight.grad)
            self.weight.grad = None

        return {"forward": forward, "backward": both}

    def seconds(self, path: LogProbs, num_rows: int) -> dict[str, float]:
        result = {}
        for name, work in self.works(path, num_rows).items():
            times = []
            for _ in range(self.repeats):
                self._wait()
                started = time.perf_counter()
                work()
                self._wait()
                times.append(time.perf_counter() - started)
            result[name] = median(times)
        return result

    def peak(self, path: LogProbs, num_rows: int) -> int:
        """Bytes that forward with backward holds beyond hidden states, head and main gradient."""
        measure = peak_extra_bytes if self.device.type == "cpu" else peak_extra_bytes_cuda
        return measure(self.works(path, num_rows)["backward"])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compare(args: argparse.Namespace, hidden_size: int, tensor_group) -> None:
    device = torch.device(args.device)
    bench = Bench(hidden_size, device, dict(fp32=torch.float32, bf16=torch.bfloat16)[args.dtype], args.repeats)
    paths: dict[str, LogProbs] = {"plain": plain, "Megatron": megatron}
    for chunk in args.chunks:
        paths[f"ours, chunk {chunk}"] = ours(chunk, False, tensor_group)
    if args.entropy:
        paths[f"ours, chunk {args.chunks[-1]}, entropy"] = ours(args.chunks[-1], True, tensor_group)

    most = args.most_gib * 2**30
    gradients = bench.weight.numel() * bench.weight.element_size()
    peaks: dict[str, tuple[int, bool]] = {}
    for name, path in paths.items():
        # The whole-logits paths hold up to three tensors of all logits.
        fits = name.startswith("ours") or 3.2 * args.peak_rows * VOCABULARY * 4 + gradients < most
        if fits:
            peaks[name] = bench.peak(path, args.peak_rows), True
        else:
            half, full = (bench.peak(path, rows) for rows in (args.rows // 2, args.rows))
            peaks[name] = full + (full - half) * (args.peak_rows - args.rows) // (args.rows - args.rows // 2), False
    times = {name: bench.seconds(path, args.rows) for name, path in paths.items()}

    print(
        f"\nH = {hidden_size}, V = {VOCABULARY}, {args.dtype} on {args.device}; times at T = {args.rows}, peak at T ="
        f" {args.peak_rows}\n"
    )
    print("| path | forward s | of plain | with backward s | of plain | peak MB | of plain | of Megatron |")
    print("|---|---|---|---|---|---|---|---|")
    for name in paths:
        cells = [name]
        for kind in ("forward", "backward"):
            cells += [f"{times[name][kind]:.3f}", f"{times[name][kind] / times['plain'][kind]:.2f}"]
        peak, measured = peaks[name]
        cells.append(f"{peak / 1e6:.0f}{'' if measured else '*'}")
        cells += [f"{100 * peak / peaks[other][0]:.1f} %" for other in ("plain", "Megatron")]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024], metavar="H")
    parser.add_argument("--rows", type=int, default=1024, help="T of the times")
    parser.add_argument("--peak-rows", type=int, default=8192, help="T of the peaks")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256, 512], help="chunk sizes")
    parser.add_argument("--entropy", action="store_true", help="the last chunk size also with entropy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most-gib", type=float, default=8.0, help="memory that a whole-logits path may take")
    args = parser.parse_args()
    torch.set_num_threads(1 if args.device == "cpu" else torch.get_num_threads())
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        tensor_group = create_groups().tensor
        for hidden_size in args.hidden:
            compare(args, hidden_size, tensor_group)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
