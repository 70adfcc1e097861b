"""Names that other libraries give to what a key here says, so that an error can answer them.

`NAMES` has for each library the key as it is written there: a whole dotted path where the library has sections, and an
option of its command line without dashes otherwise. `answer` finds one of them in what a user wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

# Library -> its key -> the key or keys here, and how they differ. The page docs/other_names.md is made of this.
NAMES: dict[str, dict[str, str]] = {
    "TRL": {
        "num_generations": "batch.group_size",
        "generation_batch_size": "batch.prompts_per_step, in prompts",
        "steps_per_generation": "batch.num_mini_batches",
        "per_device_train_batch_size": "batch.micro_batch_tokens, in tokens",
        "beta": "kl.coefficient",
        "epsilon": "objective.clip_low and objective.clip_high",
        "epsilon_high": "objective.clip_high",
        "delta": "objective.dual_clip",
        "importance_sampling_level": "algorithm: gspo is `sequence`, grpo is `token`",
        "loss_type": "objective.aggregation, or algorithm",
        "scale_rewards": "advantage.divide_by_std and advantage.std_over",
        "reward_weights": "reward.functions, where each has its weight",
        "max_completion_length": "rollout.max_new_tokens",
        "max_prompt_length": "data.max_prompt_tokens",
        "vllm_mode": "cluster.colocated",
        "vllm_gpu_memory_utilization": "server.memory_fraction",
        "vllm_tensor_parallel_size": "server.tensor",
        "learning_rate": "optimizer.lr",
        "max_grad_norm": "optimizer.clip_grad",
        "lr_scheduler_type": "optimizer.schedule",
        "max_steps": "train.num_steps, in rollout batches",
        "num_train_epochs": "train.num_steps, in rollout batches: epochs x rows / batch.prompts_per_step",
        "save_steps": "checkpoint.every_steps",
        "eval_steps": "eval.every_steps",
        "save_total_limit": "checkpoint.keep_last",
        "output_dir": "run.dir",
        "run_name": "run.name",
        "report_to": "metrics.sinks",
    },
    "verl": {
        "data.train_files": "data.path",
        "data.val_files": "eval.path",
        "data.train_batch_size": "batch.prompts_per_step, in prompts",
        "data.max_prompt_length": "data.max_prompt_tokens",
        "data.max_response_length": "rollout.max_new_tokens",
        "data.filter_overlong_prompts": "data.max_prompt_tokens; longer prompts are always left out",
        "actor_rollout_ref.model.path": "model.path",
        "actor_rollout_ref.model.lora_rank": "lora.rank",
        "actor_rollout_ref.model.lora_alpha": "lora.alpha",
        "actor_rollout_ref.model.target_modules": "lora.targets",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "recompute.granularity",
        "actor_rollout_ref.actor.ppo_mini_batch_size": (
            "batch.num_mini_batches, the number of mini-batches and not their size"
        ),
        "actor_rollout_ref.actor.ppo_micro_batch_size": "batch.micro_batch_tokens, in tokens",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "batch.micro_batch_tokens, in tokens",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "batch.micro_batch_tokens",
        "actor_rollout_ref.actor.clip_ratio": "objective.clip_low and objective.clip_high",
        "actor_rollout_ref.actor.clip_ratio_low": "objective.clip_low",
        "actor_rollout_ref.actor.clip_ratio_high": "objective.clip_high",
        "actor_rollout_ref.actor.clip_ratio_c": "objective.dual_clip",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "algorithm",
        "actor_rollout_ref.actor.loss_agg_mode": "objective.aggregation",
        "actor_rollout_ref.actor.entropy_coeff": "objective.entropy_coefficient",
        "actor_rollout_ref.actor.use_kl_loss": "kl.coefficient, which is on above 0",
        "actor_rollout_ref.actor.kl_loss_coef": "kl.coefficient",
        "actor_rollout_ref.actor.kl_loss_type": "kl.estimator",
        "actor_rollout_ref.actor.grad_clip": "optimizer.clip_grad",
        "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
        "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight_decay",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "optimizer.warmup_steps",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "parallel.tensor",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "parallel.pipeline",
        "actor_rollout_ref.actor.megatron.context_parallel_size": "parallel.context",
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "parallel.expert",
        "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": "parallel.expert_tensor",
        "actor_rollout_ref.rollout.n": "batch.group_size",
        "actor_rollout_ref.rollout.temperature": "rollout.temperature",
        "actor_rollout_ref.rollout.top_p": "rollout.top_p",
        "actor_rollout_ref.rollout.top_k": "rollout.top_k",
        "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_tokens",
        "actor_rollout_ref.rollout.response_length": "rollout.max_new_tokens",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "server.tensor",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "server.memory_fraction",
        "actor_rollout_ref.rollout.max_model_len": "server.context_tokens",
        "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_concurrent_requests",
        "actor_rollout_ref.rollout.val_kwargs.n": "eval.samples_per_prompt",
        "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "episodes.max_turns",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": "rollout.tools",
        "algorithm.adv_estimator": "algorithm, whose value is one name: gspo, grpo, ppo, ...",
        "algorithm.norm_adv_by_std_in_grpo": "advantage.divide_by_std",
        "algorithm.use_kl_in_reward": "critic.kl_coefficient, with algorithm: ppo",
        "algorithm.kl_ctrl.kl_coef": "critic.kl_coefficient with algorithm: ppo, kl.coefficient otherwise",
        "algorithm.gamma": "critic.gamma",
        "algorithm.lam": "critic.gae_lambda",
        "critic.model.path": "critic.path",
        "critic.optim.lr": "critic.optimizer.lr",
        "critic.cliprange_value": "critic.clip_range",
        "custom_reward_function.path": "reward: package.module:function",
        "custom_reward_function.name": "reward: package.module:function",
        "reward_model.model.path": "reward.model",
        "trainer.total_epochs": "train.num_steps, in rollout batches: epochs x rows / batch.prompts_per_step",
        "trainer.total_training_steps": "train.num_steps",
        "trainer.nnodes": "cluster.num_nodes",
        "trainer.n_gpus_per_node": "cluster.ranks_per_node",
        "trainer.save_freq": "checkpoint.every_steps",
        "trainer.test_freq": "eval.every_steps",
        "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
        "trainer.default_local_dir": "run.dir",
        "trainer.experiment_name": "run.name",
        "trainer.logger": "metrics.sinks",
        "trainer.critic_warmup": "critic.warmup_steps",
    },
    "slime and miles": {
        "hf-checkpoint": "model.path",
        "ref-load": "kl.reference_path",
        "load": "run.dir and run.name; the same command continues a run",
        "save": "run.dir and run.name",
        "save-interval": "checkpoint.every_steps",
        "prompt-data": "data.path",
        "input-key": "data.prompt_key",
        "label-key": "data.answer_key",
        "apply-chat-template": "data.chat_template",
        "rollout-shuffle": "data.shuffle",
        "rm-type": "reward",
        "custom-rm-path": "reward: package.module:function",
        "num-rollout": "train.num_steps",
        "num-epoch": "train.num_steps, in rollout batches: epochs x rows / batch.prompts_per_step",
        "rollout-batch-size": "batch.prompts_per_step",
        "n-samples-per-prompt": "batch.group_size",
        "global-batch-size": "batch.num_mini_batches, the number of mini-batches and not their size",
        "num-steps-per-rollout": "batch.num_mini_batches",
        "max-tokens-per-gpu": "batch.micro_batch_tokens",
        "rollout-max-response-len": "rollout.max_new_tokens",
        "rollout-max-prompt-len": "data.max_prompt_tokens",
        "rollout-max-context-len": "server.context_tokens",
        "rollout-temperature": "rollout.temperature",
        "rollout-top-p": "rollout.top_p",
        "rollout-top-k": "rollout.top_k",
        "over-sampling-batch-size": "rollout.max_oversampling, a multiple of batch.prompts_per_step",
        "dynamic-sampling-filter-path": "rollout.filter_constant_groups, or rollout.group_filter for your own",
        "partial-rollout": "rollout.on_publish: continue",
        "eval-interval": "eval.every_steps",
        "eval-prompt-data": "eval.path, or eval.sets for several",
        "n-samples-per-eval-prompt": "eval.samples_per_prompt",
        "eval-max-response-len": "eval.max_new_tokens",
        "eval-temperature": "eval.temperature",
        "advantage-estimator": "algorithm",
        "eps-clip": "objective.clip_low",
        "eps-clip-high": "objective.clip_high",
        "eps-clip-c": "objective.dual_clip",
        "use-kl-loss": "kl.coefficient, which is on above 0",
        "kl-loss-coef": "kl.coefficient",
        "kl-loss-type": "kl.estimator",
        "kl-coef": "critic.kl_coefficient with algorithm: ppo, kl.coefficient otherwise",
        "entropy-coef": "objective.entropy_coefficient",
        "use-tis": "mismatch.correction",
        "tensor-model-parallel-size": "parallel.tensor",
        "pipeline-model-parallel-size": "parallel.pipeline",
        "context-parallel-size": "parallel.context",
        "expert-model-parallel-size": "parallel.expert",
        "expert-tensor-parallel-size": "parallel.expert_tensor",
        "actor-num-nodes": "cluster.num_nodes",
        "actor-num-gpus-per-node": "cluster.ranks_per_node",
        "rollout-num-gpus": "server.num_servers x server.tensor",
        "rollout-num-gpus-per-engine": "server.tensor",
        "colocate": "cluster.colocated",
    },
    "NeMo-RL": {
        "grpo.num_prompts_per_step": "batch.prompts_per_step",
        "grpo.num_generations_per_prompt": "batch.group_size",
        "grpo.max_rollout_turns": "episodes.max_turns",
        "grpo.max_num_steps": "train.num_steps",
        "grpo.max_num_epochs": "train.num_steps, in rollout batches: epochs x rows / batch.prompts_per_step",
        "grpo.normalize_rewards": "advantage.divide_by_std",
        "grpo.use_leave_one_out_baseline": "advantage.baseline: leave_one_out",
        "grpo.val_period": "eval.every_steps",
        "grpo.max_val_samples": "eval.num_prompts",
        "grpo.seed": "run.seed",
        "grpo.async_grpo.max_trajectory_age_steps": "rollout.max_staleness",
        "loss_fn.reference_policy_kl_penalty": "kl.coefficient",
        "loss_fn.ratio_clip_min": "objective.clip_low",
        "loss_fn.ratio_clip_max": "objective.clip_high",
        "loss_fn.ratio_clip_c": "objective.dual_clip",
        "loss_fn.token_level_loss": "objective.aggregation",
        "loss_fn.sequence_level_importance_ratios": "algorithm: gspo has such ratios",
        "loss_fn.use_importance_sampling_correction": "mismatch.correction",
        "checkpointing.checkpoint_dir": "run.dir",
        "checkpointing.save_period": "checkpoint.every_steps",
        "checkpointing.keep_top_k": "checkpoint.keep_last, which keeps the latest",
        "policy.model_name": "model.path",
        "policy.train_global_batch_size": "batch.num_mini_batches, the number of mini-batches and not their size",
        "policy.train_micro_batch_size": "batch.micro_batch_tokens, in tokens",
        "policy.max_total_sequence_length": "data.max_prompt_tokens and rollout.max_new_tokens",
        "policy.precision": "precision",
        "policy.max_grad_norm": "optimizer.clip_grad",
        "policy.megatron_cfg.tensor_model_parallel_size": "parallel.tensor",
        "policy.megatron_cfg.pipeline_model_parallel_size": "parallel.pipeline",
        "policy.megatron_cfg.context_parallel_size": "parallel.context",
        "policy.megatron_cfg.expert_model_parallel_size": "parallel.expert",
        "policy.megatron_cfg.expert_tensor_parallel_size": "parallel.expert_tensor",
        "policy.megatron_cfg.activation_checkpointing": "recompute.granularity",
        "policy.megatron_cfg.optimizer.lr": "optimizer.lr",
        "policy.generation.max_new_tokens": "rollout.max_new_tokens",
        "policy.generation.temperature": "rollout.temperature",
        "policy.generation.top_p": "rollout.top_p",
        "policy.generation.top_k": "rollout.top_k",
        "policy.generation.vllm_cfg.tensor_parallel_size": "server.tensor",
        "policy.generation.vllm_cfg.gpu_memory_utilization": "server.memory_fraction",
        "policy.generation.colocated.enabled": "cluster.colocated",
        "data.max_input_seq_length": "data.max_prompt_tokens",
    },
    "prime-rl": {
        "orchestrator.batch_size": "batch.prompts_per_step, in prompts and not in samples",
        "orchestrator.rollouts_per_example": "batch.group_size",
        "orchestrator.seq_len": "data.max_prompt_tokens and rollout.max_new_tokens",
        "orchestrator.sampling.max_tokens": "rollout.max_new_tokens",
        "orchestrator.sampling.temperature": "rollout.temperature",
        "orchestrator.max_async_level": "rollout.max_staleness",
        "orchestrator.max_off_policy_steps": "rollout.max_staleness",
        "orchestrator.eval.interval": "eval.every_steps",
        "orchestrator.eval.rollouts_per_example": "eval.samples_per_prompt",
        "orchestrator.ckpt.interval": "checkpoint.every_steps",
        "orchestrator.ckpt.keep_last": "checkpoint.keep_last",
        "orchestrator.max_steps": "train.num_steps",
    },
}


def answer(path: Sequence[str], own: Collection[str] = ()) -> str | None:
    """What to say of a key that is unknown here: which library has it, and the key here; None if no library is known
    to have it.

    `path`: the key's parts. The entry that ends with the most of them counts, so `rollout.n` is
    `actor_rollout_ref.rollout.n`. Its last part is not enough if it is in `own`, the names of keys here.
    """
    written = [part.replace("-", "_").lower() for part in path]
    best, found = 0, list[tuple[str, str, str]]()
    for library, names in NAMES.items():
        for name, here in names.items():
            parts = name.replace("-", "_").split(".")
            common = _common_end(parts, written)
            if not common or (common == 1 and len(parts) > 1 and written[-1] in own):
                continue
            if common > best:
                best, found = common, []
            if common == best:
                found.append((library, name, here))
    if not found:
        return None
    _, name, here = found[0]
    libraries = list(dict.fromkeys(library for library, _, also in found if also == here))
    shown = name if len(libraries) == 1 and best > 1 else name.rpartition(".")[2]
    return f"in {' and '.join(libraries)} it is `{shown}`, here it is {here}"


def library_of_section(name: str) -> str | None:
    """The library that has a section of this name at the top of its configuration, or None."""
    return next((library for library, names in NAMES.items() if any(key.startswith(f"{name}.") for key in names)), None)


def named_leaves(path: Sequence[str], value: Any, own: Collection[str] = ()) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns (the paths of the keys inside `value` that another library has, the dotted rest). `path`: of `value`."""
    known, rest = list[tuple[str, ...]](), list[str]()
    for name, inner in value.items():
        here = (*path, str(name))
        if isinstance(inner, dict) and inner:
            deeper, others = named_leaves(here, inner, own)
            known += deeper
            rest += others
        elif answer(here, own) is not None:
            known.append(here)
        else:
            rest.append(".".join(here))
    return known, rest


def _common_end(one: Sequence[str], two: Sequence[str]) -> int:
    """How many last parts are equal."""
    return next((n for n, (a, b) in enumerate(zip(reversed(one), reversed(two))) if a != b), min(len(one), len(two)))
