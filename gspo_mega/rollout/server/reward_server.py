"""The servers of a reward model: their configuration, which follows from a run's, and where they register.

This file has the differences from a server of the policy. They are supervised in the same way (`supervise.py`). They
register in a folder of their own in the attempt, so that neither the pool nor a publish sees them.
"""

from __future__ import annotations

from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.config.schema import Config, ModelReward, Reward
from gspo_mega.models.value_models import read_config
from gspo_mega.plan.estimate import text_tokens
from gspo_mega.rollout.registration import read_registrations, read_secret

_FOLDER = "reward_models"


def reward_folder(attempt: Attempt, name: str) -> Attempt:
    """Return the folder for the servers of an entry of `reward.model`, with a key, registrations and logs of their
    own.
    """
    return Attempt(attempt.path / _FOLDER / name)


def reward_names(attempt: Attempt) -> list[str]:
    """Return the names of the entries for which an attempt has such a folder."""
    return sorted(path.name for path in (attempt.path / _FOLDER).glob("*"))


def make_reward_folder(attempt: Attempt, name: str) -> Attempt:
    """Return the same folder, and make it if it does not exist."""
    mine = reward_folder(attempt, name)
    for folder in (mine.logs_dir, mine.servers_dir):
        folder.mkdir(parents=True, exist_ok=True)
    return mine


def reward_config(config: Config, model: ModelReward) -> Config:
    """Return the configuration of a run whose model is `model`, for its servers. Raises ConfigError if no such run is
    possible.
    """
    assert model.path is not None
    positions = read_config(Path(model.path)).get("max_position_embeddings") if model.context_tokens is None else None
    server = config.server.model_copy(
        update={
            "num_servers": model.num_servers,
            "tensor": model.tensor,
            "dtype": model.dtype,
            "context_tokens": text_tokens(config, model, positions),
            "memory_fraction": model.memory_fraction,
            "max_total_tokens": None,
            "expert": 1,
            "expert_dispatcher": "none",
            "attention_data": 1,
            "num_nodes": 1,
            "quantization": "none",
            "kv_cache": "auto",
            "speculative": None,
            "options": {},
        }
    )
    rollout = config.rollout.model_copy(
        update={
            "return_routed_experts": False,
            "max_concurrent_requests": max(1, model.concurrency * model.batch_size // model.num_servers),
        }
    )
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": model.path}),
            "server": server,
            "rollout": rollout,
            "cluster": config.cluster.model_copy(update={"colocated": False}),
        }
    )


def own_model(reward: Reward, name: str) -> ModelReward:
    """Return the entry of `reward.model` of this name, for which servers are started. Raises ConfigError if there is
    none with a `path`.
    """
    own = {model.name: model for model in reward.model if model.path is not None}
    if name not in own:
        valid = f"valid: {', '.join(own)}" if own else "no entry of reward.model has a `path`"
        raise ConfigError(f"gspo-mega serve: --reward-model: {name}: {valid}")
    return own[name]


class RewardServers:
    """The run's own servers of an entry of `reward.model`, as their clients see them.

    Attributes:
        patience_seconds: for how long none of them may be ready.
    """

    def __init__(self, attempt: Attempt, name: str, patience_seconds: float) -> None:
        self.patience_seconds = patience_seconds
        self._attempt = reward_folder(attempt, name)

    def ready(self) -> tuple[list[str], str]:
        """Return the addresses of the servers that are ready now, and their key ("" if none is ready). Raises
        RolloutError and ConfigError.
        """
        registered = read_registrations(self._attempt.servers_dir, on_error=lambda path, error: None)
        addresses = [one.address for one in registered if one.state == "ready"]
        return addresses, str(read_secret(self._attempt.api_key_file)) if addresses else ""
