"""One change of a configuration that makes most of them impossible; False where it does not apply."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from verdict_case import DEEPSEEK, Case


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
