"""The servers of a run in a plan: how a server is divided over its GPUs, what its weights, cache and draft take, what a
published version takes, and which nodes and GPUs the servers get.

How the keys are meant is in `config/precision.py`. The rules of the division are SGLang 0.5.23's (`moe_ep_setup.py`,
`parallel_hook.py`, the `_A2A_EP_SPANNING_BACKENDS` of `loader.py`). `validate_servers.py` says what contradicts them.
The launcher and the simulation deal servers to nodes with the same `place_servers`, which knows no node by name and
starts nothing. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.untrusted import read_json_file
from gspo_mega.config.precision import SERVER_DTYPES, WEIGHT_BLOCK, publishes_adapters, server_dtype
from gspo_mega.config.schema import Config, ModelReward, Precision, Reward, Server
from gspo_mega.config.validate_servers import draft_folder
from gspo_mega.models.block_fp8 import is_quantizable, is_rounded, served_layout, stored_bytes
from gspo_mega.models.hf_fields import needs_plain_copy
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, hf_tensors
from gspo_mega.plan.state import num_adapter_parameters

DTYPE_BYTES = {"fp32": 4, "bf16": 2}
_SCALE_BYTES = 4


def attention_ranks(server: Server) -> int:
    """Return the number of ranks that divide the heads: those of one data-parallel group of the attention."""
    return max(1, server.tensor // server.attention_data)


def expert_ranks(server: Server) -> int:
    """Return the number of ranks that share one expert."""
    return max(1, server.tensor // server.expert)


def ranks_that_share(server: Server, entry: TensorEntry) -> int:
    """Return over how many of a server's ranks a tensor is divided. Norms and the router are whole on every rank, but
    count as divided because they are small.
    """
    if entry.expert is not None:
        return server.tensor
    if server.attention_data > 1 and (".self_attn." in entry.name or entry.stage == "first"):
        return 1 if entry.stage == "first" else attention_ranks(server)
    if server.expert_dispatcher == "deepep" and "shared_expert" in entry.name:
        return 1
    return server.tensor


def divides_attention(server: Server, spec: ModelSpec, tensor: int) -> bool:
    """Return whether `tensor` ranks can hold the attention. SGLang copies a key-value head if there are more ranks than
    heads.
    """
    if tensor % server.attention_data:
        return False
    ranks, kv_heads = tensor // server.attention_data, spec.num_kv_heads
    return spec.num_heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def weight_bytes(server: Server, precision: Precision, spec: ModelSpec, total_parameters: int) -> int:
    """Return the bytes of one server's weights, all its ranks together: a byte for each quantized element, the scales,
    and the rest in the server's dtype.
    """
    size = DTYPE_BYTES[server_dtype(server, precision)]
    if server.quantization == "none":
        return total_parameters * size
    quantized = [entry for entry in hf_tensors(spec) if is_rounded(server.quantization, entry)]
    elements = sum(entry.num_elements for entry in quantized)
    scales = sum(_num_scales(server.quantization, entry) for entry in quantized)
    return (total_parameters - elements) * size + elements + scales * _SCALE_BYTES


def rank_weight_bytes(server: Server, precision: Precision, spec: ModelSpec, total_parameters: int) -> int:
    """Return the bytes of the weights of one of a server's ranks."""
    if server.attention_data == 1 and server.expert_dispatcher == "none":
        return weight_bytes(server, precision, spec, total_parameters) // server.tensor
    size, found = DTYPE_BYTES[server_dtype(server, precision)], 0.0
    for entry in hf_tensors(spec):
        quantized = is_rounded(server.quantization, entry)
        scales = _num_scales(server.quantization, entry) * _SCALE_BYTES if quantized else 0
        found += (entry.num_elements * (1 if quantized else size) + scales) / ranks_that_share(server, entry)
    return round(found)


def rank_block_elements(server: Server, spec: ModelSpec) -> int:
    """Return the elements that one of a server's ranks holds in FP8 blocks."""
    if server.quantization != "fp8_block":
        return 0
    return round(sum(e.num_elements / ranks_that_share(server, e) for e in hf_tensors(spec) if is_quantizable(e)))


def cache_element_bytes(server: Server, precision: Precision) -> int:
    """Return the bytes of one element of the cache."""
    return 1 if server.kv_cache == "fp8" else DTYPE_BYTES[server_dtype(server, precision)]


def _num_scales(quantization: str, entry: TensorEntry) -> int:
    rows, columns = entry.shape
    if quantization == "fp8_block":
        return -(-rows // WEIGHT_BLOCK[0]) * -(-columns // WEIGHT_BLOCK[1])
    return 1 if quantization == "fp8" and entry.expert is not None else rows


@dataclass(frozen=True)
class RewardPlace:
    """A server of a reward model. `name`: the model's. `index`: among that model's servers. `node`: among the nodes
    with servers, where it has `num_gpus` GPUs from `first_gpu` on.
    """

    name: str
    index: int
    node: int
    first_gpu: int
    num_gpus: int


@dataclass(frozen=True)
class ServerPlaces:
    """`by_node[n]`: indices of the policy's servers on the n-th node with servers. `rewards`: the servers of reward
    models. `gpus`: GPUs in use on each of these nodes, including those of ranks on the same node.
    """

    by_node: tuple[tuple[int, ...], ...]
    rewards: tuple[RewardPlace, ...]
    gpus: tuple[int, ...]


def reward_servers(reward: Reward) -> list[tuple[ModelReward, int]]:
    """Return the servers that a run starts for its reward models: (entry of `reward.model`, index among
    its servers).
    """
    return [(model, index) for model in reward.model if model.path for index in range(model.num_servers)]


def reward_gpus(reward: Reward) -> int:
    """Return the number of GPUs that the servers of all reward models use."""
    return sum(model.tensor for model, _ in reward_servers(reward))


def place_servers(config: Config, num_servers: int, num_nodes: int, num_ranks: int = 0) -> ServerPlaces:
    """Deal servers to nodes, those with the most GPUs first, each to the node with the fewest GPUs in use. A server of
    the policy that spans several nodes goes to as many neighbours. If only the policy has servers, this deals them in
    turn.

    On a node the policy's servers come first, after the `num_ranks` ranks; with `cluster.colocated` they use the ranks'
    GPUs.
    """
    server = config.server
    own, over = server.tensor // server.num_nodes, server.num_nodes
    groups = [range(first, min(first + over, num_nodes)) for first in range(0, max(1, num_nodes - over + 1), over)]
    by_node: list[list[int]] = [[] for _ in range(num_nodes)]
    scored: list[list[tuple[ModelReward, int]]] = [[] for _ in range(num_nodes)]
    load, load_of_policy = [0] * num_nodes, [0] * num_nodes
    if not config.cluster.colocated:
        load_of_policy = load  # one count for both kinds of server
    waiting: list[tuple[int, int, tuple[ModelReward, int] | int]] = [(-own, 0, index) for index in range(num_servers)]
    waiting += [(-one[0].tensor, 1, one) for one in reward_servers(config.reward)]
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


@dataclass(frozen=True)
class DraftMemory:
    """Bytes on one GPU of a server. `weights`: the draft's. `cached_token`: the draft's cache, per token."""

    weights: int = 0
    cached_token: int = 0


def draft_memory(config: Config, spec: ModelSpec) -> DraftMemory:
    """Return what speculative decoding takes; zeros without a draft model. A layer for multi-token prediction counts as
    one more of the policy's layers, plus the projection before it. A draft's folder is read for its size and shape.
    """
    folder, speculative = draft_folder(config.server, config.model), config.server.speculative
    if folder is None or speculative is None:
        return DraftMemory()
    if speculative.draft_path is None:
        layer = sum(entry.num_elements for entry in hf_tensors(spec) if entry.layer == spec.num_layers - 1)
        elements = layer + 2 * spec.hidden_size**2
        cached = spec.cache_elements_per_token // spec.num_layers
        if spec.latent is None:
            cached //= min(attention_ranks(config.server), spec.num_kv_heads)
        size = DTYPE_BYTES[server_dtype(config.server, config.precision)] if config.server.quantization == "none" else 1
        return DraftMemory(
            elements * size // config.server.tensor, cached * cache_element_bytes(config.server, config.precision)
        )
    shape = read_draft_shape(Path(folder))
    stored = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    heads = shape.get("num_attention_heads", 1)
    kv_heads = max(1, shape.get("num_key_value_heads", heads) // attention_ranks(config.server))
    head_dim = shape.get("head_dim") or shape.get("hidden_size", 0) // heads
    cached = 2 * shape.get("num_hidden_layers", 1) * kv_heads * head_dim
    return DraftMemory(stored // config.server.tensor, cached * cache_element_bytes(config.server, config.precision))


def read_draft_shape(folder: Path) -> dict:
    """Return the positive whole numbers of a draft's config.json; empty if it cannot be read."""
    try:
        found = read_json_file(folder / "config.json")
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if type(value) is int and 0 < value < 2**31}


def version_bytes(config: Config, spec: ModelSpec, total_parameters: int) -> int:
    """Return the bytes of one published version as it is sent: on disk, or through a server's group."""
    if config.lora is not None and publishes_adapters(config):
        return num_adapter_parameters(config.lora, spec) * DTYPE_BYTES["fp32"]
    plain, layout = DTYPE_BYTES[server_dtype(config.server, config.precision)], served_layout(config)
    return total_parameters * plain if layout is None else stored_bytes(layout, hf_tensors(spec), plain)


def needs_start_folder(config: Config, spec: ModelSpec) -> bool:
    """Return whether servers start from a copy of `model.path` in another form, as far as the configuration and the
    model's shape say.
    """
    if spec.raw is not None and needs_plain_copy(
        spec.raw, SERVER_DTYPES[server_dtype(config.server, config.precision)]
    ):
        return True
    return (spec.stored is None) != (served_layout(config) is None)
