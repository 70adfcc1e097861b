"""What ranks run in the tests of episodes: recorded trees through assembly and engine, and an oracle's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from episode_oracle import recorded_episodes
from layout_jobs import layout_config

from gspo_mega.algorithm.diagnostics import POLICY_SUMS
from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.episodes import RolloutBatch
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config.derived import least_of_group
from gspo_mega.data.packing import build_micro_batch
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.train.batches import assemble, fill_advantages, scored_batch
from gspo_mega.verify.certify.measure import gather_tokens
from gspo_mega.verify.certify.steps import complete_gradients


class Engine:
    """A policy in a layout; a context manager. Its configuration but for the keys that a case sets."""

    def __init__(self, folder: str, parallel: dict[str, int]) -> None:
        sizes = {"expert_tensor": 1, **parallel}
        self.spec = read_model_spec(folder)
        self.folder, self.parallel = folder, sizes
        self.groups = create_groups(**{k: v for k, v in sizes.items() if k != "sequence"})
        self.engine = PolicyEngine(self.config({}), self.spec, self.groups, num_optimizer_steps=10)
        import_huggingface(folder, self.spec, self.groups, self.engine.chunks)
        self.engine.after_weights_loaded()

    def config(self, case: dict[str, Any]):
        world = torch.distributed.get_world_size()
        return layout_config(
            self.folder,
            self.parallel,
            **{
                "cluster": dict(ranks_per_node=world),
                "old_log_probs": "rollout",
                "optimizer": dict(lr=1e-3, distributed=False),
                "data": dict(max_prompt_tokens=16),
                "rollout": dict(max_new_tokens=48),
                "batch": dict(prompts_per_step=3, group_size=3, num_mini_batches=1, micro_batch_tokens=96),
                **case,
            },
        )

    def gradient(self) -> dict[str, np.ndarray] | None:
        complete_gradients(self.engine)
        tensors = PolicyTensors(self.spec, self.groups, self.engine.chunks, values=lambda one: one.main_grad)
        whole = {name: value.double().numpy().copy() for name, value in tensors.stream(torch.float32)}
        return whole if self.groups.world.rank == 0 else None

    def total(self, part: np.ndarray | None) -> np.ndarray:
        whole = torch.zeros(len(POLICY_SUMS), dtype=torch.float64) if part is None else torch.from_numpy(part.copy())
        torch.distributed.all_reduce(whole, group=self.groups.host.group)
        return whole.numpy()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        destroy_groups()


def of_cases(
    folder: str, parallel: dict[str, int], cases: dict[str, dict], recorded: dict | None = None
) -> dict | None:
    """By case: log-probs by episode and turn, policy sums, gradient. `recorded`: log-probs of the servers in the same
    form. Whole on rank 0, None elsewhere.
    """
    results = {}
    with Engine(folder, parallel) as own:
        engine = own.engine
        for name, case in cases.items():
            config = own.config(case)
            whole = recorded_episodes(own.spec.vocab_size)
            for (number, node_id), values in (recorded or {}).items():
                whole.episodes[number].nodes[node_id].log_probs = values.tolist()
            batch = scored_batch(whole, least_of_group(config), config.objective.scope)
            fill_advantages(batch, config, 0)
            (mine,) = assemble(batch, config, resolve_layout(config, own.spec), 0)[own.groups.data.rank]
            old = engine.old_pass(mine.micro_batches)
            tokens = gather_tokens(engine, batch, mine.micro_batches, [part.log_probs for part in old.micro_batches])
            settings = objective_settings(config.algorithm, config.objective)
            report = engine.policy_gradients(mine.micro_batches, settings, mine.denominator, old)
            gradient = own.gradient()
            sums = dict(zip(POLICY_SUMS, own.total(report.totals.get("policy_sums")).tolist(), strict=True))
            results[name] = dict(log_probs=by_turn(batch, tokens), sums=sums, gradient=gradient)
        return results if own.groups.world.rank == 0 else None


def by_turn(batch: RolloutBatch, tokens: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
    """[sum R] in the order of the rows, as {(episode, turn): [tokens]}."""
    result, start = {}, 0
    for number, episode in enumerate(batch.episodes):
        for row in episode.rows():
            for (first, end), node_id in zip(row.turns, row.turn_nodes, strict=True):
                result[number, node_id] = tokens[start + first : start + end]
            start += row.num_response_tokens
    return result


class Weighed:
    """The head whose loss is -sum c log pi: `token_advantages` hold c, an oracle's derivatives."""

    wants_entropy = False

    def __call__(self, batch, log_probs, entropies):
        from gspo_mega.engine.losses import PassOutput

        return PassOutput(loss=-(batch.token_advantages * log_probs.double()).sum())


def of_slopes(folder: str, slopes: dict[tuple[int, int], np.ndarray]) -> dict[str, np.ndarray] | None:
    """The gradient of -sum c log pi(y) over all turns, on one rank, each turn a pass of its own behind its whole
    context."""
    with Engine(folder, {}) as own:
        batch = recorded_episodes(own.spec.vocab_size)
        packs = []
        for (number, node_id), values in slopes.items():
            episode = batch.episodes[number]
            turn = episode.nodes[node_id]
            row = dict(
                prompt_token_ids=episode.tokens(turn.parent),
                response_token_ids=turn.token_ids,
                response_mask=[1] * len(turn.token_ids),
                rollout_log_probs=[0.0] * len(turn.token_ids),
                token_advantages=values,
            )
            packs.append(build_micro_batch([row], [0], 1, token_keys=("token_advantages",)))
        own.engine.accumulate_gradients(packs, Weighed())
        return own.gradient()
