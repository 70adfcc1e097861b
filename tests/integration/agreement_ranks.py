"""The trainer's ranks in the agreement tests: a Megatron policy that learns, publishes, has the servers sample, and
scores what they sampled as a run does.

The functions at the end are what a rank pool calls. Judging what comes back is `agreement_rule.py`.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from agreement_rule import Sampled, Scored

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Limits
from gspo_mega.algorithm.terms import objective_settings
from gspo_mega.base.episodes import Episode
from gspo_mega.base.records import MicroBatch, Prompt, Trajectory
from gspo_mega.base.run_folder import Attempt
from gspo_mega.checkpoint.adapters import init_adapters
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_export import policy_digests
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.checkpoint.quantized import plain_form
from gspo_mega.config import load_config
from gspo_mega.config.precision import publishes_adapters
from gspo_mega.config.schema import Config
from gspo_mega.data.demonstrations import Demonstration
from gspo_mega.data.packing import ExpertRoutes, response_values
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.routing import choice_margins
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.low_rank import SERVED_NAME
from gspo_mega.plan import resolve_layout
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.sync.adapters import publisher_class
from gspo_mega.train.batches import MiniBatch, assemble, assemble_supervised, fill_advantages

FIRST_TOKEN, VOCAB_SIZE = 3, 512
END_TOKENS = tuple(range(2, VOCAB_SIZE, 64))  # an untaught model ends too seldom for responses of many lengths
DEMONSTRATIONS = 32


class RandomPrompts:
    """Prompts of 3 to 40 random tokens without end."""

    def __init__(self) -> None:
        self._rng, self._drawn = np.random.default_rng(7), 0

    def next(self) -> Prompt:
        tokens = self._rng.integers(FIRST_TOKEN, VOCAB_SIZE, self._rng.integers(3, 41))
        self._drawn += 1
        return Prompt(f"random:{self._drawn}", "random", tuple(tokens.tolist()), "")


async def random_reward(episode: Episode) -> None:
    episode.reward = zlib.crc32(str(episode.turns[0].token_ids).encode()) % 3 / 2


class RoutingRecord:
    """What Megatron's routers did in forward passes: the experts of every token and how close a call it was.

    `take()` gives, a pass: experts [t, layers, k] ascending, and margins [t, layers], of layers with experts.
    """

    def __init__(self, engine: PolicyEngine) -> None:
        self._layers: list[list[tuple[np.ndarray, np.ndarray]]] = []
        for layer in [
            layer for chunk in engine.chunks for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")
        ]:
            calls: list[tuple[np.ndarray, np.ndarray]] = []
            self._layers.append(calls)
            layer.mlp.router.register_forward_hook(
                lambda router, inputs, output, calls=calls: calls.append(_routing(router, inputs, output))
            )

    def take(self) -> list[tuple[np.ndarray, np.ndarray]]:
        passes = [
            tuple(np.stack(part, axis=1) for part in zip(*calls, strict=True))
            for calls in zip(*self._layers, strict=True)
        ]
        for calls in self._layers:
            calls.clear()
        return passes


def _routing(router, inputs, output) -> tuple[np.ndarray, np.ndarray]:
    _, chosen = output
    experts = chosen.nonzero()[:, 1].reshape(len(chosen), router.topk)
    return experts.numpy(), choice_margins(router, inputs[0]).numpy()


class Trainer:
    """A policy on this rank, its servers on rank 0. Every method is collective."""

    def __init__(self, config_path: str, attempt: str, parallel: dict, batch: dict, weights_dir: str) -> None:
        config = load_config(config_path).config
        update = {
            "parallel": config.parallel.model_copy(update=parallel),
            "batch": config.batch.model_copy(update=batch),
            "cluster": config.cluster.model_copy(update={"ranks_per_node": dist.get_world_size()}),
            "optimizer": config.optimizer.model_copy(update={"lr": 2e-3}),
            "publish": config.publish.model_copy(update={"bucket_bytes": 100_000}),
        }
        self.config: Config = config.model_copy(update=update)
        self.weights_dir = weights_dir
        self.spec = read_model_spec(config.model.path)
        self.layout = resolve_layout(self.config, self.spec)
        self.groups = create_groups(**parallel)
        self.engine = PolicyEngine(self.config, self.spec, self.groups, num_optimizer_steps=1000)
        import_huggingface(config.model.path, self.spec, self.groups, self.engine.chunks)
        init_adapters(self.engine)
        self.engine.after_weights_loaded()
        self.routing = RoutingRecord(self.engine) if self.spec.moe is not None else None
        self.prompts = RandomPrompts()
        self.num_learnt = 0
        self.pool = (
            ServerPool(
                self.config.rollout,
                self.spec,
                Attempt(Path(attempt)),
                SERVED_NAME if publishes_adapters(self.config) else None,
            )
            if self.groups.world.rank == 0
            else None
        )
        if self.pool is not None:
            self.pool.wait_ready(1, deadline_seconds=60)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        destroy_groups()

    def learn(self, num_steps: int) -> None:
        """Optimizer steps on random demonstrations, other ones every time."""
        for _ in range(num_steps):
            rng = np.random.default_rng((3, self.num_learnt))
            made = [
                [tuple(rng.integers(FIRST_TOKEN, VOCAB_SIZE, rng.integers(4, 41)).tolist()) for _ in range(2)]
                for _ in range(DEMONSTRATIONS)
            ]
            demonstrations = [Demonstration.of_one_turn(f"random:{i}", *tokens) for i, tokens in enumerate(made)]
            (mini_batch,) = assemble_supervised(
                demonstrations, self.config.batch, self.config.run, self.layout, self.num_learnt
            )[self.groups.data.rank]
            result, _ = self.engine.train_supervised(mini_batch.micro_batches, mini_batch.denominator)
            assert not result.skipped and result.grad_norm > 0
            self.num_learnt += 1
        self._forget_routing()

    def publish(self, weight_version: int, method: str) -> None:
        config = self.config.model_copy(update={"publish": self.config.publish.model_copy(update={"method": method})})
        publisher = publisher_class(config)(config, self.spec, self.groups, self.engine.chunks, self.weights_dir)
        try:
            result = publisher.publish(weight_version, [] if self.pool is None else self.pool.controls())
        finally:
            publisher.close()
        assert not result.failed
        if self.pool is not None:
            self.pool.commit(weight_version, result.verified)

    def serve_folder(self, path: str, weight_version: int) -> None:
        """Have the server hold this folder and believe it to be `weight_version`: no publish, and nothing is
        verified.
        """
        if self.pool is not None:
            (control,) = self.pool.controls()
            control.pause(deadline_seconds=60)
            control.update_from_disk(path, weight_version, deadline_seconds=60)
            control.resume(deadline_seconds=60)
            self.pool.commit(weight_version, [(control.server_id, control.generation)])
        dist.barrier(self.groups.host.group)

    def sample(self, temperature: float, step: int, **sampling) -> tuple[list[Sampled], list[MiniBatch]]:
        """A rollout batch of the servers: all of it (rank 0), and this rank's packs. `sampling`: other keys of
        `rollout`.
        """
        config = self._at(temperature, **sampling)
        message = [None]
        trajectories: list[Trajectory] = []
        if self.pool is not None:
            collector = Collector(
                config,
                self.pool,
                self.prompts,
                EpisodeDriver(Conversation(str), Limits(1, 2**20)),
                random_reward,
                END_TOKENS,
            )
            batch = collector.take(step)
            fill_advantages(batch, config, step)
            trajectories, message = batch.trajectories, [assemble(batch, config, self.layout, step)]
            routes = ExpertRoutes.of(trajectories, self.spec, config.moe.routing_replay == "R3")
            if routes is not None:
                routes.attach([pack for shard in message[0] for mini in shard for pack in mini.micro_batches])
        dist.broadcast_object_list(message, src=0, group=self.groups.host.group)
        sampled = [
            Sampled(t.group_id, len(t.prompt.token_ids), np.array(t.rollout_log_probs), self._ascending(t), _kept_of(t))
            for t in trajectories
        ]
        return sampled, message[0][self.groups.data.rank]

    def score(self, mini_batches: list[MiniBatch], temperature: float) -> dict[int, Scored]:
        """The old pass over these packs: by row of the rollout batch, on the ranks that report."""
        self._set_temperature(temperature)
        scored: dict[int, Scored] = {}
        for mini_batch in mini_batches:
            state = self.engine.old_pass(mini_batch.micro_batches)
            passes = self.routing.take() if self.routing is not None else [None] * len(mini_batch.micro_batches)
            for pack, old, routing in zip(mini_batch.micro_batches, state.micro_batches, passes, strict=True):
                scored |= _by_trajectory(pack, old.log_probs, routing)
        return scored if self.groups.reports else {}

    def train(self, mini_batches: list[MiniBatch], temperature: float) -> list[np.ndarray]:
        """A step of the loop on a rollout batch: the log s of each mini-batch's trajectories, as it is trained on."""
        self._set_temperature(temperature)
        old = [self.engine.old_pass(m.micro_batches) for m in mini_batches]
        self.engine.correct(old)
        settings = objective_settings(self.config.algorithm, self.config.objective)
        log_s = []
        for mini_batch, before in zip(mini_batches, old, strict=True):
            result, report = self.engine.train_mini_batch(
                mini_batch.micro_batches, settings, mini_batch.denominator, before
            )
            assert not result.skipped
            log_s.append(report.columns.get("log_s", np.zeros(0)))
        self._forget_routing()
        return log_s

    def digests(self) -> dict[str, str]:
        return policy_digests(PolicyTensors(self.spec, self.groups, self.engine.chunks), plain_form(torch.float32))

    def _set_temperature(self, temperature: float) -> None:
        """A run has one temperature, given to the engine when it is made; these tests have two."""
        self.engine.config, self.engine.pipeline.temperature = self._at(temperature), temperature

    def _at(self, temperature: float, **sampling) -> Config:
        update = {"temperature": temperature, **sampling}
        return self.config.model_copy(update={"rollout": self.config.rollout.model_copy(update=update)})

    def _ascending(self, trajectory: Trajectory) -> np.ndarray | None:
        """The experts as the server returned them, [tokens - 1, layers with experts, k], in the order of their
        numbers.
        """
        layers = [layer for layer in range(self.spec.num_layers) if self.spec.has_experts(layer)]
        return None if trajectory.routed_experts is None else np.sort(trajectory.routed_experts[:, layers], axis=-1)

    def _forget_routing(self) -> None:
        if self.routing is not None:
            self.routing.take()


def _kept_of(trajectory: Trajectory) -> np.ndarray | None:
    return None if trajectory.sampling_masks is None else trajectory.sampling_masks.counts


def _by_trajectory(
    pack: MicroBatch, log_probs: torch.Tensor, routing: tuple[np.ndarray, np.ndarray] | None
) -> dict[int, Scored]:
    """Cut one pack's log-probs (of its active tokens) and routing (of all its tokens) into its trajectories'."""
    values = np.full(pack.num_tokens, np.nan, np.float32)
    values[pack.loss_mask > 0] = log_probs.numpy()
    scored = {}
    for row, own in response_values(pack, values).items():
        (s,) = np.nonzero(pack.trajectory_index == row)[0]
        start = int(pack.cu_seqlens[s])
        end = start + int(pack.sequence["num_prompt_tokens"][s]) + len(own) - 1
        experts, margins = (None, None) if routing is None else (part[start:end] for part in routing)
        scored[row] = Scored(own, experts, margins)
    return scored


# --- what the pool calls, on every rank ---------------------------------------------------------------------------

_trainer: Trainer | None = None


def open_trainer(**arguments) -> None:
    global _trainer
    _trainer = Trainer(**arguments)


def close_trainer() -> None:
    global _trainer
    assert _trainer is not None
    _trainer.close()
    _trainer = None


def act(name: str, **arguments):
    """One method of the trainer."""
    assert _trainer is not None
    return getattr(_trainer, name)(**arguments)


def roll_out(temperature: float, step: int, **sampling) -> tuple[list[Sampled], dict[int, Scored]]:
    """What the servers sampled (from rank 0) and what this rank says of its share of it."""
    assert _trainer is not None
    sampled, mini_batches = _trainer.sample(temperature, step, **sampling)
    return sampled, _trainer.score(mini_batches, temperature)


def roll_out_and_train(temperature: float, step: int) -> list[np.ndarray]:
    assert _trainer is not None
    _, mini_batches = _trainer.sample(temperature, step)
    return _trainer.train(mini_batches, temperature)
