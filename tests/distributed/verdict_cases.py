"""Configurations of up to four ranks for which the plan and the engine have to agree: about half can run, the others
are such a one changed in a single place. Seeded; knows nothing of what the plan refuses.

Left out is what no engine on CPU decides: servers (SGLang's own), GPUs of a node, FP8's block sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from verdict_case import DEEPSEEK, RESPONSE_TOKENS, Case
from verdict_changes import CHANGES


def generate(count: int, seed: int) -> Iterator[Case]:
    """`count` cases; two of three are changed in one place, by each change in turn. About half of all can run."""
    rng = random.Random(seed)
    changes = list(CHANGES)
    rng.shuffle(changes)
    for number in range(count):
        change = changes[(number - number // 3 - 1) % len(changes)] if number % 3 else ""
        while True:
            case = _valid(rng, number)
            if not change:
                break
            if CHANGES[change](case, rng) is not False:
                case.change = change
                break
        yield case


def _valid(rng: random.Random, number: int) -> Case:
    ranks = rng.choice([1, 2, 2, 3, 4, 4, 4])
    moe = rng.random() < 0.5
    tensor, pipeline, context = rng.choice([s for s in _factors(ranks) if not (moe and s[0] == 3)])
    per_stage = ranks // pipeline
    heads_a_rank = rng.choice([1, 2])
    groups = rng.choice([d for d in (1, 2, 3, 4, 6) if d % tensor == 0])
    heads = groups * heads_a_rank
    virtual = rng.choice([None, 2]) if pipeline > 1 else None
    layers = pipeline * (virtual or 1) * rng.choice([1, 1, 2])
    family = rng.choice(
        ["Qwen3MoeForCausalLM", "MixtralForCausalLM", DEEPSEEK]
        if moe
        else ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"]
    )
    head_dim = rng.choice([8, 16]) if family in ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM") else 8
    hidden = rng.choice([32, 48, 40]) if family not in ("MixtralForCausalLM", "Qwen2ForCausalLM") else heads * head_dim
    model: dict[str, Any] = dict(
        architectures=[family],
        vocab_size=rng.choice([128, 200, 257, 384]),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        intermediate_size=tensor * rng.choice([16, 20, 24]),
        max_position_embeddings=64,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=rng.random() < 0.3,
        eos_token_id=2,
        dtype="float32",
    )
    parallel: dict[str, Any] = dict(tensor=tensor, pipeline=pipeline, context=context, virtual_pipeline=virtual)
    section: dict[str, Any] = {}
    if moe:
        # With one expert rank, experts are cut as everything else is.
        choices = [(e, t) for e in (1, 2, 3, 4) for t in (1, 2) if per_stage % (e * t) == 0 and (e > 1 or t == tensor)]
        expert, expert_tensor = rng.choice(choices)
        dispatchers = ["alltoall"] * (expert == 1 or expert_tensor == 1) + ["allgather"] * (pipeline == 1)
        if not dispatchers:  # with uneven tokens and packs neither dispatcher can
            expert, expert_tensor = rng.choice([c for c in choices if c[1] == 1])
            dispatchers = ["alltoall"]
        parallel |= dict(expert=expert, expert_tensor=expert_tensor, expert_dispatcher=rng.choice(dispatchers))
        experts = expert * rng.choice([1, 2, 4]) if expert > 1 else rng.choice([2, 4, 6])
        width = expert_tensor * rng.choice([8, 12, 16])
        model |= dict(num_experts_per_tok=rng.randint(2, min(experts, 3)))
        if family == "MixtralForCausalLM":
            model |= dict(num_local_experts=experts, intermediate_size=width)
        elif family == DEEPSEEK:
            width *= tensor  # of shared experts too
            del model["head_dim"]
            model |= dict(
                n_routed_experts=experts,
                moe_intermediate_size=width,
                norm_topk_prob=True,
                num_key_value_heads=heads,
                n_group=1,
                topk_group=1,
                n_shared_experts=1,
                routed_scaling_factor=1.5,
                first_k_dense_replace=rng.randrange(min(layers, 2)),
                q_lora_rank=rng.choice([None, 12]),
                kv_lora_rank=16,
                qk_nope_head_dim=8,
                qk_rope_head_dim=4,
                v_head_dim=rng.choice([8, 12]),
                tie_word_embeddings=False,
            )
            if rng.random() < 0.4:
                section |= dict(expert_bias_update_rate=1e-3)
        else:
            model |= dict(num_experts=experts, moe_intermediate_size=width, norm_topk_prob=rng.random() < 0.7)
        if rng.random() < 0.2:
            section |= dict(load_balancing="aux_loss", load_balancing_coefficient=1e-2)
        if rng.random() < 0.15:
            section |= dict(z_loss_coefficient=1e-3)
        section |= dict(routing_replay=rng.choice(["none", "none", "R2", "R3"]))
    else:
        parallel |= dict(sequence=rng.random() < 0.6)
    data = ranks // (tensor * pipeline * context)
    group_size = rng.choice([2, 3, 4])
    prompts = rng.choice([1, 2, 3, 4])
    while prompts * group_size < 2 * data:
        prompts += 1
    minis = rng.choice([m for m in (1, 2, 3, 4) if prompts * group_size // m >= data])
    precision = rng.choice(["fp32", "fp32", "fp32", "bf16"])
    optimizer = dict(lr=1e-6, distributed=rng.random() < 0.7)
    if optimizer["distributed"]:
        optimizer |= dict(overlap=rng.random() < 0.3)
    values: dict[str, dict[str, Any]] = dict(
        top=dict(precision=precision),
        parallel=parallel,
        moe=section,
        optimizer=optimizer,
        batch=dict(
            prompts_per_step=prompts,
            group_size=group_size,
            num_mini_batches=minis,
            micro_batch_tokens=rng.choice([32, 48, 64, 256]),
            log_prob_chunk_tokens=rng.choice([5, 64]),
        ),
        rollout=dict(max_new_tokens=RESPONSE_TOKENS),
    )
    if section.get("routing_replay") == "R3":
        values["rollout"] |= dict(return_routed_experts=True)
    if section.get("routing_replay") == "R2" and minis == 1:
        section["routing_replay"] = "none"
    if rng.random() < 0.25:
        values["recompute"] = dict(granularity="full", num_layers=rng.randint(1, layers // (pipeline * (virtual or 1))))
    if rng.random() < 0.2:
        values["top"] |= dict(algorithm="grpo")
        values["kl"] = dict(coefficient=0.05)
    elif rng.random() < 0.2 and section.get("routing_replay") != "R2":
        # Not clipped, whatever the weights: else there would be no gradient to compare.
        values["top"] |= dict(old_log_probs="rollout", algorithm="custom")
        values["objective"] = dict(ratio="sequence", clip_low=0.9, clip_high=20.0)
    return Case(number, ranks, model, values)


def _factors(ranks: int) -> list[tuple[int, int, int]]:
    """(tensor, pipeline, context) that divide `ranks`."""
    sizes = range(1, ranks + 1)
    return [(t, p, c) for t in sizes for p in sizes for c in sizes if ranks % (t * p * c) == 0]
