"""What ranks run to learn whether a configuration can train, whatever the plan says of it: build, load, one step."""

from __future__ import annotations

import gc
import math
import traceback

import numpy as np
import torch

from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config.derived import needs_old_log_prob_pass
from gspo_mega.config.schema import Config
from gspo_mega.data.packing import ExpertRoutes
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.resolve import layout_of
from gspo_mega.train.batches import assemble, fill_advantages
from gspo_mega.train.session import load_reference
from gspo_mega.verify.certify.steps import complete_gradients


def attempt(config: str, only_gradient: bool = False) -> dict:
    """One step of training as the loop makes it, the plan's checks left out. `only_gradient`: it ends with the
    gradient of the first mini-batch.

    `error`: None, or the last line of a traceback; `place`: file and line where it was raised; `phase`: what was under
    way; `gradient`: on rank 0, each Hugging Face tensor's whole gradient in the first mini-batch, float32.
    """
    phase = ["groups"]
    try:
        gradient = _train(Config.model_validate_json(config), phase, only_gradient)
        return dict(error=None, place="", phase="", gradient=gradient)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return dict(
            error=f"{type(error).__name__}: {error}",
            place=f"{last.filename}:{last.lineno}",
            phase=phase[0],
            gradient={},
        )


def tidy() -> None:
    """Forget the last layout's groups and models. Only where every rank ended it alike."""
    destroy_groups()
    gc.collect()


def _train(config: Config, phase: list[str], only_gradient: bool) -> dict[str, np.ndarray]:
    parallel = config.parallel
    groups = create_groups(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        seed=config.run.seed,
        timeout_seconds=60,
    )
    phase[0] = "build"
    spec = read_model_spec(config.model.path)
    layout = layout_of(config, spec)
    # Nothing is corrected: made-up log-probs of a server would have most of the batch dropped.
    uncorrected = {"mismatch": config.mismatch.model_copy(update={"correction": "none"})}
    engine = PolicyEngine(
        config.model_copy(update=uncorrected), spec, groups, num_optimizer_steps=config.batch.num_mini_batches
    )
    phase[0] = "load"
    import_huggingface(config.model.path, spec, groups, engine.chunks)
    engine.after_weights_loaded()
    reference = load_reference(config, spec, groups) if config.kl.coefficient > 0 else None
    phase[0] = "pack"
    batch = full_batch(config, spec)
    fill_advantages(batch, config, 0)
    mine = assemble(batch, config, layout, 0)[groups.data.rank]
    if (routes := ExpertRoutes.of(batch.trajectories, spec, config.moe.routing_replay == "R3")) is not None:
        routes.attach([pack for mini_batch in mine for pack in mini_batch.micro_batches])
    phase[0] = "train"
    if only_gradient:
        mine = mine[:1]
    old = [engine.old_pass(m.micro_batches) if needs_old_log_prob_pass(config) else None for m in mine]
    frozen = [reference.log_probs(m.micro_batches) if reference is not None else None for m in mine]
    settings = objective_settings(config.algorithm, config.objective)
    engine.policy_gradients(mine[0].micro_batches, settings, mine[0].denominator, old[0], frozen[0])
    complete_gradients(engine)
    tensors = PolicyTensors(spec, groups, engine.chunks, values=lambda parameter: parameter.main_grad)
    gradient = {name: value.numpy().copy() for name, value in tensors.stream(torch.float32)}
    if only_gradient:
        return gradient if groups.world.rank == 0 else {}
    for mini_batch, before, theirs in zip(mine, old, frozen, strict=True):
        result, _ = engine.train_mini_batch(mini_batch.micro_batches, settings, mini_batch.denominator, before, theirs)
        if result.skipped or not math.isfinite(result.grad_norm):
            raise ArithmeticError("a gradient is not finite")
    return gradient if groups.world.rank == 0 else {}


def full_batch(config: Config, spec: ModelSpec) -> RolloutBatch:
    """Every trajectory that the configuration asks for, of all lengths, the longest among them."""
    rng = np.random.default_rng(3)
    batch, groups = config.batch, []
    num = batch.prompts_per_step * batch.group_size
    lengths = np.linspace(1, config.rollout.max_new_tokens, num).round().astype(int)[rng.permutation(num)].tolist()
    for group_id in range(batch.prompts_per_step):
        mine = lengths[group_id * batch.group_size : (group_id + 1) * batch.group_size]
        num_prompt = (
            config.data.max_prompt_tokens
            if max(lengths) in mine
            else int(rng.integers(1, config.data.max_prompt_tokens + 1))
        )
        prompt = Prompt(f"made:{group_id}", "made", tuple(rng.integers(0, spec.vocab_size, num_prompt).tolist()), "")
        members = []
        for index, length in enumerate(mine):
            routes = None
            if config.rollout.return_routed_experts and spec.moe is not None:
                scores = rng.random((num_prompt + length - 1, spec.num_layers, spec.moe.num_experts))
                routes = np.argsort(scores, axis=-1)[..., : spec.moe.experts_per_token].astype(np.uint8)
                routes[:, : spec.moe.num_dense_layers] = 0
            members.append(
                one_turn_row(
                    trajectory_id=f"made:{group_id}:{index}",
                    group_id=group_id,
                    prompt=prompt,
                    response_token_ids=rng.integers(0, spec.vocab_size, length).tolist(),
                    response_mask=[1] * length,
                    rollout_log_probs=(-math.log(spec.vocab_size) + 1e-5 * rng.standard_normal(length)).tolist(),
                    weight_versions=[0] * length,
                    finish_reason="length",
                    reward=float(index % 2),
                    routed_experts=routes,
                )
            )
        groups.append(Group.from_rows(group_id, prompt, members))
    return RolloutBatch(0, groups)
