"""Configurations of up to four ranks for which the plan and the engine have to agree: about half can run, the others
are such a one changed in a single place. Seeded; knows nothing of what the plan refuses.

Left out is what no engine on CPU decides: servers (SGLang's own), GPUs of a node, FP8's block sizes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.config import load_config, render_config
from gspo_mega.config.schema import Config
from gspo_mega.errors import GspoMegaError
from gspo_mega.plan import plan_run

PROMPT_TOKENS, RESPONSE_TOKENS = 6, 18
DEEPSEEK = "DeepseekV3ForCausalLM"


@dataclass
class Case:
    """`model`: a config.json. `values`: a configuration's sections. `change`: what was done to a valid one, empty for
    one left as it was. `reference`: another shape's config.json for the KL term's reference, or None for the policy's
    own.
    """

    number: int
    ranks: int
    model: dict[str, Any]
    values: dict[str, dict[str, Any]]
    change: str = ""
    reference: dict[str, Any] | None = None

    def config(self, model_path: Path, reference_path: Path | None) -> Config:
        sections: dict[str, Any] = {name: dict(section) for name, section in self.values.items()}
        scalars = sections.pop("top", {})
        if reference_path is not None:
            sections.setdefault("kl", {})["reference_path"] = str(reference_path)
        return Config.model_validate_json(
            json.dumps(
                dict(
                    run=dict(name="verdict"),
                    model=dict(path=str(model_path)),
                    train=dict(num_steps=1),
                    data=dict(path="unused.jsonl", max_prompt_tokens=PROMPT_TOKENS),
                    reward=dict(functions=[dict(function="exact_match")]),
                    cluster=dict(ranks_per_node=self.ranks),
                    **scalars,
                    **sections,
                )
            )
        )

    @property
    def described(self) -> str:
        shape = {
            key: value
            for key, value in self.model.items()
            if key.startswith(
                ("n_", "num_", "hidden_size", "intermediate", "moe_", "vocab", "tie_", "head_dim", "q_", "v_", "first_")
            )
        }
        return (
            f"case {self.number} ({self.change or 'as generated'}): {self.ranks} ranks,"
            f" {self.model['architectures'][0]} {shape}, {self.values}"
        )


def plan_says(config: Config, folder: Path) -> str | None:
    """Why the plan refuses the configuration, None where it does not. Every line of a refusal names file and line."""
    file = folder / "verdict.yaml"
    file.write_text(render_config(config))
    try:
        plan_run(load_config(file, (), "train"), "cpu")
    except GspoMegaError as error:
        for line in str(error).splitlines():
            assert re.match(rf"{re.escape(str(file))}:\d+:\d+: [a-z_.0-9]+: ", line), f"no place in the refusal: {line}"
        return str(error)
    return None


# --- what can run
# ------------------------------------------------------------------------------------------------------


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


# --- one change that makes most of them impossible; False where it does not apply
# ----------------------------------------


def _is_moe(case: Case) -> bool:
    return "num_experts_per_tok" in case.model


def _is_latent(case: Case) -> bool:
    return case.model["architectures"] == [DEEPSEEK]


def _wants(condition: bool, change: Callable[[], None]) -> bool | None:
    if not condition:
        return False
    change()
    return None


def _one_more_rank(case: Case, rng: random.Random) -> bool | None:
    return _wants(case.ranks < 4, lambda: setattr(case, "ranks", case.ranks + 1))


def _set(section: str, **choices: list[Any]) -> Callable[[Case, random.Random], bool | None]:
    """Set keys to one of several values; False where all of them had it."""

    def change(case: Case, rng: random.Random) -> bool | None:
        target = case.values.setdefault(section, {})
        before = dict(target)
        target.update({key: rng.choice(options) for key, options in choices.items()})
        return None if target != before else False

    return change


def _model(**choices: list[Any]) -> Callable[[Case, random.Random], bool | None]:
    def change(case: Case, rng: random.Random) -> bool | None:
        before = dict(case.model)
        case.model.update({key: rng.choice(options) for key, options in choices.items()})
        return None if case.model != before else False

    return change


def _only(
    applies: Callable[[Case], bool], change: Callable[[Case, random.Random], bool | None]
) -> Callable[[Case, random.Random], bool | None]:
    return lambda case, rng: change(case, rng) if applies(case) else False


def _parallel(case: Case, key: str) -> Any:
    return case.values["parallel"].get(key, 1)


def _heads(case: Case, rng: random.Random) -> bool | None:
    """Heads that tensor ranks do not divide."""
    if _parallel(case, "tensor") == 1 or case.model["architectures"][0] not in (
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    ):
        return False
    heads = rng.choice([1, 3, 5])
    case.model |= dict(num_attention_heads=heads, num_key_value_heads=heads)
    return None


def _few_groups(case: Case, rng: random.Random) -> bool | None:
    """Fewer key-value groups than tensor ranks, or groups that do not divide."""
    tensor = _parallel(case, "tensor")
    if tensor == 1 or _is_latent(case):
        return False
    groups = rng.choice([1, 2, 3])
    heads = groups * tensor * 2
    case.model |= dict(num_attention_heads=heads, num_key_value_heads=groups, head_dim=8)
    if case.model["architectures"][0] in ("MixtralForCausalLM", "Qwen2ForCausalLM"):
        case.model["hidden_size"] = heads * 8
    return None


def _layout(case: Case, rng: random.Random) -> bool | None:
    """Any sizes at all."""
    parallel = case.values["parallel"]
    parallel |= {key: rng.choice([1, 1, 2, 3, 4]) for key in ("tensor", "pipeline", "context")}
    if _is_moe(case):
        parallel |= dict(expert=rng.choice([1, 2, 4]), expert_tensor=rng.choice([1, 1, 2]))
    return None


def _other_reference(case: Case, rng: random.Random) -> bool | None:
    if case.values.get("kl", {}).get("coefficient", 0) == 0:
        return False
    case.reference = case.model | dict(
        intermediate_size=case.model["intermediate_size"] + 8, vocab_size=case.model["vocab_size"] + rng.choice([0, 8])
    )
    return None


_MOE: Callable[[Case], bool] = _is_moe


def _DENSE(case: Case) -> bool:
    return not _is_moe(case)


CHANGES: dict[str, Callable[[Case, random.Random], bool | None]] = {
    "one more rank": _one_more_rank,
    "heads": _heads,
    "key-value groups": _few_groups,
    "any layout": _layout,
    "hidden size": _only(lambda c: c.model["architectures"][0].startswith("Qwen3"), _model(hidden_size=[30, 36, 50])),
    "intermediate size": _only(_DENSE, _model(intermediate_size=[17, 30, 33])),
    "experts' width": _only(lambda c: "moe_intermediate_size" in c.model, _model(moe_intermediate_size=[7, 9, 10])),
    "vocabulary": _model(vocab_size=[129, 131, 255]),
    "layers": _only(lambda c: not _is_latent(c), _model(num_hidden_layers=[1, 2, 3, 5])),
    "pipeline": _set("parallel", pipeline=[2, 3, 4]),
    "virtual pipeline": _set("parallel", virtual_pipeline=[2, 3, 4]),
    "virtual pipeline of one stage": _only(
        lambda c: _parallel(c, "pipeline") == 1, _set("parallel", virtual_pipeline=[2])
    ),
    "number of experts": _only(lambda c: "num_experts" in c.model, _model(num_experts=[3, 5, 7])),
    "one expert a token": _only(lambda c: _is_moe(c) and not _is_latent(c), _model(num_experts_per_tok=[1])),
    "expert": _set("parallel", expert=[2, 3, 4]),
    "expert tensor": _set("parallel", expert_tensor=[2, 3]),
    "no experts, expert parallel": _only(_DENSE, _set("parallel", expert=[2])),
    "no experts, expert tensor": _only(_DENSE, _set("parallel", expert_tensor=[2])),
    "no experts, moe settings": _only(
        _DENSE, _set("moe", z_loss_coefficient=[1e-3], routing_replay=["R2", "none", "R3"])
    ),
    "no sequence parallelism": _only(
        lambda c: _is_moe(c) and _parallel(c, "tensor") > 1, _set("parallel", sequence=[False])
    ),
    "experts on every tensor rank": _only(
        lambda c: _is_moe(c) and _parallel(c, "tensor") > 1, _set("parallel", expert=[1], expert_tensor=[1])
    ),
    "allgather": _only(_MOE, _set("parallel", expert_dispatcher=["allgather"])),
    "alltoall": _only(
        lambda c: _is_moe(c) and _parallel(c, "expert_tensor") > 1, _set("parallel", expert_dispatcher=["alltoall"])
    ),
    "fp8": _set("top", precision=["fp8"]),
    "small moments": _set("optimizer", moments_dtype=["bf16", "fp8"]),
    "offload": _set("optimizer", cpu_offload_fraction=[0.5]),
    "overlap, optimizer not distributed": _set("optimizer", overlap=[True], distributed=[False]),
    "mini-batches": _set("batch", num_mini_batches=[5, 7, 9, 17]),
    "small packs": _set("batch", micro_batch_tokens=[20, 23, 24, 25, 28]),
    "long responses": _set("rollout", max_new_tokens=[26, 30, 58]),
    "responses beyond the positions": _only(
        lambda c: c.values["batch"]["micro_batch_tokens"] > 100, _set("rollout", max_new_tokens=[59, 66])
    ),
    "odd lengths": _set("rollout", max_new_tokens=[17, 19, 21]),
    "context": _set("parallel", context=[2, 3, 4]),
    "recompute": _set("recompute", granularity=["full"], num_layers=[2, 3, 4]),
    "R2": _only(_MOE, _set("moe", routing_replay=["R2"])),
    "R3 without routes": _only(
        lambda c: _is_moe(c) and "return_routed_experts" not in c.values["rollout"], _set("moe", routing_replay=["R3"])
    ),
    "another reference": _other_reference,
    "expert bias": _set("moe", expert_bias_update_rate=[1e-3]),
    "a KL term": _set("kl", coefficient=[0.05]),
}
