"""One rank's running parts, assembled: what `loop.py` and `sft_loop.py` are written in.

Owns in which order the parts are set up and closed, and the few acts that need several of them. What each does is its
own module's: `rank0.py` (rank 0), `scatter.py`, `servers.py`, `checkpointing.py`, `phases.py`. The order of a step's
acts is the loop's.

The reference policy of a run's KL term: its folder, its weights, and the check that it has the policy's shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TypeVar

from gspo_mega.base import progress
from gspo_mega.base.errors import ModelError, NumericsError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config.derived import critic_of, penalises_kl
from gspo_mega.config.prompt_sources import HeldOutSet, eval_sets
from gspo_mega.config.schema import Config
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.memory import DeviceMemory
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import ParallelGroups, create_groups
from gspo_mega.engine.reference import OwnBase, ReferencePolicy, Snapshots
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec, shape_differences
from gspo_mega.plan import resolve_layout
from gspo_mega.rollout.registration import versions_being_loaded
from gspo_mega.sync.adapters import publisher_class
from gspo_mega.train.async_eval import AsyncEvaluations
from gspo_mega.train.checkpointing import Saving, restore
from gspo_mega.train.context import StopRequested, WorkerContext
from gspo_mega.train.critic_step import build_critic
from gspo_mega.train.held_out import Evaluation
from gspo_mega.train.phases import Phases, Profiling
from gspo_mega.train.prefetch import Prefetch
from gspo_mega.train.rank0 import Rank0
from gspo_mega.train.scatter import Exchange, RankLink
from gspo_mega.train.servers import Gpus, LiveServers, NoServers, OwnGpus, ServerLink, SharedGpus, local_address


def reference_path(config: Config) -> str:
    """The Hugging Face folder of the KL term's reference."""
    return config.kl.reference_path or config.model.path


def load_reference(config: Config, spec: ModelSpec, groups: ParallelGroups) -> ReferencePolicy:
    """The frozen reference of the KL term with its weights. Collective.

    Raises ModelError where its shape is not the policy's, because it uses the policy's layout, packs and vocabulary.
    """
    path = reference_path(config)
    other = shape_differences(read_model_spec(path), spec)
    if other:
        raise ModelError(f"kl.reference_path {path} has another shape than the policy: {', '.join(other)}")
    reference = ReferencePolicy(config, spec, groups)
    import_huggingface(path, spec, groups, reference.chunks)
    return reference


T = TypeVar("T")


class RankSession:
    """Everything one rank has while it runs; a context manager. The constructor is collective.

    Attributes:
        lead: what rank 0 alone has; None on every other rank.
        beside: evaluations beside training, on rank 0 where `evaluates_beside`; None elsewhere.
        preparation: makes what rank 0 hands out, ahead where it can; None on every other rank, and in a cold start.
        engine: the policy; `reference`: the frozen policy of a KL term or penalty, None without one and in supervised
            training; `critic`: the value model, None where the algorithm has none.
        snapshots: weights of earlier versions, None where `diagnostics.exact_staleness` has no effect.
        state: the run's counters, from the latest checkpoint (`resumed_from`) or fresh.
        gpus: who has the GPUs, where ranks and servers share them.
        profiling: the profiler's traces, where `profile` asks for any.
        ranks, servers, saving, phases: the acts that all ranks make together, by kind.
    """

    def __init__(self, context: WorkerContext, num_optimizer_steps: int, trains_policy: bool = True) -> None:
        config = context.config
        self.context, self.config = context, config
        self.attempt = Attempt(context.attempt_dir)
        self.run_folder = self.attempt.run_folder
        self.phases = Phases()
        self.spec = read_model_spec(config.model.path)
        self.layout = resolve_layout(config, self.spec)
        parallel = config.parallel
        self.groups = create_groups(
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            seed=config.run.seed,
        )
        self._cleanup = contextlib.ExitStack()
        self.profiling = Profiling(config.profile, self.groups.world.rank, self.run_folder, self.say)
        self._cleanup.callback(self.profiling.close)
        self.phases.named_range = self.profiling.range
        heartbeat_store = context.open_store() if context.is_lead else None
        replicas = [self.layout.ranks_of(data) for data in range(self.layout.data)]
        self.exchange = Exchange(context.open_store(), self.groups.host, replicas, heartbeat_store)
        self._cleanup.callback(self.exchange.close)

        # Rank 0 reads data and starts scorers while every rank builds the model: errors of either come early.
        recorded_dir = config.train.from_rollouts if trains_policy and config.train is not None else None
        self.lead: Rank0 | None = None
        if context.is_lead:
            self.lead = self._cleanup.enter_context(Rank0(context, self.spec, recorded_dir, trains_policy))
        self.preparation: Prefetch | None = None
        if self.lead is not None and trains_policy and config.train is not None and not config.train.rollouts_only:
            self.preparation = Prefetch(config, self.spec, self.layout)
            self._cleanup.callback(self.preparation.close)
            self.lead.source.on_ready(self.preparation.begin)
        self.ranks = RankLink(self.exchange, self.layout, self.groups.world.rank)
        progress.beat()
        self.engine = PolicyEngine(config, self.spec, self.groups, num_optimizer_steps)
        progress.beat()
        self.reference = None
        if trains_policy and (config.kl.coefficient > 0 or penalises_kl(config)):
            own = config.lora is not None and config.kl.reference_path is None
            self.reference = OwnBase(self.engine) if own else load_reference(config, self.spec, self.groups)

        self.critic: CriticEngine | None = None
        rollouts_only = config.train is None or config.train.rollouts_only
        if trains_policy and not rollouts_only and critic_of(config) is not None:
            self.critic = build_critic(config, self.spec, self.groups)
            progress.beat()

        self.snapshots = None
        if trains_policy and config.diagnostics.exact_staleness and config.rollout.max_staleness > 0:
            self.snapshots = Snapshots(self.engine, config.rollout.max_staleness + 1)

        self.state, self.resumed_from = restore(self.run_folder, self.engine, config, self.say, self.critic)
        progress.beat()
        self.gpus: Gpus = OwnGpus()
        if config.cluster.colocated and recorded_dir is None:
            memory = DeviceMemory(self.engine, None if isinstance(self.reference, OwnBase) else self.reference)
            self.gpus = SharedGpus(config, memory, self.ranks, self.groups.host.group, self.lead, self.phases)
        self.saving = Saving(
            config.checkpoint,
            self.run_folder,
            self.engine,
            self.state,
            self.resumed_from,
            self.ranks,
            self.lead,
            self.phases,
            self.gpus,
            self.critic,
        )
        self.evaluates = config.eval is not None and recorded_dir is None
        self.eval_sets: tuple[HeldOutSet, ...] = eval_sets(config) if self.evaluates else ()
        self.servers: ServerLink = NoServers(self.lead) if recorded_dir is not None else self._live_servers()
        if self.lead is not None:
            self.lead.resume(self.state)
        self.evaluates_beside = config.eval is not None and not (config.eval.blocking or rollouts_only)
        self.evaluates_beside &= self.evaluates and trains_policy
        self.beside: AsyncEvaluations | None = None
        if self.lead is not None and self.evaluates_beside:
            self.beside = AsyncEvaluations(config, self.lead, self.state)
            self._cleanup.callback(self.beside.close)

    def _live_servers(self) -> LiveServers:
        config = self.config
        publisher = publisher_class(config)(
            config,
            self.spec,
            self.groups,
            self.engine.chunks,
            self.run_folder.weights_dir,
            local_address(config.server.host),
            self._versions_in_use,
        )
        self._cleanup.callback(publisher.close)
        return LiveServers(config.server, config.rollout, publisher, self.ranks, self.lead, self.phases, self.gpus)

    def _versions_in_use(self) -> set[int]:
        """Rank 0: published versions that stay on disk, whatever their age."""
        due = set() if self.beside is None else self.beside.versions()
        return versions_being_loaded(self.attempt.servers_dir) | due

    def __enter__(self) -> RankSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def say(self, line: str) -> None:
        """Show a line to the user (from rank 0)."""
        if self.lead is not None:
            self.lead.console(line)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """The block is the phase `name` of the step."""
        return self.phases.phase(name)

    def each(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items, all within one phase `name` of the step."""
        return self.phases.each(name, items)

    def on_wait(self) -> None:
        """Rank 0, while it waits for rollouts: look for a stop request and for servers that came back. Raises
        StopRequested.
        """
        assert self.lead is not None
        self.lead.check_stop()
        self.servers.catch_up()

    def begin_evaluation(self, names: list[str]) -> bool:
        """Begin to measure the named sets with the committed weights beside training; False on every rank where
        training has to wait for them. After a stop request it is noted, and begun by the next start. Collective, as
        `evaluate`.
        """
        begun = True
        with self.phase("eval"):
            if self.beside is not None:
                with contextlib.suppress(StopRequested):
                    begun = self.beside.begin(self.state.step, self.state.weight_version, names, self.on_wait)
            return self.ranks.agree(begun)

    def settle_evaluations(self) -> str | None:
        """Training is over: wait for evaluations beside it. Returns the reason where a stop was asked for. Collective,
        as `evaluate`.
        """
        stop = None
        with self.phase("eval"):
            if self.beside is not None:
                try:
                    self.beside.settle(self.on_wait)
                except StopRequested as request:
                    stop = str(request)
            return self.ranks.agree(stop)

    def evaluate(self, names: list[str]) -> dict[str, Evaluation] | None:
        """Held-out evaluation of the named sets with the committed weights; None on every rank when a stop was asked
        for. Collective: the other ranks stand by, for servers that come back meanwhile.
        """
        evaluation = None
        self.gpus.turn("sample")
        with self.phase("eval"):
            if self.lead is not None:
                with contextlib.suppress(StopRequested):  # the next wait for rollouts meets the request again
                    evaluation = self.lead.rollouts.evaluate(self.on_wait, names)
            found = None if evaluation is None else {name: asdict(one) for name, one in evaluation.items()}
            value = self.ranks.agree(found)
        return None if value is None else {name: Evaluation(**one) for name, one in value.items()}

    def note_step(self, skipped: bool, grad_norm: float) -> None:
        """Count an optimizer step. Raises NumericsError after too many skipped ones in a row; alike on all ranks."""
        progress.beat()
        state = self.state
        state.num_optimizer_steps += not skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        limit = self.config.optimizer.max_skipped_in_a_row
        _check_skipped("optimizer.max_skipped_in_a_row", limit, state.skipped_in_a_row, grad_norm)

    def note_critic_step(self, skipped: bool, grad_norm: float) -> None:
        """As `note_step`, for the critic."""
        assert self.critic is not None
        progress.beat()
        state = self.state
        state.num_critic_steps += not skipped
        state.critic_skipped_in_a_row = state.critic_skipped_in_a_row + 1 if skipped else 0
        limit = self.critic.config.optimizer.max_skipped_in_a_row
        _check_skipped("critic.optimizer.max_skipped_in_a_row", limit, state.critic_skipped_in_a_row, grad_norm)


def _check_skipped(key: str, limit: int, num_skipped: int, grad_norm: float) -> None:
    if num_skipped >= limit:
        raise NumericsError(
            f"the gradient was not finite (norm {grad_norm}) in {limit} optimizer steps in a row"
            f" ({key}); no step was applied, the weights are those before them"
        )
