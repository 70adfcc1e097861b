"""How even packing leaves the ranks on long-tailed lengths, and how long it takes to plan.

    python tests/benchmarks/packing.py

Lengths are log-normal (median 4000 tokens, sigma 1), cut at 32 768. FLOPs are the model's own count (linear layers, LM
head, causal attention). Three shares of the spent FLOPs are lost, to padding and to waiting: `step`: ranks wait for
each other at the optimizer step (data parallelism alone), spent = ranks x dearest rank; `pack`: they wait in every
micro-batch (experts spread over data ranks), spent = ranks x sum over turns of the dearest pack; `bound`: no split of
whole sequences loses less, spent = ranks x max(longest sequence, mean of the ranks).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from gspo_mega.data.packing import padded_length, plan_packs
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.models.tensors import attention_crossover_tokens, count_parameters, forward_flops_per_token

LONGEST = 32_768
DENSE = ModelSpec(
    family="qwen3",
    num_layers=36,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=151936,
    max_position_embeddings=40960,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    torch_dtype="bfloat16",
    eos_token_ids=(151645,),
)
MOE = replace(
    DENSE,
    family="qwen3_moe",
    num_layers=48,
    hidden_size=2048,
    num_kv_heads=4,
    moe=MoeSpec(num_experts=128, experts_per_token=8, expert_intermediate_size=768),
)


def long_tailed(num: int, seed: int) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(4000), 1.0, num)
    return np.clip(lengths, 16, LONGEST).astype(int).tolist()


def lost(
    costs: tuple[float, float],
    lengths: list[int],
    num_ranks: int,
    budget: int,
    pad: int,
    pack_multiple: int,
    together: bool,
) -> dict[str, float]:
    """The three shares, and how many packs a rank gets. `costs`: FLOPs of a token without attention, and of a position
    attended to.
    """
    linear, one_position = costs

    def flops(num_tokens: int) -> float:
        return num_tokens * (linear + one_position * (num_tokens + 1) / 2)

    crossover = round(2 * linear / one_position) - 1
    plan = plan_packs(
        lengths, budget, pad, num_ranks, crossover, pack_multiple=pack_multiple, synchronised_packs=together
    )

    def pack_flops(pack: list[int]) -> float:
        padded = [padded_length(lengths[i], pad) for i in pack]
        filler = padded_length(max(sum(padded), 1), pack_multiple) - sum(padded)
        return sum(map(flops, padded)) + filler * linear

    spent = np.array([[pack_flops(pack) for pack in packs] for packs in plan])
    useful = sum(map(flops, lengths))
    whole = [flops(padded_length(n, pad)) for n in lengths]
    bound = max(max(whole), sum(whole) / num_ranks)
    return {
        "packs": spent.shape[1],
        "step": 1 - useful / (num_ranks * spent.sum(axis=1).max()),
        "pack": 1 - useful / (num_ranks * spent.max(axis=0).sum()),
        "bound": 1 - useful / (num_ranks * bound),
    }


def main() -> None:
    costs = {}
    for name, spec in (("8B dense", DENSE), ("30B MoE", MOE)):
        linear = forward_flops_per_token(spec, -1)
        costs[name] = linear, forward_flops_per_token(spec, 1) - linear
        print(
            f"{name}: {count_parameters(spec).active / 1e9:.1f}e9 active parameters, attention = linear at"
            f" {attention_crossover_tokens(spec)} tokens"
        )
    print("\nlost FLOPs, worst of 5 seeds")
    print(
        f"{'model':<9}{'sequences':>10}{'ranks':>6}{'budget':>8}{'pad':>5}{'pack':>6}{'waits at':>10}{'packs':>7}{'step':>8}{'pack':>8}{'bound':>8}"
    )
    cases = [
        (name, num, ranks, budget, pad, pack, together)
        for name, together in (("8B dense", False), ("30B MoE", True))
        for num, budget in ((512, LONGEST), (512, 2 * LONGEST), (128, LONGEST))
        for ranks in (8, 64)
        for pad, pack in ((1, 1), (8, 512))
    ]
    for name, num, ranks, budget, pad, pack, together in cases:
        runs = [lost(costs[name], long_tailed(num, seed), ranks, budget, pad, pack, together) for seed in range(5)]
        worst = {key: max(run[key] for run in runs) for key in runs[0]}
        print(
            f"{name:<9}{num:>10}{ranks:>6}{budget:>8}{pad:>5}{pack:>6}{'pack' if together else 'step':>10}{worst['packs']:>7}"
            + "".join(f"{100 * worst[key]:>7.2f}%" for key in ("step", "pack", "bound"))
        )
    print("\nseconds to plan 100 000 sequences, budget 32 768")
    lengths = long_tailed(100_000, 0)
    for ranks in (8, 64, 512):
        start = time.perf_counter()
        plan_packs(lengths, LONGEST, 8, ranks, attention_crossover_tokens(DENSE))
        print(f"{ranks:>5} ranks {time.perf_counter() - start:6.2f}")


if __name__ == "__main__":
    main()
