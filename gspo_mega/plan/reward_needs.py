"""What the servers of reward models need: GPUs, and the memory of one of these.

Owns the figures and what does not fit. Where they are is `server_places.py`'s, what a folder holds
`models/classifier_folder.py`'s. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.base.errors import ConfigError, FitError, PlanError
from gspo_mega.config.episode_lengths import episode_lengths
from gspo_mega.config.schema import Config, ModelReward
from gspo_mega.config.server_precision import server_dtype
from gspo_mega.models.classifier_folder import ClassifierSizes, check_head, read_sizes
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.server_needs import DTYPE_BYTES

# A text may be so many times as long in the tokens of another model.
_LONGER_BY = 4


@dataclass(frozen=True)
class RewardNeeds:
    """The servers of one reward model. `weights`, `cache`: bytes on one GPU; of the weights None where the folder is
    not here, of the cache where config.json or the configuration does not say enough. `cache_tokens`: in the cache of
    one whole server.
    """

    name: str
    num_servers: int
    tensor: int
    context_tokens: int
    weights: int | None
    cache: int | None
    cache_tokens: int | None

    @property
    def num_gpus(self) -> int:
        return self.num_servers * self.tensor


def text_tokens(config: Config, model: ModelReward, positions: int | None) -> int:
    """The most tokens of a text: as given, else room for the policy's longest episode in a model with another
    tokenizer, as far as its `positions` go.
    """
    wanted = _LONGER_BY * (config.server.context_tokens or episode_lengths(config).tokens)
    return model.context_tokens or min(wanted, positions or wanted)


def reward_needs(
    config: Config, limit: int | None, where: Callable[[str], str], is_elsewhere: bool = False
) -> tuple[RewardNeeds, ...]:
    """Of each reward model that the run starts servers for; a run on recorded rollouts starts none. `limit`: bytes of
    one GPU, None without one. `is_elsewhere`: the plan is for another machine, so that a folder may not be here.

    Raises PlanError, with the key's place, where its folder cannot be served, or does not fit on its GPUs or nodes.
    """
    if config.train is not None and config.train.from_rollouts is not None:
        return ()
    needs = []
    for number, model in enumerate(config.reward.model):
        if model.path is None:
            continue
        place = f"reward.model.{number}"
        if is_elsewhere and not Path(model.path).exists():
            tokens = text_tokens(config, model, None)
            needs.append(RewardNeeds(model.name, model.num_servers, model.tensor, tokens, None, None, None))
            continue
        try:
            sizes = read_sizes(model.path)
            check_head(model.path)
        except ConfigError as error:
            raise PlanError(f"{where(place)}: {place}.path: {error}") from None
        needs.append(_needs(config, model, sizes, limit, f"{where(place)}: {place}"))
    if needs:
        _check_nodes(config, where)
    return tuple(needs)


def _needs(config: Config, model: ModelReward, sizes: ClassifierSizes, limit: int | None, place: str) -> RewardNeeds:
    if sizes.num_heads is not None and sizes.num_heads % model.tensor:
        valid = [count for count in range(1, sizes.num_heads + 1) if sizes.num_heads % count == 0]
        raise PlanError(
            f"{place}.tensor: {model.tensor} does not divide the {sizes.num_heads} attention heads of {model.path};"
            f" valid: {', '.join(map(str, valid))}"
        )
    dtype = server_dtype(config) if model.dtype == "auto" else model.dtype
    tokens = text_tokens(config, model, sizes.positions)
    if sizes.positions is not None and tokens > sizes.positions:
        raise PlanError(
            f"{place}.context_tokens: {tokens} tokens, but the positions of {model.path} end at {sizes.positions}; at"
            f" most {sizes.positions}"
        )
    weights = -(-sizes.elements * DTYPE_BYTES[dtype] // model.tensor)
    element = sizes.cached_elements(model.tensor)
    if limit is None or not element:
        return RewardNeeds(model.name, model.num_servers, model.tensor, tokens, weights, None, None)
    token = element * DTYPE_BYTES[dtype]
    cached = max(0, int(limit * model.memory_fraction) - weights) // token
    if cached < tokens:
        raise FitError(
            f"{place}.tensor: the weights of {Path(model.path or '').name} take {weights / GIB:.1f} GiB on each of"
            f" {model.tensor} GPUs, and memory_fraction {model.memory_fraction:g} of {limit / GIB:.1f} GiB leaves room"
            f" for {cached} tokens, while a text may have {tokens} (context_tokens); use more GPUs per server (tensor),"
            " GPUs with more memory, a larger memory_fraction or a smaller context_tokens"
        )
    return RewardNeeds(model.name, model.num_servers, model.tensor, tokens, weights, cached * token, cached)


def _check_nodes(config: Config, where: Callable[[str], str]) -> None:
    """A single server that is larger than any node; whether all find room, `server_places.py` says."""
    cluster = config.cluster
    node = cluster.gpus_per_node
    if node is None:
        return
    for number, model in enumerate(config.reward.model):
        if model.path is not None and model.tensor > node:
            raise PlanError(
                f"{where(f'reward.model.{number}')}: reward.model.{number}.tensor: a server on {model.tensor} GPUs does"
                f" not fit on a node of {node} (cluster.gpus_per_node); at most {node}"
            )
