"""A configuration, an attempt folder and fake servers for the unit tests of rollout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_server import EOS, VOCAB, FakeServer

from gspo_mega.config.schema import Config
from gspo_mega.model.spec import ModelSpec, MoeSpec
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.run_folder import RunFolder, atomic_write_text


def make_config(**rollout) -> Config:
    batch = {name: rollout.pop(name) for name in ("prompts_per_step", "group_size") if name in rollout}
    settings = {"max_new_tokens": 6, "request_deadline_seconds": 1.0, "no_server_deadline_seconds": 5.0, **rollout}
    return Config.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "precision": "fp32",
            "batch": {"prompts_per_step": 6, "group_size": 4, "micro_batch_tokens": 100, **batch},
            "optimizer": {"lr": 1e-4},
            "data": {"max_prompt_tokens": 8, "path": "p.jsonl"},
            "reward": {"functions": ({"function": "exact_match"},)},
            "rollout": settings,
        }
    )


SPEC = ModelSpec(
    family="qwen3_moe", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=8,
    vocab_size=VOCAB, max_position_embeddings=64, rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=False,
    qk_norm=True, attention_bias=False, torch_dtype="float32", eos_token_ids=(EOS,), moe=MoeSpec(4, 2, 8),
)  # fmt: skip


@pytest.fixture
def attempt(tmp_path):
    attempt = RunFolder(tmp_path / "run").new_attempt()
    atomic_write_text(attempt.api_key_file, "the-key\n", mode=0o600)
    return attempt


@pytest.fixture
def fakes(attempt):
    """Factory of fake servers, registered with the attempt and closed at the end."""
    made = []

    def make(name: str, **options) -> FakeServer:
        made.append(FakeServer(name, attempt.servers_dir, **options))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def pools(attempt):
    """Factory of pools over the attempt, closed at the end."""
    made = []

    def make(**rollout) -> ServerPool:
        made.append(ServerPool(make_config(**rollout), SPEC, attempt))
        return made[-1]

    yield make
    for pool in made:
        pool.close()
