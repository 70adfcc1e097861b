"""What makes a layout impossible for a model, or a deadline too short for a plan; all of it is found before anything
starts.

`validate_layout` collects every violation, each with the nearest valid value: sizes that do not divide, layouts that
are known to train wrong, features that Megatron or SGLang lacks for this model, lengths and batches that do not fit.
Ranks, pipeline stages, experts, models with biases and sinks, adapters, batches and lengths are here; precision is in
`validate_precision.py`, and servers are in `validate_servers.py`. `validate_deadlines` at the end compares deadlines
with the plan's estimates. Settings that are wrong for every model are refused earlier, by `config/validate.py`. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gspo_mega.base.errors import ModelError, PlanError, Violation
from gspo_mega.config.deadlines import COLLECTIVE_SECONDS
from gspo_mega.config.derived import episode_lengths, taught_tokens
from gspo_mega.config.precision import has_transformer_engine_layers
from gspo_mega.config.schema import Batch, Config, Moe, Parallel, Recompute, Sft, Train
from gspo_mega.models.families import FAMILIES
from gspo_mega.models.low_rank import adapted, module_of, targets_of
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors
from gspo_mega.plan.gpus import Device, is_on_gpu
from gspo_mega.plan.layout import (
    END_KEYS,
    Sizes,
    can_divide_model,
    dividing,
    divisors,
    given_ends,
    lighter_ends,
    nearest,
    stage_layers,
    undivided_sizes,
)
from gspo_mega.plan.peer_copies import validate_peer_copies
from gspo_mega.plan.timing import StepTime
from gspo_mega.plan.validate_delta import ADAPTERS_NOT_SERVED, validate_delta_nets, validate_text_part
from gspo_mega.plan.validate_precision import (
    validate_batch_invariance,
    validate_fusions,
    validate_optimizer,
    validate_precision,
)
from gspo_mega.plan.validate_servers import (
    validate_served_model,
    validate_server,
    validate_server_parallel,
    validate_server_precision,
    validate_speculative,
)

# Dispatchers that use DeepEP's kernels, through Megatron's `flex`.
_BY_KERNELS = ("deepep", "hybridep")
# Families with experts whose adapters a real server was shown to compute as the trainer does.
_SERVED_WITH_EXPERTS = ("qwen3_moe",)


def validate_layout(config: Config, spec: ModelSpec, device: Device | None) -> list[Violation]:
    """Return every violation, in the order of the file's sections; empty for a layout that can run.

    `device`: what the ranks will run on, None if that is not known, as on a login node.
    """
    sizes = Sizes.of(config)
    return [
        *_validate_ranks(config, spec, sizes, device),
        *_validate_tensor(config.parallel, spec, sizes),
        *validate_stages(config.parallel, config.recompute, spec, sizes),
        *validate_experts(config, spec, sizes, device),
        *validate_biased_layers(config, spec, device),
        *validate_delta_nets(config, spec),
        *validate_text_part(config, spec),
        *validate_precision(config, spec, device),
        *validate_fusions(config, spec, device),
        *validate_batch_invariance(config.engine, config.cluster, spec, device),
        *validate_lora(config, spec),
        *validate_optimizer(config, device),
        *validate_peer_copies(config),
        *_validate_batch(config.batch, config.sft, sizes),
        *validate_sharing(config, spec, device),
        *_validate_lengths(config, spec, sizes),
        *validate_server(config, spec, sizes, device),
        *validate_server_parallel(config, spec, device),
        *validate_speculative(config.server, config.cluster, spec, device),
        *validate_server_precision(config, spec, device),
        *validate_served_model(config, spec, device),
    ]


def _validate_ranks(config: Config, spec: ModelSpec, sizes: Sizes, device: Device | None) -> Iterator[Violation]:
    parallel = config.parallel
    if sizes.world % sizes.model and can_divide_model(config.parallel, spec):
        multiples = [sizes.model * k for k in (sizes.world // sizes.model, sizes.world // sizes.model + 1) if k > 0]
        yield Violation(
            "cluster.ranks_per_node",
            f"num_nodes {config.cluster.num_nodes} x ranks_per_node {config.cluster.ranks_per_node} = {sizes.world}"
            f" ranks, which tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context} ="
            f" {sizes.model} does not divide",
            " or ".join(f"{multiple} ranks in all" for multiple in multiples),
        )
    cluster = config.cluster
    if cluster.colocated and is_on_gpu(config.cluster, device) is False:
        yield Violation(
            "cluster.colocated",
            "true without GPUs: there is no GPU memory to take turns with, and SGLang's memory saver needs CUDA",
            "false",
        )
    servers_per_node = -(-config.server.num_servers // cluster.num_nodes)
    if cluster.colocated and servers_per_node * config.server.tensor > cluster.ranks_per_node:
        yield Violation(
            "cluster.colocated",
            f"true, and the {servers_per_node} servers of a node with server.tensor {config.server.tensor} need"
            f" {servers_per_node * config.server.tensor} GPUs, while its ranks have {cluster.ranks_per_node}",
            f"at most {cluster.ranks_per_node // config.server.tensor * cluster.num_nodes} as server.num_servers",
        )
    if cluster.gpus_per_node is not None and cluster.ranks_per_node > cluster.gpus_per_node:
        yield Violation(
            "cluster.ranks_per_node",
            f"{cluster.ranks_per_node} ranks, one GPU each, on nodes of {cluster.gpus_per_node} GPUs",
            str(cluster.gpus_per_node),
        )
    server = config.server
    if cluster.gpus_per_node is not None and server.tensor > cluster.gpus_per_node * server.num_nodes:
        nodes = -(-server.tensor // cluster.gpus_per_node)
        yield Violation(
            "server.tensor",
            f"a server on {server.tensor} GPUs does not fit on"
            f" {'a node' if server.num_nodes == 1 else f'{server.num_nodes} nodes'} of {cluster.gpus_per_node}",
            f"{cluster.gpus_per_node * server.num_nodes}, or `server.num_nodes: {nodes}`",
        )


def _validate_tensor(parallel: Parallel, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    tensor = parallel.tensor
    if bad := undivided_sizes(spec, tensor):
        valid = dividing(
            sizes.world,
            sizes.model // tensor,
            [size for size in divisors(spec.num_heads) if not undivided_sizes(spec, size)],
        )
        yield Violation(
            "parallel.tensor", f"{tensor} does not divide the model's {', '.join(bad)}", nearest(tensor, valid)
        )


def validate_stages(parallel: Parallel, recompute: Recompute, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    """Yield pipeline stages that cannot run, and a block of recomputed layers that does not divide a model chunk."""
    pipeline = parallel.pipeline
    given = [key for key, end in zip(END_KEYS, given_ends(parallel), strict=True) if end]
    virtual = parallel.virtual_pipeline
    if pipeline == 1 and (given or virtual is not None):
        for key in given:
            yield Violation(key, "the only pipeline stage has all layers", "leave it out (null)")
        if virtual is not None:
            yield Violation(
                "parallel.virtual_pipeline",
                f"{virtual} chunks per rank need pipeline stages, and pipeline is 1",
                "leave it out (null)",
            )
        return
    layers = stage_layers(spec.num_layers, parallel)
    if layers is None:
        yield from _undivided_layers(given, spec, parallel, sizes)
        return
    kinds = sorted(set(layers))
    if virtual is not None and (odd := [count for count in kinds if count % virtual]):
        choices = [d for d in divisors(kinds[-1]) if d > 1 and not any(count % d for count in kinds)]
        yield Violation(
            "parallel.virtual_pipeline",
            f"{virtual} does not divide the {_words(odd)} layers of a pipeline stage",
            nearest(virtual, choices) or "leave it out (null)",
        )
        return
    chunks = [count // (virtual or 1) for count in kinds]
    block = recompute.num_layers
    if recompute.granularity == "full" and any(count % block for count in chunks):
        # Megatron would read a layer after the chunk's last one.
        valid = [d for d in divisors(chunks[-1]) if not any(count % d for count in chunks)]
        yield Violation(
            "recompute.num_layers",
            f"{block} does not divide the {_words(chunks)} layers of a model chunk",
            nearest(block, valid),
        )


def _undivided_layers(given: list[str], spec: ModelSpec, parallel: Parallel, sizes: Sizes) -> Iterator[Violation]:
    first, last = given_ends(parallel)
    pipeline, ends = parallel.pipeline, lighter_ends(spec.num_layers, parallel.pipeline)
    described = ", ".join(f"{key}: {value}" for key, value in (ends or {}).items() if value is not None)
    if given:
        middle, left = pipeline - len(given), spec.num_layers - sum(first) - sum(last)
        valid = described or "leave both keys out (null)"
        if middle:
            yield Violation(
                given[-1],
                f"{left} layers are left for the {middle} other stages of {pipeline}, which need equally many, at least"
                " one each",
                valid,
            )
        else:
            yield Violation(
                given[-1],
                f"the two stages have {sum(first) + sum(last)} layers, and the model has {spec.num_layers}",
                valid,
            )
        return
    valid = nearest(pipeline, dividing(sizes.world, sizes.model // pipeline, divisors(spec.num_layers)))
    yield Violation(
        "parallel.pipeline",
        f"{pipeline} does not divide the model's {spec.num_layers} layers",
        f"{valid} or `parallel: {{{described}}}`" if ends else valid,
    )


def _words(counts: list[int]) -> str:
    return " or ".join(map(str, counts))


def validate_experts(config: Config, spec: ModelSpec, sizes: Sizes, device: Device | None) -> Iterator[Violation]:
    """Yield what makes a layout of experts impossible, or is known to train wrong."""
    if spec.moe is None:
        yield from _validate_without_experts(config, spec)
        return
    yield from _validate_router(config.moe, spec, spec.moe)
    yield from _validate_expert_division(config.parallel, spec, spec.moe, sizes)
    yield from _validate_dispatch(config, spec, device)


def _validate_without_experts(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    for key, value in (("expert", config.parallel.expert), ("expert_tensor", config.parallel.expert_tensor)):
        if value > 1:
            yield Violation(f"parallel.{key}", f"{value}, but the model ({spec.family}) has no experts", "1")
    if config.parallel.expert_dispatcher in _BY_KERNELS:
        yield Violation(
            "parallel.expert_dispatcher",
            f"{config.parallel.expert_dispatcher}, but the model ({spec.family}) has no experts",
            "alltoall",
        )
    if config.rollout.return_routed_experts:
        yield Violation("rollout.return_routed_experts", f"the model ({spec.family}) has no experts", "false")
    for key, off in (
        ("load_balancing", "none"),
        ("z_loss_coefficient", 0.0),
        ("expert_bias_update_rate", 0.0),
        ("routing_replay", "none"),
    ):
        if (value := getattr(config.moe, key)) != off:
            yield Violation(
                f"moe.{key}",
                f"{value}, but the model ({spec.family}) has no experts",
                f"{off:g}" if off == 0 else "none",
            )


def _validate_router(settings: Moe, spec: ModelSpec, moe: MoeSpec) -> Iterator[Violation]:
    if settings.expert_bias_update_rate > 0 and not moe.expert_bias:
        yield Violation(
            "moe.expert_bias_update_rate",
            f"{settings.expert_bias_update_rate:g}, but the routers of {spec.family} have no expert bias (which needs"
            " sigmoid scores and a bias in the checkpoint)",
            "0, with moe.load_balancing or without",
        )
    if moe.experts_per_token == 1 and moe.norm_topk_prob:
        yield Violation(
            "model.path",
            "num_experts_per_tok 1 with norm_topk_prob: the only expert's weight is 1 no matter what its router"
            " says, so"
            " the router cannot learn, and Megatron refuses it",
            "a model with norm_topk_prob false, or with more experts per token",
        )


def _validate_expert_division(parallel: Parallel, spec: ModelSpec, moe: MoeSpec, sizes: Sizes) -> Iterator[Violation]:
    expert, expert_tensor = parallel.expert, parallel.expert_tensor
    stands = can_divide_model(parallel, spec) and sizes.world % sizes.model == 0
    per_stage = sizes.world // parallel.pipeline
    fitting = [
        d for d in divisors(moe.num_experts) if sizes.world % (d * expert_tensor * parallel.pipeline) == 0 or not stands
    ]
    if moe.num_experts % expert:
        yield Violation(
            "parallel.expert",
            f"{expert} does not divide the model's {moe.num_experts} experts",
            nearest(expert, fitting),
        )
    elif stands and sizes.world % (expert * expert_tensor * parallel.pipeline):
        yield Violation(
            "parallel.expert",
            f"expert {expert} x expert_tensor {expert_tensor} x pipeline {parallel.pipeline} does not divide"
            f" {sizes.world} ranks",
            nearest(expert, fitting),
        )
    if moe.expert_intermediate_size % expert_tensor:
        yield Violation(
            "parallel.expert_tensor",
            f"{expert_tensor} does not divide the experts' intermediate size {moe.expert_intermediate_size}",
            nearest(expert_tensor, divisors(moe.expert_intermediate_size)),
        )
    if stands and expert == 1 and expert_tensor != parallel.tensor:
        # Megatron keeps the gradients of experts apart only if `expert` is above 1; otherwise it reduces them with the
        # rest.
        choices = [d for d in divisors(moe.num_experts) if d > 1 and per_stage % (d * expert_tensor) == 0]
        yield Violation(
            "parallel.expert",
            f"tensor {parallel.tensor} with expert 1 and expert_tensor {expert_tensor} trains wrong: experts would not"
            " be reduced over their data-parallel group",
            " or ".join([f"expert {d}" for d in choices[:1]] + [f"expert_tensor {parallel.tensor}"]),
        )


def _validate_dispatch(config: Config, spec: ModelSpec, device: Device | None) -> Iterator[Violation]:
    parallel = config.parallel
    if parallel.tensor > 1 and not parallel.sequence:
        yield Violation(
            "parallel.sequence",
            "experts with tensor > 1 need sequence parallelism (Megatron's dispatchers rely on it)",
            "true",
        )
    if parallel.pipeline > 1 and parallel.expert_dispatcher == "allgather":
        yield Violation(
            "parallel.expert_dispatcher",
            f"allgather needs micro-batches of one length, and pipeline {parallel.pipeline} runs packs of different"
            " lengths",
            "alltoall",
        )
    if (chosen := parallel.expert_dispatcher) in _BY_KERNELS:
        if is_on_gpu(config.cluster, device) is False:
            yield Violation(
                "parallel.expert_dispatcher", f"{chosen} without GPUs: DeepEP consists of GPU kernels", "alltoall"
            )
        if config.precision == "fp32":
            yield Violation(
                "parallel.expert_dispatcher",
                f"{chosen} with precision fp32: DeepEP moves bf16 numbers",
                "alltoall, or precision bf16 or fp8",
            )
        if parallel.expert * parallel.expert_tensor == 1:
            yield Violation(
                "parallel.expert_dispatcher",
                f"{chosen} with expert 1 and expert_tensor 1: no other rank has experts",
                "alltoall",
            )
    if gathers_unevenly(config.parallel, spec) and device == "cpu":
        yield Violation(
            "parallel.expert_dispatcher",
            f"alltoall with expert {parallel.expert} and expert_tensor {parallel.expert_tensor} gathers uneven token"
            " counts, which gloo, the only backend without GPUs, cannot",
            "allgather",
        )


def gathers_unevenly(parallel: Parallel, spec: ModelSpec) -> bool:
    """Return whether an expert-tensor group gathers a different number of tokens from each of its ranks.

    It does not if these ranks hold equal parts of packs and keep all of them: with a single expert rank, or if every
    token goes to every expert.
    """
    moe = spec.moe
    if moe is None or parallel.expert_tensor == 1 or parallel.expert_dispatcher != "alltoall":
        return False
    of_one_pack = parallel.tensor * parallel.context % parallel.expert_tensor == 0
    return not of_one_pack or (parallel.expert > 1 and moe.experts_per_token < moe.num_experts)


def validate_biased_layers(config: Config, spec: ModelSpec, device: Device | None) -> Iterator[Violation]:
    """Yield what a model with sinks and biases in every layer (gpt-oss), with windows or with other norms cannot be
    used with. Megatron cannot do some of it, and some has not been tried; each text says which.
    """
    family = FAMILIES[spec.family]
    parts = {
        "sinks": spec.sinks,
        "windows": spec.window is not None,
        "norms over all heads": family.norms_all_heads,
        "norms of outputs": family.norms_outputs,
    }
    if own := [name for name, has in parts.items() if has]:
        yield from _validate_attention(config, spec, " and ".join(own), device)
    if spec.linear_bias:
        yield from _validate_biases(config, spec)


def _validate_attention(config: Config, spec: ModelSpec, own: str, device: Device | None) -> Iterator[Violation]:
    has_gpu = is_on_gpu(config.cluster, device)
    if config.precision == "fp8":
        yield Violation(
            "precision", f"fp8: {spec.family} has been tried with Megatron's plain layers only", "bf16, fp32"
        )
    elif has_transformer_engine_layers(config.precision, config.engine, has_gpu=has_gpu is not False):
        chosen = "true" if config.engine.transformer_engine else "left out, which on a GPU means true"
        yield Violation(
            "engine.transformer_engine",
            f"{chosen}: Transformer Engine's layers with {own} have not been compared with transformers'",
            "false",
        )
    if has_gpu is False and (spec.sinks or spec.window) and config.server.attention_backend is not None:
        yield Violation(
            "server.attention_backend",
            f"{config.server.attention_backend} without GPUs: none of SGLang's backends there was tried with {own}",
            "null, for this package's backend",
        )


def _validate_biases(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    if config.parallel.expert_tensor > 1:
        yield Violation(
            "parallel.expert_tensor",
            f"{config.parallel.expert_tensor}: Megatron adds the biases of experts once for each rank that has a part"
            " of them, and refuses it",
            "1",
        )
    if config.engine.fuse_activation:
        yield Violation(
            "engine.fuse_activation",
            "true: Megatron's fused activation of these experts has no biases for single experts",
            "false, or leave it out",
        )
    if config.lora is not None:
        yield Violation("lora", f"set with {spec.family}: adapters on its biased layers have not been tried", "null")
    if config.server.quantization != "none":
        yield Violation(
            "server.quantization",
            f"{config.server.quantization} with {spec.family}: this package has no quantised form of experts with"
            " biases",
            "none",
        )


def validate_lora(config: Config, spec: ModelSpec) -> Iterator[Violation]:
    """Yield what `lora` asks for that this model or its layout does not have."""
    if config.lora is None:
        return
    try:
        found = adapted(spec, config.lora.targets)
    except ModelError as error:
        yield Violation("lora.targets", str(error).partition(": ")[2])
        return
    if config.publish.lora == "adapter" and (said := _not_served(spec, found)):
        yield Violation("publish.lora", f"adapter, and the model ({spec.family}) has {said}", "merged")
    if any(entries[0].expert is not None for entries in found.values()) and config.parallel.expert_tensor > 1:
        own = [name for name in targets_of(spec) if name not in _expert_modules(spec)]
        yield Violation(
            "parallel.expert_tensor",
            f"{config.parallel.expert_tensor} cuts every expert, and an expert's adapter is whole on its rank; to leave"
            f" experts without adapters, set `lora.targets: [{', '.join(own)}]`",
            "1",
        )


def _not_served(spec: ModelSpec, found: dict[str, list[TensorEntry]]) -> str:
    """Return why servers cannot be sent these adapters; empty if they can."""
    if spec.latent is not None:
        return (
            "latent attention: SGLang applies the adapters of kv_b_proj only with GPU kernels, and no server has been"
            " compared with the trainer"
        )
    if FAMILIES[spec.family].norms_outputs:
        return "norms of outputs: no server with adapters has been compared with the trainer"
    if spec.delta is not None:
        return ADAPTERS_NOT_SERVED
    if FAMILIES[spec.family].text_part:
        return "a vision tower: no server of such a class with adapters has been compared with the trainer"
    if spec.moe is not None and spec.family not in _SERVED_WITH_EXPERTS:
        served = ", ".join(_SERVED_WITH_EXPERTS)
        return f"experts: servers with adapters were compared with the trainer for {served} and models without experts"
    roles = {entry.role for entries in found.values() for entry in entries if entry.expert is not None}
    if roles and not {"gate", "whole"} <= roles:
        gate, _, down = dict.fromkeys(module_of(e) for e in hf_tensors(spec) if e.expert is not None)
        return f"experts with adapters: SGLang computes them only if {gate} and {down} are both in lora.targets"
    return ""


def _expert_modules(spec: ModelSpec) -> set[str]:
    """Return the names of the modules of experts that may have an adapter."""
    found = adapted(spec, ())
    return {module_of(entry) for entries in found.values() for entry in entries if entry.expert is not None}


def _validate_batch(batch: Batch, sft: Sft | None, sizes: Sizes) -> Iterator[Violation]:
    num_sequences = batch.prompts_per_step * batch.group_size
    if num_sequences // batch.num_mini_batches < sizes.data:
        largest = num_sequences // sizes.data
        yield Violation(
            "batch.num_mini_batches",
            f"{num_sequences} trajectories (prompts_per_step x group_size) in {batch.num_mini_batches} mini-batches are"
            f" {num_sequences // batch.num_mini_batches} per mini-batch, fewer than the {sizes.data} data-parallel"
            " ranks",
            (
                str(largest)
                if largest
                else f"1, with at least {math.ceil(sizes.data / batch.group_size)} prompts_per_step"
            ),
        )
    if sft is not None and sft.sequences_per_step < sizes.data:
        yield Violation(
            "sft.sequences_per_step",
            f"{sft.sequences_per_step} demonstrations are fewer than the {sizes.data} data-parallel ranks",
            str(sizes.data),
        )


def validate_sharing(config: Config, spec: ModelSpec, device: Device | None) -> Iterator[Violation]:
    """Yield what `batch.share_prefixes` needs that the model or the device does not have."""
    mode = config.batch.share_prefixes
    if mode == "off":
        return
    if spec.delta is not None and is_on_gpu(config.cluster, device):
        yield Violation(
            "batch.share_prefixes",
            f"{mode} on GPUs, and the model ({spec.family}) has gated delta nets: their kernels, which would fork"
            " states where rows part, can be neither traced nor run without a GPU; it runs on CPUs only",
            "off",
        )


def _validate_lengths(config: Config, spec: ModelSpec, sizes: Sizes) -> Iterator[Violation]:
    longest = sizes.longest_sequence
    lengths = episode_lengths(config)
    if longest > spec.max_position_embeddings and config.episodes.max_tokens is not None:
        yield Violation(
            "episodes.max_tokens",
            f"{longest} is more than the model's {spec.max_position_embeddings} positions",
            str(spec.max_position_embeddings),
        )
    elif longest > spec.max_position_embeddings:
        room = spec.max_position_embeddings - config.data.max_prompt_tokens
        yield Violation(
            "rollout.max_new_tokens",
            f"{lengths.spelled} is more than the model's {spec.max_position_embeddings} positions",
            str(room) if room > 0 else f"none: max_prompt_tokens must be below {spec.max_position_embeddings} first",
        )
    context = config.server.context_tokens or spec.max_position_embeddings
    if (taught := taught_tokens(config.teacher, config.rollout.max_new_tokens)) > min(
        context, spec.max_position_embeddings
    ):
        yield Violation(
            "teacher",
            f"its prompt (max_prompt_tokens) and a response have up to {taught} tokens, and the policy's servers have"
            f" room for {min(context, spec.max_position_embeddings)} (server.context_tokens, the model's positions)",
        )
    padded = math.ceil(longest / sizes.pack_multiple) * sizes.pack_multiple
    if padded > config.batch.micro_batch_tokens:
        rounding = f", {padded} when padded to a multiple of {sizes.pack_multiple}," if padded != longest else ""
        yield Violation(
            "batch.micro_batch_tokens",
            f"{config.batch.micro_batch_tokens} cannot hold the longest sequence: {lengths.spelled}{rounding} and"
            " sequences are never split",
            str(padded),
        )


def validate_deadlines(config: Config, time: StepTime | None, save_seconds: float, where: Callable[[str], str]) -> None:
    """Compare deadlines with the plan's estimates: one that is too short would end a healthy run. `time`: None if no
    GPU is named. Raises PlanError with a line for each deadline that is shorter than what it bounds.
    """
    wrong = [f"{where(key)}: {key}: {text}" for key, text in _short_deadlines(config, time, save_seconds)]
    if wrong:
        raise PlanError("\n".join(wrong))


def _short_deadlines(config: Config, time: StepTime | None, save_seconds: float) -> Iterator[tuple[str, str]]:
    if time is None:
        return
    total = config.rollout.request_deadline_seconds
    if total is not None and total <= time.rollout:
        yield (
            "rollout.request_deadline_seconds",
            (
                f"{total:g} s is shorter than a rollout ({time.rollout:.0f} s by estimate): the run would stop at the"
                f" first response that takes longer. Set it above {time.rollout:.0f}, or leave it out"
            ),
        )
    if config.publish.deadline_seconds <= time.publish and _publishes(config.train):
        yield (
            "publish.deadline_seconds",
            (
                f"{config.publish.deadline_seconds:g} s is shorter than a publish ({time.publish:.0f} s by estimate)."
                f" Set it above {time.publish:.0f}"
            ),
        )
    bound = config.watchdog.checkpoint_seconds
    if bound is not None and bound <= save_seconds:
        yield (
            "watchdog.checkpoint_seconds",
            (
                f"{bound:g} s is shorter than a save ({save_seconds:.0f} s by estimate). Set it above"
                f" {save_seconds:.0f}, or leave it out"
            ),
        )
    if save_seconds >= COLLECTIVE_SECONDS:
        yield (
            "checkpoint",
            (
                f"a save takes {save_seconds:.0f} s by estimate, and ranks wait at most {COLLECTIVE_SECONDS:g} s for"
                " each other. optimizer.moments_dtype makes checkpoints smaller"
            ),
        )


def _publishes(train: Train | None) -> bool:
    return train is None or train.from_rollouts is None
