"""Settings that are allowed and change what a run's numbers mean, or that have no effect: one line for each.

`notices` yields the lines of a configuration whose defaults are resolved, and a run shows them at its start and end.
They follow the sections: objective with critic and mismatch correction, sampling and precision, episodes, staleness,
and the run itself. What is an error is in `validate.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from gspo_mega.config.algorithms import CORRECTION_LIMITS, RECIPES, AlgorithmName
from gspo_mega.config.derived import (
    OneTeacher,
    corrects_engine_gap,
    critic_of,
    critic_path,
    filters_groups,
    has_sampling_masks,
    has_served_teacher,
    hooks_of,
    is_one_turn,
    needs_old_log_prob_pass,
    on_publish,
    penalises_kl,
    policy_steps,
    teacher_folders,
    teachers,
)
from gspo_mega.config.prompt_sources import eval_sets, names_prompts, own_rewards, sources_of
from gspo_mega.config.schema import Certify, Config, Episodes, Fp8, Mismatch, Objective, Teacher
from gspo_mega.config.validate_episodes import ForeignOptions, validate_foreign_options

# Below this length of responses, the published range of a sequence's ratio is narrow.
_SHORT_TOKENS = 128
# A run of more steps should be saved in between.
_MANY_STEPS = 10


def notices(config: Config) -> Iterator[str]:
    """Yield one line for each such setting."""
    yield from _objective_notices(config)
    yield from _sampling_and_precision_notices(config)
    yield from _episode_notices(config)
    yield from _staleness_notices(config)
    yield from _run_notices(config)


def _objective_notices(config: Config) -> Iterator[str]:
    objective, rollout = config.objective, config.rollout
    recipe = RECIPES[config.algorithm]
    if (objective.clip_low, objective.clip_high) != (recipe.clip_low, recipe.clip_high):
        yield (
            f"clip range {_clip_range(objective)} instead of {recipe.clip_low:g} / {recipe.clip_high:g}, the"
            " published one of"
            f" {recipe.published_as}"
        )
    elif config.train is not None and _range_is_narrow(config):
        yield (
            f"rollout.max_new_tokens {config.rollout.max_new_tokens} with the paper's clip range"
            f" {_clip_range(objective)}: the mean log-ratio of a short response moves far in one update, and the"
            " mismatch of trainer and server is averaged over few tokens, so the range clips more of both; try ten"
            f" times the range (objective.clip_low={10 * recipe.clip_low:g}"
            f" objective.clip_high={10 * recipe.clip_high:g}), as docs/pretrained.md does"
        )
    if not recipe.is_clipped:
        yield (
            f"algorithm {recipe.name} clips nothing: clip_low, clip_high and mismatch.budget have no effect, and"
            " mismatch/k3 says how large the mismatch is"
        )
    if recipe.settings.get("", {}).get("old_log_probs") == "rollout" != config.old_log_probs:
        yield (
            f"old_log_probs: {config.old_log_probs} with algorithm {recipe.name}: its authors measure the change of a"
            " probability from the server's, and advise against recomputed ones"
        )
    if recipe.name == "dapo" and not filters_groups(config.rollout):
        yield (
            "algorithm dapo without rollout.filter_constant_groups: prompts whose rewards are all equal are not sampled"
            " again, as the paper's dynamic sampling does"
        )
    if recipe.ratio is None:
        yield (
            f"algorithm {recipe.name}: ratio {objective.ratio}, aggregation {objective.aggregation}; this is not the"
            " paper's GSPO by name"
        )
    if config.kl.coefficient > 0:
        vanishing = (
            "; the gradient of k1 vanishes in expectation, so it does not hold the policy near the reference (k2 and"
            " k3 do)"
        )
        own = config.lora is not None and config.kl.reference_path is None
        what = "the model without its adapters" if own else "a frozen reference: a second model in memory"
        yield (
            f"KL term {config.kl.coefficient:g} x {config.kl.estimator} to {what}, one more forward pass per step"
            f"{vanishing if config.kl.estimator == 'k1' else ''}"
        )
    elif config.kl.reference_path is not None and not penalises_kl(config.algorithm, config.critic):
        yield "kl.reference_path has no effect with kl.coefficient 0: no reference is loaded"
    yield from _teacher_notices(config)
    yield from _critic_notices(config)
    if config.lora is not None and config.lora.dropout > 0:
        yield (
            f"lora.dropout {config.lora.dropout:g}: training passes leave inputs of adapters out and old passes do not,"
            " so log s_i has noise that no update made; compare policy/log_ratio/update/sd with the clip range"
        )
    if config.moe.routing_replay != "none":
        yield (
            f"routing replay {config.moe.routing_replay}: experts are not chosen by the current router in training, and"
            " routing/changed_since_* is not measured"
        )
    advantage = config.advantage
    if advantage.baseline != "group" or advantage.std_over != "group":
        divided = f", divided by the {advantage.std_over}'s deviation" if advantage.divide_by_std else ""
        yield f"advantages are relative to {advantage.baseline}{divided}; the paper's are relative to the group only"
    own = recipe.settings.get("advantage", {}).get("divide_by_std", True)
    divides_otherwise = config.advantage.std_ddof or config.advantage.divide_by_std != own
    if divides_otherwise and not recipe.has_critic:
        yield (
            "advantages are "
            + (
                "divided by the sample standard deviation"
                if config.advantage.divide_by_std
                else "not divided by a standard deviation"
            )
            + ("; the paper divides by a group's own (std_ddof 0)" if own else f"; {recipe.name} divides by none")
        )
    if config.moe.load_balancing != "none" or config.moe.z_loss_coefficient > 0:
        yield "moe: router losses are added to the objective, which the paper does not do"
    if objective.dual_clip is not None:
        yield f"dual clip {objective.dual_clip:g}: negative-advantage terms are bounded, which the papers do not do"
    yield from _correction_notices(config)
    if rollout.filter_constant_groups and rollout.max_oversampling > 1:
        yield (
            "rollout.filter_constant_groups: groups whose rewards are all equal are replaced, up to"
            f" {rollout.max_oversampling:g} x prompts_per_step, which the paper does not do: the batch is not a plain"
            " sample of the prompts"
        )
    if config.old_log_probs == "rollout":
        yield (
            "old_log_probs: rollout: the engines' mismatch enters the policy ratio and clips many negative-advantage "
            "responses, as policy/mini_batch/0/clip_fraction_negative measures (mismatch.correction then has nothing to"
            " correct)"
        )
    elif config.batch.num_mini_batches == 1:
        made = (
            "is made for mismatch.correction only, where a rank has several packs"
            if needs_old_log_prob_pass(config)
            else "is skipped"
        )
        yield (
            "one mini-batch per step: old and current policy are the same, so nothing is clipped and the old log-prob"
            f" pass {made}"
        )


def _range_is_narrow(config: Config) -> bool:
    """Whether the published range of a sequence's ratio is made for far longer responses than the run's."""
    recipe = RECIPES[config.algorithm]
    is_of_sequences = (recipe.ratio or config.objective.ratio) == "sequence"
    return recipe.is_clipped and is_of_sequences and config.rollout.max_new_tokens < _SHORT_TOKENS


def _critic_notices(config: Config) -> Iterator[str]:
    critic = critic_of(config.algorithm, config.critic)
    if critic is None:
        return
    yield (
        f"critic from {critic_path(config)}: a second model with an optimizer of its own, and two more passes per step;"
        f" gamma {critic.gamma:g}, lambda {critic.gae_lambda:g}"
    )
    if critic.warmup_steps > 0:
        yield f"critic.warmup_steps {critic.warmup_steps}: the policy stays as it is for that many rollout batches"
    if critic.kl_coefficient > 0:
        yield (
            f"critic.kl_coefficient {critic.kl_coefficient:g}: this times log policy - log reference is"
            " subtracted from each token's reward; the frozen reference is a third model in memory"
        )
    if config.advantage.std_ddof and not critic.whiten:
        yield "advantage.std_ddof has no effect with `critic.whiten: false`"


def _teacher_notices(config: Config) -> Iterator[str]:
    teacher = config.teacher
    if teacher is None:
        return
    named = teachers(config.teacher)
    who = ", ".join(f"{_place_of(one)}{_rows_of(one)}" for one in named)
    who = f"teacher{'s' if len(named) > 1 else ''} {who}"
    cost = []
    if loaded := len(teacher_folders(config.teacher)):
        models = "a second model" if loaded == 1 else f"{loaded} more models"
        passes = "one more forward pass" if loaded == 1 else f"{loaded} more forward passes over all rows"
        cost.append(f"{models} in memory and {passes} per step")
    if has_served_teacher(config.teacher):
        cost.append("a server reads each response once, at temperature 1, and the journal keeps what it said")
    if teacher.divergence != "sampled_token":
        whose = f"the {teacher.top_k_of}'s {teacher.top_k} most likely tokens, the others" if teacher.top_k else ""
        rest = "as one" if teacher.top_k_rest == "bucket" else "left out"
        over = f"{whose} {rest}" if whose else "the whole vocabulary"
        heads = "the LM heads' products once more" if loaded else "a product with the policy's LM head once more"
        yield (
            f"{who}: {teacher.coefficient:g} x KL(policy || teacher) over {over} is added to the loss;"
            f" {'; '.join([*cost, heads])}"
        )
    else:
        yield f"{who}: {_sampled_teacher_term(config.algorithm, config.objective, teacher)}; {'; '.join(cost)}"
    taught = {one.source for one in named}
    untaught = (
        [one.name for one in sources_of(config.data)] if names_prompts(config.data) and None not in taught else []
    )
    if untaught := [name for name in untaught if name not in taught]:
        only = "; with reward_weight 0 nothing teaches them" if teacher.reward_weight == 0 else ""
        yield f"teacher.by_source: rows of {', '.join(untaught)} have no teacher{only}"
    if teacher.reward_weight == 0:
        yield "teacher.reward_weight 0: rewards are measured and not trained on; groups of one response are valid"


def _place_of(teacher: OneTeacher) -> str:
    where = teacher.settings
    place = "the policy itself" if where.policy else str(where.path or where.url)
    return place if where.context is None else f"{place}, which reads teacher.context"


def _rows_of(teacher: OneTeacher) -> str:
    return "" if teacher.source is None else f" (rows of {teacher.source})"


def _sampled_teacher_term(algorithm: AlgorithmName, objective: Objective, teacher: Teacher) -> str:
    recipe = RECIPES[algorithm]
    way = (
        "is added to the objective as the term of GSPO-token, whose clip range it shares"
        if (recipe.ratio or objective.ratio) == "sequence"
        else "is added to each token's advantage"
    )
    return f"-{teacher.coefficient:g} x (log policy - log teacher) {way}"


def _correction_notices(config: Config) -> Iterator[str]:
    mismatch = config.mismatch
    if mismatch.kept_weight == "ratio" and mismatch.correction == "none":
        yield "mismatch.kept_weight has no effect with `correction: none`"
    if config.train is None or not corrects_engine_gap(config.mismatch, config.old_log_probs):
        return
    if mismatch.correction in CORRECTION_LIMITS:
        yield _named_correction_notice(mismatch)
        return
    bound = f"{mismatch.bound_nats:g} / sqrt(L)"
    if mismatch.correction == "truncate":
        rule = f"each response is weighted by exp(min(mean d - m, {bound}))"
    else:
        weighs = "" if mismatch.kept_weight == "one" else "; one that is kept is weighted by exp(mean d - m)"
        rule = f"a response of L tokens is dropped if its mean d is further than {bound} from the batch's m{weighs}"
    if config.rollout.max_staleness > 0:
        rule += f"; so are, on their own, {mismatch.segment_tokens} or more of its tokens of one weight version"
    if mismatch.token_veto_nats is not None:
        rule += f"; a token with |d| > {mismatch.token_veto_nats:g} drops its response"
    what = "weighted by how much" if mismatch.correction == "truncate" else "left out"
    whose = f"responses on which trainer and server disagree{' strongly' if what == 'left out' else ''} are {what}"
    yield (
        f"{whose} (mismatch.correction: {mismatch.correction}; `none` turns it off), which the paper does not do;"
        f" mismatch/acted_fraction shows how many. The rule: {rule} (d: trainer - server, nats)"
    )


def _named_correction_notice(mismatch: Mismatch) -> str:
    limits = {key: getattr(mismatch, key) or value for key, value in CORRECTION_LIMITS[mismatch.correction].items()}
    shown = ", ".join(f"{key} {value:g}" for key, value in limits.items())
    veto = mismatch.token_veto_nats
    drops = "" if veto is None else f"; a token with |d| > {veto:g} nats drops its response (null: none does)"
    return (
        f"mismatch.correction {mismatch.correction} ({shown}): weights by the ratio of trainer to server"
        f" (docs/mismatch.md){drops}; mismatch/acted_fraction and the weights' means show what it does"
    )


def _sampling_and_precision_notices(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if has_sampling_masks(rollout):
        yield (
            f"top_p {rollout.top_p:g}, top_k {rollout.top_k}, min_p {rollout.min_p:g}: sampled from a truncated"
            " distribution; all log-probs, the reference's too, are normalised over each token's kept set, which the"
            " server returns (response/kept_tokens_mean, policy/kept_mass)"
        )
    if config.precision != "fp8" and config.fp8 != Fp8():
        yield f"`fp8` has no effect with `precision: {config.precision}`"
    if config.precision != "fp8" and config.certify.sharp_fp8:
        yield f"`certify.sharp_fp8` has no effect with `precision: {config.precision}`"
    if config.precision == "fp8" and config.fp8.recipe == "delayed":
        yield (
            "fp8.recipe delayed: scales follow the largest values of earlier steps, so larger ones saturate; they are"
            f" held for a {'step' if needs_old_log_prob_pass(config) else 'mini-batch'}, and measured by a few more"
            " passes when a run or its layout is new"
        )
    if config.precision == "fp8" and config.fp8.parameters:
        yield "fp8.parameters: the weights that are published and exported are rounded to FP8"
    if rollout.temperature != 1:
        yield (
            f"temperature {rollout.temperature:g}: the policy that is trained is softmax(logits /"
            f" {rollout.temperature:g}), on both engines"
        )
    if config.reward.permute_in_batch:
        yield "reward.permute_in_batch: a control; rewards are permuted, so accuracy is not expected to rise"
    if filters_groups(rollout) and rollout.max_oversampling == 1:
        which = "group_filter" if rollout.group_filter is not None else "filter_constant_groups"
        yield f"{which} with max_oversampling 1: dropped groups are not refilled, batches shrink"
    for key, hook in hooks_of(config).items():
        yield f"{key}: {hook.function} takes the place of the built-in part; it runs in the trainer, with its rights"


def _episode_notices(config: Config) -> Iterator[str]:
    """Yield notices about episodes, turns and the endpoint of agents."""
    if is_one_turn(config.rollout) and config.episodes != Episodes(max_tokens=config.episodes.max_tokens):
        yield "`episodes` has no effect with `rollout.episode: one_turn`, but for max_tokens"
    if config.objective.scope == "turn":
        yield (
            "objective.scope turn: each turn has an importance ratio and a weight of its own, which the paper, whose"
            " episodes have one turn, does not cover; all tokens before a turn are computed again for it"
        )
    if config.advantage.turns == "return_to_go":
        yield (
            "advantage.turns return_to_go: tokens of a turn have the advantage of the rewards from this turn on,"
            " discounted"
            f" by {config.advantage.turn_discount:g} per turn, which the paper does not do"
        )
    if config.episodes.endpoint.ignore_sampling and config.rollout.episode.function == "foreign":
        yield "episodes.endpoint.ignore_sampling: an agent's own temperature, top_p and top_k are not used"
    if not is_one_turn(config.rollout):
        yield from _unfilled_server_notices(config)


def _unfilled_server_notices(config: Config) -> Iterator[str]:
    """Say so if fewer episodes run at a time than the servers take and a step has."""
    episode, rollout, batch = config.rollout.episode, config.rollout, config.batch
    num_episodes = config.episodes.num_workers * config.episodes.episodes_per_worker
    keys = "episodes.num_workers x episodes_per_worker"
    if episode.function == "foreign":
        if validate_foreign_options(episode.options) is not None:
            return  # the options are refused
        num_episodes, keys = ForeignOptions.read(episode.options).processes, "rollout.episode.options.processes"
    ahead = 1 + rollout.max_staleness
    wanted = batch.prompts_per_step * batch.group_size * ahead
    served = config.server.num_servers * rollout.max_concurrent_requests
    if num_episodes < min(wanted, served):
        yield (
            f"{keys}: {num_episodes} episodes run at a time, fewer than the servers take ({served} requests) and"
            f" {'a step has' if ahead == 1 else f'{ahead} steps have'} ({wanted}): servers are not filled"
        )


def _staleness_notices(config: Config) -> Iterator[str]:
    """Yield notices about tokens that are older than the weights they train."""
    rollout = config.rollout
    if rollout.max_staleness == 0:
        for key, acts in (
            ("rollout.order", rollout.order != "admission"),
            ("rollout.on_publish", rollout.on_publish not in (None, "wait")),
            ("diagnostics.exact_staleness", config.diagnostics.exact_staleness),
        ):
            if acts:
                yield f"{key} has no effect with `rollout.max_staleness: 0`: no token is older than the weights"
        return
    yield (
        f"rollout.max_staleness {rollout.max_staleness}: tokens of weights up to that many versions old are trained on,"
        " which the paper does not do; rollout/staleness_mean shows how old they are"
    )
    if rollout.order == "completion":
        yield (
            "rollout.order completion: short responses are trained earlier than long ones, and a run that is killed and"
            " continued forms other batches than one that is not"
        )
    if on_publish(rollout) == "continue_with_cache":
        yield (
            "rollout.on_publish continue_with_cache: tokens after a publish are sampled by new weights with the old"
            " weights' cache, a hybrid that no weights reproduce"
        )
    if config.old_log_probs == "rollout":
        yield (
            "old_log_probs: rollout with max_staleness above 0: the clip range is around the weights that sampled, so"
            " stale responses start outside it; `trainer` clips this step's own movement"
        )


def _run_notices(config: Config) -> Iterator[str]:
    if config.train is not None and config.train.from_rollouts is not None:
        yield "train.from_rollouts: trained on recorded rollouts; no server, no publish, no held-out evaluation"
    if config.train is not None and config.train.rollouts_only:
        yield (
            "train.rollouts_only: nothing is trained; all batches come from"
            f" {'model.path' if config.model.weights is None else 'model.weights'}"
        )
    checkpoint = config.checkpoint
    if config.train is not None and config.train.num_steps > _MANY_STEPS and checkpoint.every_steps == 0:
        first = "its last whole copy in memory, or its first step" if checkpoint.peer_copies else "its first step"
        yield (
            "checkpoint.every_steps 0: nothing is saved before the end or a stop, so a run that is killed begins again"
            f" at {first}"
        )
    sinks = {one.sink for one in config.metrics.sinks}
    if config.metrics.samples_every_steps is not None and sinks <= {"jsonl"}:
        yield "metrics.samples_every_steps has no effect without a sink that takes samples (tensorboard, wandb)"
    if config.certify.rounding_factor != Certify().rounding_factor and not any(c.rounded for c in config.certify.cases):
        yield "certify.rounding_factor has no effect without a case that is `rounded`"
    if config.optimizer.schedule == "constant" and config.optimizer.min_lr > 0:
        yield "optimizer.min_lr has no effect with `schedule: constant`"
    if config.optimizer.decay_norms_and_biases and config.optimizer.weight_decay == 0:
        yield "optimizer.decay_norms_and_biases has no effect with weight_decay 0"
    if config.recompute.granularity == "none" and config.recompute.num_layers > 1:
        yield "recompute.num_layers has no effect with `granularity: none`"
    num_steps = policy_steps(config) if config.train is not None else 0
    if 0 < num_steps <= config.optimizer.warmup_steps:
        yield (
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} is not over before the run ends"
            f" ({num_steps} optimizer steps)"
        )
    trained_on = {
        _real_path(path) for path in (config.data.path, *(source.path for source in config.data.sources)) if path
    }
    for one in eval_sets(config.eval, config.data):
        if _real_path(one.path) in trained_on:
            yield f"{one.place}.path is also trained on: the accuracy will not be held-out"
    own = own_rewards(config.data)
    if any(one.reward is None for one in eval_sets(config.eval, config.data)) and None in own and len(own) > 1:
        unused = ", ".join(source.name for source in config.data.sources if source.reward is not None)
        yield f"held-out prompts are scored by `reward`, not by the own rewards of {unused}; eval.reward sets another"


def _real_path(path: str) -> str:
    """Return the real path of a file, however it is written or linked. Files with equal rows are found when the data is
    read.
    """
    return path if "\0" in path else os.path.realpath(path)


def _clip_range(objective: Objective) -> str:
    return f"{objective.clip_low:g} / {objective.clip_high:g}"
