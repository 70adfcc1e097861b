"""What a published version takes, by the precision that servers hold: bytes on disk and on the way.

Owns these sums for the estimates of disk and time; a server's memory is `servers.py`'s, the layout itself
`models/block_fp8.py`'s.

How a server's weights and cache are divided over its GPUs: tensor, expert, and data-parallel attention.

Owns the rules, which are SGLang 0.5.23's (`moe_ep_setup.py`, `parallel_hook.py`, the `_A2A_EP_SPANNING_BACKENDS` of
`loader.py`), and how many ranks share each part of the model. No torch.

What the precisions of a server need: bytes of its weights and of its cache, sides that blocks divide, and what
SGLang 0.5.23 can do with them on a GPU.

Owns the rules; what the keys mean is `config/derived.py`'s. No torch.

Which nodes of a job its servers are on, and which GPUs of these they have: the policy's, and those of reward models.

Owns the dealing, for the plan, the simulation and the launcher. Knows no node by name and starts nothing.

What speculative decoding takes of a server's GPU: the draft's weights and its own cache; and where it cannot run.

The draft's folder is read for its size and shape. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gspo_mega.base.errors import PlanError, Violation
from gspo_mega.base.untrusted import read_json_file
from gspo_mega.config.derived import BLOCK, DTYPES, capability_problem, publishes, server_dtype
from gspo_mega.config.schema import Config, ModelReward
from gspo_mega.config.validate_learning import publishes_adapters
from gspo_mega.config.validate_servers import draft_folder
from gspo_mega.models.block_fp8 import is_quantizable, served_layout, stored_bytes
from gspo_mega.models.hf_fields import needs_plain_copy
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors
from gspo_mega.plan.gpus import GPUS, is_on_gpu
from gspo_mega.plan.layout import divisors, nearest
from gspo_mega.plan.state import num_adapter_parameters

# Families whose attention SGLang divides over a group of its own; the others' takes the whole tensor group.
WITH_DATA_PARALLEL_ATTENTION = ("qwen3", "qwen3_moe", "deepseek_v3")


def attention_ranks(config: Config) -> int:
    """Ranks that divide the heads among them: those of one data-parallel group of the attention."""
    return max(1, config.server.tensor // config.server.attention_data)


def expert_ranks(config: Config) -> int:
    """Ranks that share one expert."""
    return max(1, config.server.tensor // config.server.expert)


def ranks_that_share(config: Config, entry: TensorEntry) -> int:
    """Over how many of a server's ranks one tensor is divided. Norms and the router, on every rank, count as divided:
    they are small.
    """
    server = config.server
    if entry.expert is not None:
        return server.tensor
    if server.attention_data > 1 and (".self_attn." in entry.name or entry.stage == "first"):
        return 1 if entry.stage == "first" else attention_ranks(config)
    if server.expert_dispatcher == "deepep" and "shared_expert" in entry.name:
        return 1
    return server.tensor


def divides_attention(config: Config, spec: ModelSpec, tensor: int) -> bool:
    """Can `tensor` ranks hold the attention? SGLang copies a key-value head where there are more ranks than heads."""
    if tensor % config.server.attention_data:
        return False
    ranks, kv_heads = tensor // config.server.attention_data, spec.num_kv_heads
    return spec.num_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_server_parallel(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """What SGLang would refuse at a server's start, or change without a word."""
    server = config.server
    if server.tensor % server.attention_data:
        yield Violation(
            "server.attention_data",
            f"{server.attention_data} does not divide server.tensor {server.tensor}",
            nearest(server.attention_data, divisors(server.tensor)),
        )
    if server.attention_data > 1 and spec.family not in WITH_DATA_PARALLEL_ATTENTION:
        yield Violation(
            "server.attention_data",
            f"{server.attention_data}: SGLang divides the attention of {spec.family} over all of a server's ranks;"
            f" it can do otherwise with {', '.join(WITH_DATA_PARALLEL_ATTENTION)}",
            "1",
        )
    if spec.moe is None:
        if server.expert > 1 or server.expert_dispatcher != "none":
            yield Violation("server.expert", f"{server.expert}, but the model ({spec.family}) has no experts", "1")
        return
    both = [size for size in divisors(server.tensor) if spec.moe.num_experts % size == 0]
    if server.expert not in both:
        yield Violation(
            "server.expert",
            f"{server.expert} does not divide both server.tensor {server.tensor} and the model's"
            f" {spec.moe.num_experts} experts",
            nearest(server.expert, both),
        )
    if server.expert_dispatcher != "none":
        if server.expert != server.tensor or server.expert == 1:
            yield Violation(
                "server.expert_dispatcher",
                f"{server.expert_dispatcher} exchanges tokens between all ranks of a server: SGLang would set"
                f" server.expert from {server.expert} to server.tensor {server.tensor}",
                f"none, or `server.expert: {server.tensor}`" if server.tensor > 1 else "none",
            )
        if is_on_gpu(config, device) is False:
            yield Violation(
                "server.expert_dispatcher",
                f"{server.expert_dispatcher} without GPUs: it is made of their kernels",
                "none",
            )
    on_cpu = is_on_gpu(config, device) is False
    if on_cpu and server.expert > 1 and (server_dtype(config) != "fp32" or server.quantization != "none"):
        yield Violation(
            "server.expert",
            f"{server.expert} without GPUs: SGLang computes experts of other ranks there in fp32 alone, not quantized",
            "1, or `server.dtype: fp32` with `server.quantization: none`",
        )


DTYPE_BYTES = {"fp32": 4, "bf16": 2}
_SCALE_BYTES = 4
# Compute capability of Ada, the first with e4m3.
_FIRST_E4M3 = (8, 9)
# Without a GPU SGLang 0.5.23 pads the widths of MLPs to multiples of this, for each of a server's tensor ranks
# (`adjust_config_with_unaligned_cpu_tp`).
_CPU_WIDTH = 32
# Families whose output layer SGLang 0.5.23 never ties to the embedding, whatever config.json says (its `models/*.py`
# make a ParallelLMHead of its own): a folder without lm_head.weight leaves it at random values.
WITH_OWN_HEAD = ("qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe", "gpt_oss")


def weight_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of one server's weights, all its ranks together: a byte for each quantized element, its scales, and the
    rest in the server's dtype.
    """
    size = DTYPE_BYTES[server_dtype(config)]
    if config.server.quantization == "none":
        return total_parameters * size
    quantized = [entry for entry in hf_tensors(spec) if is_quantizable(entry)]
    elements = sum(entry.num_elements for entry in quantized)
    scales = sum(_num_scales(config.server.quantization, entry) for entry in quantized)
    return (total_parameters - elements) * size + elements + scales * _SCALE_BYTES


def rank_weight_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of the weights of one of a server's ranks."""
    server = config.server
    if server.attention_data == 1 and server.expert_dispatcher == "none":
        return weight_bytes(config, spec, total_parameters) // server.tensor
    size, found = DTYPE_BYTES[server_dtype(config)], 0.0
    for entry in hf_tensors(spec):
        quantized = server.quantization != "none" and is_quantizable(entry)
        scales = _num_scales(server.quantization, entry) * _SCALE_BYTES if quantized else 0
        found += (entry.num_elements * (1 if quantized else size) + scales) / ranks_that_share(config, entry)
    return round(found)


def cache_element_bytes(config: Config) -> int:
    """Bytes of one element of the cache."""
    return 1 if config.server.kv_cache == "fp8" else DTYPE_BYTES[server_dtype(config)]


def _num_scales(quantization: str, entry: TensorEntry) -> int:
    rows, columns = entry.shape
    if quantization == "fp8_block":
        return -(-rows // BLOCK[0]) * -(-columns // BLOCK[1])
    return 1 if quantization == "fp8" and entry.expert is not None else rows


def check_served_model(
    config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None = None
) -> Iterator[Violation]:
    """What SGLang would serve as another model than the folder holds. Only for a run that samples. `device`: the
    ranks', where it is known.
    """
    samples = publishes(config) or config.eval is not None
    replays = config.train is not None and config.train.from_rollouts is not None
    width = _CPU_WIDTH * config.server.tensor
    padded = [f"{name} {size}" for name, size in _widths(spec) if size % width]
    if publishes(config) and not replays and padded and is_on_gpu(config, device) is False:
        yield Violation(
            "model.path",
            f"{' and '.join(padded)}: without a GPU SGLang 0.5.23 pads such widths to multiples of {_CPU_WIDTH} x"
            f" server.tensor {config.server.tensor} = {width}, and no update of the weights can be verified",
            f"a model whose widths {width} divides, or GPUs",
        )
    if samples and not replays and spec.tie_word_embeddings and spec.family in WITH_OWN_HEAD:
        yield Violation(
            "model.path",
            f"tie_word_embeddings is true in its config.json, and SGLang 0.5.23 does not tie them in {spec.family}: its"
            " servers would sample from an output layer of random values",
            "a folder with `tie_word_embeddings: false` and a copy of model.embed_tokens.weight as lm_head.weight",
        )


def _widths(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """(name, width) of the MLPs that a model has."""
    moe = spec.moe
    if moe is None or moe.num_dense_layers:
        yield "intermediate_size", spec.intermediate_size
    if moe is not None:
        yield "the experts' width", moe.expert_intermediate_size
        if moe.shared_intermediate_size:
            yield "the shared experts' width", moe.shared_intermediate_size


def check_server_precision(
    config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None
) -> Iterator[Violation]:
    """What SGLang would refuse at a server's start, or at the first publish. `device`: the ranks', None if unknown."""
    server = config.server
    gpu = config.cluster.gpu if device != "cpu" else None
    lacks_e4m3 = gpu is not None and GPUS[gpu].capability < _FIRST_E4M3
    # Where no backend is named, SGLang takes Triton for latent attention, and FlashInfer, which reads e4m3, else.
    by_triton = server.attention_backend == "triton" or (server.attention_backend is None and spec.latent is not None)
    if server.kv_cache == "fp8" and lacks_e4m3 and by_triton:
        yield Violation(
            "server.kv_cache",
            f"fp8 on {gpu}: Triton, which computes this attention there, has no e4m3 before compute capability 8.9",
            "auto" if spec.latent is not None else "auto, or `server.attention_backend: flashinfer`",
        )
    if server.quantization == "none":
        return
    if server.quantization == "fp8_block" and (sides := list(_undivided(config, spec))):
        yield Violation(
            "server.quantization",
            f"fp8_block needs these sides of a linear layer on one of a server's {server.tensor} ranks to be multiples"
            f" of {BLOCK[0]}: {', '.join(sides)}",
            "none, or a smaller server.tensor" if server.tensor > 1 else "none, fp8, int8",
        )
    if not is_on_gpu(config, device):
        return
    if server_dtype(config) != "bf16":
        yield Violation(
            "server.quantization",
            f"{server.quantization} with activations in {server_dtype(config)}: on a GPU SGLang's products of quantized"
            " operands take bf16",
            "`server.dtype: bf16`",
        )
    if server.quantization == "int8":
        yield Violation(
            "server.quantization",
            "int8: on a GPU SGLang takes INT8 weights from a checkpoint only, and cannot load others into a running"
            " server",
            "fp8_block, or none",
        )
    elif server.quantization == "fp8" and publishes(config):
        yield Violation(
            "server.quantization",
            "fp8: on a GPU SGLang cannot load new weights into layers that it quantized while loading, so that every"
            " publish would fail; without `train` and `sft` (`gspo-mega eval`) it can be used",
            "fp8_block, or none",
        )
    gpu = config.cluster.gpu
    if gpu is not None and (
        problem := capability_problem(server.quantization, GPUS[gpu].capability, publishes(config))
    ):
        yield Violation("server.quantization", f"cluster.gpu {gpu}: {problem}", "none")


def _undivided(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Sides of one rank's linear layers that blocks do not divide. SGLang wants whole blocks in every part of a layer
    that has parts (query, key, value; gate, up) or is cut over ranks, and in every input: 128 values of a token share a
    scale.
    """
    tensor, attention, heads = config.server.tensor, attention_ranks(config), spec.num_heads
    sides = {
        "hidden size": (spec.hidden_size, 1),
        "attention output (heads x head size)": (heads * spec.value_head_dim, attention),
    }
    if spec.latent is None:
        sides["query size (heads x head size)"] = (heads * spec.head_dim, attention)
        sides["key size and value size (heads x head size)"] = (
            spec.num_kv_heads * spec.head_dim,
            min(attention, spec.num_kv_heads),  # above that, ranks keep copies of a head
        )
    else:
        latent = spec.latent
        sides["kv_lora_rank"] = (latent.key_value_rank, 1)
        if latent.query_rank is not None:
            sides["q_lora_rank"] = (latent.query_rank, 1)
        if attention > 1:
            both = heads * (latent.content_dim + latent.value_dim)
            sides["query size (heads x head size)"] = (heads * spec.head_dim, attention)
            sides["keys' and values' size (heads x both)"] = (both, attention)
    if not spec.has_experts(0):
        sides["intermediate size"] = (spec.intermediate_size, tensor)
    if spec.moe is not None:
        sides["experts' intermediate size"] = (spec.moe.expert_intermediate_size, expert_ranks(config))
        if spec.moe.shared_intermediate_size:
            sides["shared experts' intermediate size"] = (spec.moe.shared_intermediate_size, tensor)
    for name, (size, ranks) in sides.items():
        if size % ranks == 0 and size // ranks % BLOCK[0]:
            yield f"{name} {size}" + (f" / {ranks} ranks" if ranks > 1 else "")


@dataclass(frozen=True)
class RewardPlace:
    """A server of a reward model: the model's name, its number among that model's, its node among those with servers,
    and `num_gpus` GPUs there, from `first_gpu` on.
    """

    name: str
    index: int
    node: int
    first_gpu: int
    num_gpus: int


@dataclass(frozen=True)
class ServerPlaces:
    """`by_node[n]`: indices of the policy's servers on the n-th node with servers. `gpus`: in use on each of these
    nodes, the ranks' among them where they are there.
    """

    by_node: tuple[tuple[int, ...], ...]
    rewards: tuple[RewardPlace, ...]
    gpus: tuple[int, ...]


def reward_servers(config: Config) -> list[tuple[ModelReward, int]]:
    """The servers that a run starts for its reward models: (entry of `reward.model`, number among its servers)."""
    return [(model, index) for model in config.reward.model if model.path for index in range(model.num_servers)]


def reward_gpus(config: Config) -> int:
    """The GPUs of all of them."""
    return sum(model.tensor for model, _ in reward_servers(config))


def place_servers(config: Config, num_servers: int, num_nodes: int, num_ranks: int = 0) -> ServerPlaces:
    """Deal servers to nodes, those with the most GPUs first, each to the node with the fewest in use, a server of the
    policy over several nodes to as many neighbours; where only the policy has servers, that is in turn. On a node the
    policy's come first, behind the `num_ranks` ranks, or in turns with these, where they take no further GPUs.
    """
    server = config.server
    own, over = server.tensor // server.num_nodes, server.num_nodes
    groups = [range(first, min(first + over, num_nodes)) for first in range(0, max(1, num_nodes - over + 1), over)]
    by_node: list[list[int]] = [[] for _ in range(num_nodes)]
    scored: list[list[tuple[ModelReward, int]]] = [[] for _ in range(num_nodes)]
    load, load_of_policy = [0] * num_nodes, [0] * num_nodes
    if not config.cluster.colocated:
        load_of_policy = load  # the same GPUs
    waiting: list[tuple[int, int, tuple[ModelReward, int] | int]] = [(-own, 0, index) for index in range(num_servers)]
    waiting += [(-one[0].tensor, 1, one) for one in reward_servers(config)]
    for _, _, one in sorted(waiting, key=lambda entry: entry[:2]):
        if isinstance(one, int):
            group = min(groups, key=lambda nodes: max(load_of_policy[node] for node in nodes))
            for node in group:
                by_node[node].append(one)
                load_of_policy[node] += own
        else:
            node = load.index(min(load))
            scored[node].append(one)
            load[node] += one[0].tensor
    rewards, used = [], []
    for node, servers in enumerate(by_node):
        gpus = len(servers) * own
        gpus = max(num_ranks, gpus) if config.cluster.colocated else num_ranks + gpus
        for model, index in scored[node]:
            rewards.append(RewardPlace(model.name, index, node, gpus, model.tensor))
            gpus += model.tensor
        used.append(gpus)
    return ServerPlaces(tuple(map(tuple, by_node)), tuple(rewards), tuple(used))


def check_rollout_nodes(config: Config, where: Callable[[str], str]) -> None:
    """Raises PlanError, with the key's place, where the nodes that only hold servers have fewer GPUs than these need. A
    run on recorded rollouts starts no servers.
    """
    cluster, server = config.cluster, config.server
    replays = config.train is not None and config.train.from_rollouts is not None
    if cluster.gpus_per_node is None or not cluster.num_rollout_nodes or replays:
        return
    needed = max(place_servers(config, server.num_servers, cluster.num_rollout_nodes).gpus)
    if needed <= cluster.gpus_per_node:
        return
    rewards = reward_gpus(config)
    both = f" and {rewards} of reward.model" if rewards else ""
    raise PlanError(
        f"{where('cluster.num_rollout_nodes')}: cluster.num_rollout_nodes: {cluster.num_rollout_nodes}"
        f" node{'s' * (cluster.num_rollout_nodes > 1)} of {cluster.gpus_per_node} GPUs (cluster.gpus_per_node) for"
        f" {server.num_servers * server.tensor} GPUs of servers (server.num_servers {server.num_servers} x"
        f" server.tensor {server.tensor}){both}: one node would need {needed}; valid: at least"
        f" {enough_nodes(config, cluster.num_rollout_nodes)} nodes, or fewer servers"
    )


def check_shared_nodes(config: Config, where: Callable[[str], str]) -> None:
    """As `check_rollout_nodes`, for ranks and servers on the same nodes (`cluster.num_rollout_nodes` 0)."""
    cluster, server = config.cluster, config.server
    replays = config.train is not None and config.train.from_rollouts is not None
    if cluster.gpus_per_node is None or cluster.num_rollout_nodes or replays:
        return
    needed = max(place_servers(config, server.num_servers, cluster.num_nodes, cluster.ranks_per_node).gpus)
    if needed <= cluster.gpus_per_node:
        return
    colocated = ", in turns (cluster.colocated)" if cluster.colocated else ""
    raise PlanError(
        f"{where('cluster.gpus_per_node')}: cluster.gpus_per_node: a node of {cluster.gpus_per_node} GPUs for its"
        f" {cluster.ranks_per_node} ranks and its share of server.num_servers {server.num_servers} x server.tensor"
        f" {server.tensor}{' and of reward.model' if reward_gpus(config) else ''}{colocated} would need {needed};"
        f" valid: nodes of their own for the servers (cluster.num_rollout_nodes: {enough_nodes(config, 1)}), fewer of"
        " them, or fewer cluster.ranks_per_node"
    )


def enough_nodes(config: Config, at_least: int) -> int:
    """The fewest nodes, and at least so many, on which all servers find their GPUs, each server within
    `cluster.gpus_per_node` on each of its nodes.
    """
    server, node = config.server, config.cluster.gpus_per_node
    assert node is not None
    nodes = max(at_least, server.num_nodes)
    most = nodes + server.num_servers * server.num_nodes + len(reward_servers(config))
    while nodes < most and max(place_servers(config, server.num_servers, nodes).gpus) > node:
        nodes += 1
    return nodes


@dataclass(frozen=True)
class DraftNeeds:
    """Bytes on one GPU of a server: of the draft's weights, and of its cache per token."""

    weights: int = 0
    cached_token: int = 0


def draft_needs(config: Config, spec: ModelSpec) -> DraftNeeds:
    """Nothing without a draft model. A layer for multi-token prediction counts as one more of the policy's layers, and
    the projection before it.
    """
    folder, speculative = draft_folder(config), config.server.speculative
    if folder is None or speculative is None:
        return DraftNeeds()
    if speculative.draft_path is None:
        layer = sum(entry.num_elements for entry in hf_tensors(spec) if entry.layer == spec.num_layers - 1)
        elements = layer + 2 * spec.hidden_size**2
        cached = spec.cache_elements_per_token // spec.num_layers
        if spec.latent is None:
            cached //= min(attention_ranks(config), spec.num_kv_heads)
        size = DTYPE_BYTES[server_dtype(config)] if config.server.quantization == "none" else 1
        return DraftNeeds(elements * size // config.server.tensor, cached * cache_element_bytes(config))
    shape = _shape(Path(folder))
    stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    heads = shape.get("num_attention_heads", 1)
    kv_heads = max(1, shape.get("num_key_value_heads", heads) // attention_ranks(config))
    head_dim = shape.get("head_dim") or shape.get("hidden_size", 0) // heads
    cached = 2 * shape.get("num_hidden_layers", 1) * kv_heads * head_dim
    return DraftNeeds(stored // config.server.tensor, cached * cache_element_bytes(config))


def _shape(folder: Path) -> dict:
    try:
        found = read_json_file(folder / "config.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if type(value) is int and 0 < value < 2**31}


def check_speculative(config: Config, spec: ModelSpec, device: Literal["cpu", "gpu"] | None) -> Iterator[Violation]:
    """Where SGLang cannot draft, or would sample from another distribution."""
    speculative = config.server.speculative
    if speculative is None:
        return
    if is_on_gpu(config, device) is False:
        yield Violation(
            "server.speculative",
            f"{speculative.algorithm} without GPUs: SGLang accepts drafts there by the most probable token, whatever"
            " the temperature is",
            "null",
        )
    if speculative.algorithm == "nextn" and spec.family not in ("deepseek_v3", "glm4_moe"):
        yield Violation(
            "server.speculative.algorithm",
            f"nextn, and models of {spec.family} bring no layers for multi-token prediction",
            "eagle3, standalone or ngram",
        )
    folder = speculative.draft_path
    if folder is not None and not (_shape(Path(folder)) and any(Path(folder).glob("*.safetensors"))):
        yield Violation(
            "server.speculative.draft_path", f"{folder} is no Hugging Face folder with config.json and safetensors"
        )


def version_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Bytes of one version as it is sent: on disk, or through a server's group."""
    if config.lora is not None and publishes_adapters(config):
        return num_adapter_parameters(config.lora, spec) * DTYPE_BYTES["fp32"]
    plain, layout = DTYPE_BYTES[server_dtype(config)], served_layout(config)
    return total_parameters * plain if layout is None else stored_bytes(layout, hf_tensors(spec), plain)


def needs_start_folder(config: Config, spec: ModelSpec) -> bool:
    """Do servers start from a copy of `model.path` in another form? The nearest that the configuration alone says."""
    if spec.raw is not None and needs_plain_copy(spec.raw, DTYPES[server_dtype(config)]):
        return True
    return (spec.stored is None) != (served_layout(config) is None)
