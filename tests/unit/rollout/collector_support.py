"""A configuration, prompts without end, random scores, and what holds for every complete rollout batch."""

from __future__ import annotations

import asyncio
import dataclasses
import random

from fake_answers import EOS, VOCAB
from run_configs import make_config

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Limits
from gspo_mega.base.records import Prompt
from gspo_mega.config.derived import episode_lengths
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec, MoeSpec
from gspo_mega.rollout.collector import Collector


def collector_config(**rollout) -> Config:
    """The smallest configuration with short deadlines. Keys of `batch`, `reward` and `advantage` that a collector reads
    are taken by their names, all others are the rollout's.
    """
    batch = {name: rollout.pop(name) for name in ("prompts_per_step", "group_size") if name in rollout}
    reward = {name: rollout.pop(name) for name in ("max_failed_fraction",) if name in rollout}
    advantage = {name: rollout.pop(name) for name in ("baseline", "std_over") if name in rollout}
    return make_config(
        batch={"prompts_per_step": 6, "group_size": 4, "micro_batch_tokens": 100, **batch},
        data={"max_prompt_tokens": 8},
        reward=reward,
        advantage=advantage,
        rollout={"max_new_tokens": 6, "progress_deadline_seconds": 1.0, "no_server_deadline_seconds": 5.0, **rollout},
    )


SPEC = ModelSpec(
    family="qwen3_moe",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=8,
    vocab_size=VOCAB,
    max_position_embeddings=64,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    qk_norm=True,
    attention_bias=False,
    torch_dtype="float32",
    eos_token_ids=(EOS,),
    moe=MoeSpec(4, 2, 8),
)
# The same for a run with the quickstart's tokenizer, whose ids the model has to know.
SPEC_OF_TOKENIZER = dataclasses.replace(SPEC, vocab_size=512)


class Stream:
    def __init__(self):
        self.drawn = []

    def next(self):
        index = len(self.drawn)
        prompt = Prompt(f"p:{index}", "p", (3, 4 + index % 50, 5), f"prompt {index}")
        self.drawn.append(prompt)
        return prompt


async def random_score(episode):
    await asyncio.sleep(0)
    episode.reward = float(random.random())


def collector_of(pool, score=random_score, stream=None, runner=None, **settings):
    config = collector_config(**settings)
    decode = lambda ids: " ".join(map(str, ids))  # noqa: E731
    driver = EpisodeDriver(
        Conversation(decode), Limits(1 if runner is None else 8, episode_lengths(config).tokens), runner
    )
    return Collector(config, pool, stream or Stream(), driver, score, [EOS])


def check_whole(batch, stream, prompts=6, group_size=4, version=0):
    """Every prompt drawn came back exactly once, each group complete and in order, every record aligned."""
    assert [g.prompt.prompt_id for g in batch.groups] == [p.prompt_id for p in stream.drawn[:prompts]]
    ids = [t.trajectory_id for t in batch.trajectories]
    assert len(set(ids)) == len(ids) == prompts * group_size
    for group in batch.groups:
        assert len(group.trajectories) == group_size
        for t in group.trajectories:
            assert t.prompt is group.prompt and t.group_id == group.group_id and t.reward is not None
            lengths = {
                len(t.response_token_ids),
                len(t.rollout_log_probs),
                len(t.weight_versions),
                len(t.response_mask),
            }
            assert lengths == {t.num_response_tokens}
            assert set(t.weight_versions) == {version} and set(t.response_mask) == {1}
            assert (t.response_token_ids[-1] == EOS) == (t.finish_reason == "stop")
