"""The rules between keys: which settings contradict each other, and which sections a command needs.

`validate_config` runs every rule on a configuration that fits the schema, and `loader.py` turns the violations into one
error before anything starts. The functions here follow the sections of the file; features with many rules have files of
their own: `validate_learning.py` (algorithm, critic, staleness, adapters, batch invariance), `validate_rewards.py`,
`validate_episodes.py`, `validate_servers.py` and `validate_sharing.py`. A setting that is allowed but changes what the
numbers mean is a notice (`notices.py`). Rules that need the model or the ranks are in `plan/validate.py`; where both
sides check a feature, the functions have the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gspo_mega.base.errors import Violation
from gspo_mega.base.network import address_problem
from gspo_mega.config.deadlines import RELATIONS
from gspo_mega.config.derived import command_name, critic_config, critic_of, is_one_turn, penalises_kl
from gspo_mega.config.notices import notices
from gspo_mega.config.prompt_sources import eval_sets, names_prompts, own_rewards
from gspo_mega.config.schema import Alerts, Batch, Certify, Cluster, Config, Engine, Precision, Profile, Train
from gspo_mega.config.validate_episodes import validate_episodes
from gspo_mega.config.validate_hooks import validate_hooks
from gspo_mega.config.validate_learning import (
    resolve_defaults,
    validate_batch_invariance,
    validate_critic,
    validate_lora,
    validate_objective,
    validate_staleness,
)
from gspo_mega.config.validate_rewards import validate_reward_functions, validate_reward_services
from gspo_mega.config.validate_servers import (
    validate_delta,
    validate_returned_experts,
    validate_sampling_masks,
    validate_server_options,
    validate_speculative,
)
from gspo_mega.config.validate_sharing import validate_sharing
from gspo_mega.config.validate_teacher import validate_teacher

# Bounds on the counts that a plan iterates over. Each is far beyond any machine; a larger number is refused before a
# loop counts to it.
_MOST = {
    "cluster.num_nodes": 100_000,
    "cluster.ranks_per_node": 1024,
    "cluster.gpus_per_node": 1024,
    "cluster.num_rollout_nodes": 100_000,
    "server.num_servers": 100_000,
    "server.num_nodes": 10_000,
    "server.tensor": 10_000,
    "batch.num_mini_batches": 100_000,
}
_MOST_RANKS = 1_000_000
_MOST_NUMBER = 2**64
# Stands for the row's prompt in the template of a held-out set.
_PROMPT_MARK = "{prompt}"


def validate_config(config: Config, command: str | None = None) -> tuple[list[Violation], list[str]]:
    """Return (violations, notices) of a configuration that fits the schema.

    `command`: `train`, `sft`, `eval` or `budget` adds what that command needs; `certify` needs no data; None adds
    nothing. If a count is too large to plan with, only such counts are reported.
    """
    if too_large := validate_sizes(config):
        return too_large, []
    config = resolve_defaults(config)
    violations = [
        *validate_objective(config, command),
        *validate_critic(config),
        *validate_hooks(config),
        *validate_teacher(config, command),
        *_validate_batch(config.batch),
        *validate_sharing(config),
        *validate_staleness(config),
        *validate_colocated(config),
        *validate_delta(config),
        *_validate_optimizers(config),
        *_validate_experts(config),
        *_validate_data(config, command),
        *validate_reward_functions(config),
        *validate_lora(config),
        *validate_reward_services(config),
        *_validate_transformer_engine(config.engine, config.precision),
        *validate_batch_invariance(config),
        *_validate_fp8(config),
        *_validate_sharp_fp8(config, command),
        *_validate_rounded_cases(config.certify, config.precision),
        *_validate_rollout_and_servers(config),
        *validate_episodes(config),
        *validate_deadlines(config),
        *_validate_initial_weights(config, command),
        *validate_watching(config),
        *_validate_command(config, command),
    ]
    return violations, list(notices(config))


def validate_sizes(config: Config) -> list[Violation]:
    """Return a violation for each key whose number is too large to plan with. While there are any, no other rule may
    run.
    """
    tree = config.model_dump()
    found = [
        Violation(key, f"{value}: a plan cannot be made for so large a number; at most {most}", str(most))
        for key, most in _MOST.items()
        if (value := _at(tree, key)) is not None and value > most
    ]
    ranks = config.cluster.num_nodes * config.cluster.ranks_per_node
    if not found and ranks > _MOST_RANKS:
        text = f"{ranks} ranks on {config.cluster.num_nodes} nodes; a plan is made for at most {_MOST_RANKS}"
        found.append(Violation("cluster.num_nodes", text, str(_MOST_RANKS // config.cluster.ranks_per_node)))
    named = {one.key for one in found}
    for key, value in _numbers(tree, ""):
        if key not in named and abs(value) > _MOST_NUMBER:
            found.append(Violation(key, f"is a number of {value.bit_length()} bits; valid: at most 64", ""))
    return found


def _at(tree: Any, key: str) -> int | None:
    """Return the whole number at a dotted key; None if the key is absent or holds something else."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree if isinstance(tree, int) else None


def _numbers(tree: Any, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield (dotted key, value) of each whole number in the configuration."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        inner = f"{prefix}.{key}" if prefix else str(key)
        if type(value) is int:
            yield inner, value
        else:
            yield from _numbers(value, inner)


def _validate_batch(batch: Batch) -> Iterator[Violation]:
    num_sequences = batch.prompts_per_step * batch.group_size
    if batch.num_mini_batches > num_sequences:
        yield Violation(
            "batch.num_mini_batches",
            f"{batch.num_mini_batches} mini-batches of prompts_per_step x group_size = {num_sequences}"
            f" trajectories leave some empty; at most {num_sequences}",
        )


def validate_colocated(config: Config) -> Iterator[Violation]:
    """Yield what contradicts `cluster.colocated`: ranks and servers that use the same GPUs in turns."""
    if not config.cluster.colocated:
        return
    if config.rollout.max_staleness > 0:
        yield Violation(
            "cluster.colocated",
            f"true with `rollout.max_staleness: {config.rollout.max_staleness}`: sampling goes on while ranks train,"
            " which needs GPUs of its own; valid: false, or `max_staleness: 0`",
        )
    if config.publish.method == "distributed":
        yield Violation(
            "cluster.colocated",
            "true with `publish.method: distributed`: NCCL refuses a group with two members on one GPU, a rank and a"
            " server; valid: `method: disk`",
        )
    if config.cluster.num_rollout_nodes > 0:
        yield Violation(
            "cluster.colocated",
            f"true with `num_rollout_nodes: {config.cluster.num_rollout_nodes}`: nodes of their own for servers have no"
            " ranks to share GPUs with; valid: `num_rollout_nodes: 0`, or false",
        )
    if config.server.num_nodes > 1:
        yield Violation(
            "cluster.colocated",
            f"true with `server.num_nodes: {config.server.num_nodes}`: a server that takes turns with ranks is on their"
            " node; valid: `num_nodes: 1`, or false",
        )
    if config.optimizer.cpu_offload_fraction > 0:
        yield Violation(
            "cluster.colocated",
            "true with `optimizer.cpu_offload_fraction` above 0: all of the optimizer's state goes to the host while"
            " servers sample, and none stays there; valid: `cpu_offload_fraction: 0`, or false",
        )
    if config.fp8.parameters:
        yield Violation(
            "cluster.colocated",
            "true with `fp8.parameters: true`: parameters in FP8 cannot be moved to the host and back yet; valid:"
            " `parameters: false`, or false",
        )


def _validate_optimizers(config: Config) -> Iterator[Violation]:
    yield from _validate_optimizer(config, "optimizer")
    critic = critic_of(config.algorithm, config.critic)
    if critic is not None and (critic.optimizer is not None or critic.precision is not None):
        yield from _validate_optimizer(critic_config(config), "critic.optimizer")


def _validate_optimizer(config: Config, place: str) -> Iterator[Violation]:
    """Yield what contradicts `config.optimizer`. `place` is its dotted key in the file: `optimizer`, or
    `critic.optimizer` if `config` is the critic's configuration.
    """
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Violation(f"{place}.min_lr", f"{optimizer.min_lr:g} is above lr {optimizer.lr:g}; at most that")
    small, offloaded = optimizer.moments_dtype != "fp32", optimizer.cpu_offload_fraction > 0
    if optimizer.gradients_dtype == "bf16":
        yield from _validate_bf16_gradients(config, place)
    needs = {"moments_dtype": small, "cpu_offload_fraction": offloaded}
    for key, wanted in needs.items():
        if wanted and not optimizer.distributed:
            yield Violation(f"{place}.{key}", f"{getattr(optimizer, key)} needs `{place}.distributed: true`")
    if small and config.precision == "fp32":
        yield Violation(
            f"{place}.moments_dtype",
            f"{optimizer.moments_dtype} with `precision: fp32`: the fused Adam that keeps such moments needs bf16"
            " parameters; valid: fp32",
        )
    if small and offloaded:
        yield Violation(
            f"{place}.moments_dtype",
            f"{optimizer.moments_dtype} with cpu_offload_fraction > 0: Megatron's offloaded Adam keeps fp32 moments;"
            " valid: fp32",
        )
    if offloaded and config.precision == "fp8" and config.fp8.parameters:
        yield Violation(
            f"{place}.cpu_offload_fraction",
            "Megatron's offloaded Adam cannot read or write FP8 parameters; valid: 0, or `fp8.parameters: false`",
        )


def _validate_bf16_gradients(config: Config, place: str) -> Iterator[Violation]:
    """Yield what contradicts `gradients_dtype: bf16`."""
    optimizer = config.optimizer
    if config.precision == "fp32":
        yield Violation(
            f"{place}.gradients_dtype",
            "bf16 with `precision: fp32`: gradients have at least their parameters' precision; valid: fp32",
        )
    if config.precision == "fp8" and config.fp8.parameters:
        yield Violation(
            f"{place}.gradients_dtype",
            "bf16 with `fp8.parameters: true`: what Megatron's buffers make of that was not compared; valid: fp32, or"
            " `fp8.parameters: false`",
        )
    for key, plain in (("moments_dtype", "fp32"), ("cpu_offload_fraction", 0)):
        if getattr(optimizer, key) != plain:
            yield Violation(
                f"{place}.gradients_dtype",
                f"bf16 with {key} {getattr(optimizer, key)}: that Adam was not compared with such gradients; valid:"
                f" fp32, or {key}: {plain}",
            )


def _validate_experts(config: Config) -> Iterator[Violation]:
    moe = config.moe
    if moe.load_balancing != "none" and moe.load_balancing_coefficient == 0:
        yield Violation(
            "moe.load_balancing_coefficient",
            f"0 leaves `load_balancing: {moe.load_balancing}` without effect; above 0 (1e-3 is usual), or"
            " `load_balancing: none`",
        )
    if moe.load_balancing == "none" and moe.load_balancing_coefficient > 0:
        yield Violation(
            "moe.load_balancing_coefficient",
            f"{moe.load_balancing_coefficient:g} has no effect with `load_balancing: none`; 0, or `load_balancing:"
            " aux_loss`",
        )
    if moe.routing_replay == "R3" and not config.rollout.return_routed_experts:
        yield Violation(
            "moe.routing_replay",
            "R3 replays what the servers return; needs `rollout.return_routed_experts: true` (or R2, or none)",
        )
    if moe.routing_replay == "R2" and (config.old_log_probs == "rollout" or config.batch.num_mini_batches == 1):
        why = (
            "`old_log_probs: rollout` leaves that pass out"
            if config.old_log_probs == "rollout"
            else "with `batch.num_mini_batches: 1` the policy has not moved since"
        )
        yield Violation(
            "moe.routing_replay", f"R2 replays the routes of the old log-prob pass, and {why}; valid then: none, R3"
        )


def _validate_data(config: Config, command: str | None) -> Iterator[Violation]:
    data = config.data
    certifies = command == "certify" or (command is None and config.certify.cases)
    generated = data.reasoning_gym
    if not names_prompts(data) and not certifies and command != "eval":
        yield Violation("data.path", "missing; give `path` (one JSONL file) or `sources` (several with weights)")
    if generated is not None and (data.path is not None or data.sources):
        yield Violation(
            "data.reasoning_gym",
            f"given together with `{'path' if data.path is not None else 'sources'}`; keep one of them",
        )
    if generated is not None and data.procedural_python is not None:
        for index, entry in enumerate(config.reward.functions):
            if entry.function == "reasoning_gym" and "python" not in entry.options:
                yield Violation(
                    f"reward.functions.{index}.options",
                    f"lacks `python`; data.procedural_python is {data.procedural_python}, which has to score as well",
                )
    for name, count in Counter(task.name for task in generated.tasks).items() if generated is not None else ():
        if count > 1:
            yield Violation("data.reasoning_gym.tasks", f"{name!r} occurs {count} times; list it once")
    if data.path is not None and data.sources:
        yield Violation(
            "data.path",
            "both `path` and `sources` are given; keep one of them (override: data.path=null or data.sources=[])",
        )
    if data.path == "":
        yield Violation("data.path", "is empty; the path of a JSONL file")
    for name, count in Counter(source.name for source in data.sources).items():
        if count > 1:
            yield Violation("data.sources", f"{count} sources are named {name!r}; names must differ")
    if data.system_prompt is not None and not data.chat_template:
        yield Violation(
            "data.system_prompt", "needs `chat_template: true`; without a template there is no system message"
        )
    yield from validate_held_out(config)


def validate_held_out(config: Config) -> Iterator[Violation]:
    """Yield what is wrong with `eval`: its files, its sets, and their rewards, lengths and templates."""
    evaluation = config.eval
    if evaluation is None:
        return
    sets = eval_sets(config.eval, config.data)
    if not sets:
        yield Violation("eval.path", "missing; the JSONL file of held-out prompts")
    if evaluation.path is not None and evaluation.sets:
        yield Violation(
            "eval.path",
            "both `path` and `sets` are given; make the file an entry of `sets`, or leave those out (eval.sets=[])",
        )
    yield from _validate_background_evaluation(config)
    for name, count in Counter(entry.name for entry in evaluation.sets).items():
        if count > 1:
            yield Violation("eval.sets", f"{count} sets are named {name!r}; names must differ")
    own = own_rewards(config.data)
    is_unclear = None not in own and len(own) > 1 and evaluation.reward is None
    if is_unclear and not all(entry.reward for entry in evaluation.sets or [evaluation]):
        yield Violation(
            "eval.reward",
            "missing; the sources have different rewards of their own, and none has `reward`; valid:"
            f" {', '.join(sorted(' + '.join(one.function for one in reward or ()) for reward in own))}, or another",
        )
    most = config.rollout.max_new_tokens
    for one in sets:
        if one.max_new_tokens is not None and one.max_new_tokens > most:
            yield Violation(
                f"{one.place}.max_new_tokens",
                f"{one.max_new_tokens} is above rollout.max_new_tokens ({most}), from which the servers' context and"
                " deadlines follow; at most that",
            )
        if one.template is not None and _PROMPT_MARK not in one.template:
            yield Violation(
                f"{one.place}.template",
                f"lacks {_PROMPT_MARK}, which stands for the row's prompt; put it where the prompt belongs",
            )
        for key in one.template_keys:
            if f"{{{key}}}" not in (one.template or ""):
                yield Violation(
                    f"{one.place}.template_keys", f"{key!r} is not in `template`; put {{{key}}} where it belongs"
                )
        if one.data.system_prompt is not None and not one.data.chat_template and config.data.chat_template:
            yield Violation(
                f"{one.place}.chat_template",
                "false with a system prompt (of the set, or data.system_prompt); without a template there is no system"
                " message",
            )


def _validate_background_evaluation(config: Config) -> Iterator[Violation]:
    """Yield what contradicts an evaluation that runs while ranks train (`eval.blocking: false`)."""
    evaluation, num = config.eval, config.server.num_servers
    if evaluation is None or evaluation.blocking:
        return
    if config.cluster.colocated:
        yield Violation(
            "eval.blocking",
            "false with `cluster.colocated`: servers and ranks take turns on the same GPUs, so nothing can be measured"
            " while ranks train; valid: true, or servers with GPUs of their own",
        )
    elif num < 2:
        yield Violation(
            "eval.blocking",
            f"false with `server.num_servers: {num}`: the only server samples for training; valid: true, or 2 servers"
            " or more",
        )
    elif evaluation.servers >= num:
        yield Violation(
            "eval.servers",
            f"{evaluation.servers} of server.num_servers {num} would leave none for training; valid: 1 to {num - 1}",
        )


def _validate_transformer_engine(engine: Engine, precision: Precision) -> Iterator[Violation]:
    chosen = engine.transformer_engine
    if precision == "fp8" and chosen is False:
        yield Violation(
            "engine.transformer_engine",
            "false contradicts `precision: fp8`, whose products Transformer Engine computes; leave it out",
        )
    if precision == "fp32" and chosen:
        yield Violation(
            "engine.transformer_engine",
            "true contradicts `precision: fp32`: Transformer Engine rounds fp32 products to TF32 and has no fp32"
            " attention; valid: false, or `precision: bf16`",
        )


def _validate_fp8(config: Config) -> Iterator[Violation]:
    if (
        config.precision == "fp8"
        and config.fp8.recipe == "delayed"
        and (config.kl.coefficient > 0 or penalises_kl(config.algorithm, config.critic) or config.teacher is not None)
    ):
        yield Violation(
            "fp8.recipe",
            f"delayed with a {'KL term' if config.teacher is None else 'teacher'}: the scales of the frozen"
            f" {'reference' if config.teacher is None else 'teacher'} would follow its passes, and no checkpoint"
            " holds them; valid: blockwise, tensorwise or mxfp8",
        )
    if config.precision != "fp8" or not config.fp8.parameters:
        return
    optimizers = (
        [config.optimizer]
        if critic_of(config.algorithm, config.critic) is None
        else [config.optimizer, critic_config(config).optimizer]
    )
    if not all(optimizer.distributed for optimizer in optimizers):
        yield Violation(
            "fp8.parameters",
            "only Megatron's distributed optimizer writes FP8 parameters; set `optimizer.distributed: true`, or false"
            " here",
        )
    if config.fp8.recipe == "mxfp8":
        yield Violation(
            "fp8.parameters",
            "Megatron gathers mxfp8 parameters through its gradient buffers, inside an overlapped forward pass, which a"
            " pass between two optimizer steps would spoil; valid: false (or recipe delayed, tensorwise or blockwise)",
        )


def _validate_sharp_fp8(config: Config, command: str | None) -> Iterator[Violation]:
    if not config.certify.sharp_fp8:
        return
    if command not in (None, "certify"):
        yield Violation(
            "certify.sharp_fp8", f"only `gspo-mega certify` computes this way, not `{command}`; valid: false"
        )
    if config.precision == "fp8" and config.fp8.parameters:
        yield Violation("certify.sharp_fp8", "contradicts `fp8.parameters: true`: it keeps parameters in fp32")
    if config.precision == "fp8" and config.optimizer.moments_dtype != "fp32":
        yield Violation("certify.sharp_fp8", "needs `optimizer.moments_dtype: fp32`, as its parameters are fp32")


def _validate_rounded_cases(certify: Certify, precision: Precision) -> Iterator[Violation]:
    for index, case in enumerate(certify.cases):
        if not case.rounded:
            continue
        place = f"certify.cases.{index}"
        if case.ranks != 1:
            yield Violation(f"{place}.ranks", f"{case.ranks} for a case that is rounded; valid: 1")
        if case.set.get("precision", precision) == "fp8":
            yield Violation(f"{place}.rounded", "FP8 has no neighbours that keep their scale; valid: in fp32 or bf16")
        if case.refused or case.exact:
            yield Violation(f"{place}.rounded", "its numbers are measured, not judged; leave out `refused` and `exact`")


def _validate_rollout_and_servers(config: Config) -> Iterator[Violation]:
    yield from validate_server_nodes(config)
    yield from validate_speculative(config)
    yield from validate_returned_experts(config.rollout, config.server)
    yield from validate_sampling_masks(config)
    if config.run.name in (".", ".."):
        yield Violation(
            "run.name", f"{config.run.name!r} is not a folder of its own; valid: letters, digits and `.`, `_`, `-`"
        )
    if (problem := address_problem(config.server.host)) is not None:
        yield Violation("server.host", problem)
    yield from validate_server_options(config.server.options)
    if config.publish.verify == "tensors" and config.server.tensor > 1:
        yield Violation(
            "publish.verify",
            f"`tensors` compares whole tensors and server.tensor is {config.server.tensor}; valid then: auto, replicas",
        )


def validate_server_nodes(config: Config) -> Iterator[Violation]:
    """Yield what does not fit the nodes of servers: how many there are, and how a server is divided over several."""
    cluster, server = config.cluster, config.server
    rewards = sum(model.num_servers for model in config.reward.model if model.path)
    most = server.num_servers * server.num_nodes + rewards
    if cluster.num_rollout_nodes > most:
        over = f" over {server.num_nodes} nodes each" if server.num_nodes > 1 else ""
        over += f" and {rewards} of reward models" if rewards else ""
        yield Violation(
            "cluster.num_rollout_nodes",
            f"{cluster.num_rollout_nodes} nodes for server.num_servers {server.num_servers}{over}: some would have"
            f" nothing to do; at most {most}",
        )
    if server.num_nodes == 1:
        return
    if server.tensor % server.num_nodes:
        yield Violation(
            "server.num_nodes",
            f"{server.num_nodes} does not divide server.tensor {server.tensor}: SGLang places equally many ranks on"
            " each node;"
            f" valid: {', '.join(str(n) for n in range(1, server.tensor + 1) if server.tensor % n == 0)}",
        )
    key = "num_rollout_nodes" if cluster.num_rollout_nodes else "num_nodes"
    there = getattr(cluster, key)
    if there % server.num_nodes:
        near = max(there // server.num_nodes, 1) * server.num_nodes
        yield Violation(
            "server.num_nodes",
            f"{server.num_nodes}, and the servers have {there} nodes (cluster.{key}): a server takes"
            f" {server.num_nodes} whole neighbouring nodes; valid: a multiple of {server.num_nodes} as"
            f" cluster.{key}, for example"
            f" {near}, or another size here",
        )


def validate_deadlines(config: Config) -> Iterator[Violation]:
    """Yield a violation for each relation of `RELATIONS` that does not hold. A deadline that is absent breaks no
    relation.
    """
    for relation in RELATIONS:
        if relation.of_agents and is_one_turn(config.rollout):
            continue
        shorter, longer = _seconds(config, relation.shorter), _seconds(config, relation.longer)
        if shorter is None or longer is None or shorter < longer:
            continue
        if relation.blame == relation.longer:
            yield Violation(
                relation.blame,
                f"{longer:g} s is not longer than {relation.shorter} {shorter:g}: {relation.why}; above {shorter:g}",
            )
        else:
            than = (
                f"{relation.longer} {longer:g}"
                if isinstance(relation.longer, str)
                else f"the {longer:g} s after which a collective is given up"
            )
            yield Violation(
                relation.blame, f"{shorter:g} s is not shorter than {than}: {relation.why}; below {longer:g}"
            )


def _seconds(config: Config, side: str | float) -> float | None:
    """Seconds of one side of a relation; None where its key has no value."""
    if not isinstance(side, str):
        return side
    section, key = side.split(".")
    return getattr(getattr(config, section), key)


def _validate_initial_weights(config: Config, command: str | None) -> Iterator[Violation]:
    if config.model.weights is None:
        return
    if command in ("eval", "certify", "budget"):
        yield Violation(
            "model.weights",
            f"`gspo-mega {command_name(command)}` takes the weights of model.path; convert these with"
            " gspo-mega convert and name that folder there",
        )
    if config.kl.coefficient > 0 and config.kl.reference_path is None and config.lora is None:
        yield Violation(
            "kl.reference_path",
            "missing; the policy starts from model.weights, and the reference would be model.path. Name the"
            " reference's folder",
        )


def validate_watching(config: Config) -> Iterator[Violation]:
    """Yield what is wrong with the sections that watch a run from outside: metrics, profile and alerts."""
    prometheus = config.metrics.prometheus
    if prometheus is not None and (problem := address_problem(prometheus.host)) is not None:
        yield Violation("metrics.prometheus.host", problem)
    yield from _validate_profile(config.profile, config.cluster)
    yield from _validate_alerts(config.alerts)


def _validate_profile(profile: Profile, cluster: Cluster) -> Iterator[Violation]:
    steps, ranks = profile.steps, profile.ranks
    if steps is not None and steps[0] > steps[1]:
        yield Violation("profile.steps", f"[{steps[0]}, {steps[1]}] has its last step before its first")
    world = cluster.num_nodes * cluster.ranks_per_node
    if max(ranks) >= world:
        yield Violation("profile.ranks", f"there is no rank {max(ranks)}; valid: 0 to {world - 1}")


def _validate_alerts(alerts: Alerts) -> Iterator[Violation]:
    if alerts != Alerts() and alerts.command is None and alerts.url is None:
        yield Violation("alerts", "notifies nobody; give command, url or both")
    if alerts.url is not None and not alerts.url.startswith(("http://", "https://", "$")):
        yield Violation("alerts.url", "must begin with http:// or https://, or be $NAME of an environment variable")


def _validate_command(config: Config, command: str | None) -> Iterator[Violation]:
    needs = {"train": ("train",), "sft": ("sft", "eval"), "eval": ("eval",)}.get(command or "", ())
    for section in needs:
        if getattr(config, section) is None:
            yield Violation(section, f"missing; `gspo-mega {command_name(command)}` needs this section")
    if config.train is not None and config.train.from_rollouts is not None and config.train.rollouts_only:
        yield Violation(
            "train.rollouts_only",
            "contradicts train.from_rollouts: one only samples, the other only trains; give one",
        )
    train, nodes = config.train, config.cluster.num_nodes
    # Other commands start a configuration of a run on one node.
    if train is not None and command in (None, "train") and train.on_lost_node == "shrink" and train.min_nodes >= nodes:
        yield Violation(
            "train.min_nodes",
            f"{train.min_nodes} with cluster.num_nodes {nodes}: `on_lost_node: shrink` has no fewer nodes to go on"
            " with;" + (f" at most {nodes - 1}" if nodes > 1 else " valid: `on_lost_node: wait`"),
        )
    if train is not None and train.standby_processes and train.max_restarts == 0:
        yield Violation(
            "train.standby_processes",
            "true with train.max_restarts: 0, so that nothing is ever started in them; valid: false, or max_restarts"
            " above 0",
        )
    if train is not None and train.keep_servers:
        yield from _validate_kept_servers(config, train)
    if config.sft is not None and config.sft.stop_accuracy_low > config.sft.stop_accuracy_high:
        yield Violation(
            "sft.stop_accuracy_low",
            f"{config.sft.stop_accuracy_low:g} is above stop_accuracy_high {config.sft.stop_accuracy_high:g}; at most"
            " that",
        )


def _validate_kept_servers(config: Config, train: Train) -> Iterator[Violation]:
    """Yield what contradicts `train.keep_servers`: servers that outlive a failed start of the run."""
    cluster, server = config.cluster, config.server
    why = None
    if train.max_restarts == 0:
        why = "train.max_restarts: 0, so that no restart ever takes servers over; valid: false, or max_restarts above 0"
    elif cluster.colocated:
        why = (
            "cluster.colocated: true: a restart's ranks begin on the GPUs that servers would still hold; valid: false,"
            " or servers with GPUs of their own"
        )
    elif (cluster.num_nodes, cluster.num_rollout_nodes, server.num_nodes) != (1, 0, 1):
        why = (
            f"cluster.num_nodes: {cluster.num_nodes}, cluster.num_rollout_nodes: {cluster.num_rollout_nodes},"
            f" server.num_nodes: {server.num_nodes}: the servers of a Slurm job are steps that end with each start of"
            " the run; valid: false, or a run on one machine without Slurm"
        )
    if why is not None:
        yield Violation("train.keep_servers", f"true with {why}")
