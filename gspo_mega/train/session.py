"""What one rank has while it runs, assembled: the code in `loop.py` and `sft_loop.py` works on a `RankSession`.

The constructor sets the parts up in the order in which they depend on each other, and `__exit__` closes them in reverse
order. The methods are the actions that need several parts: evaluating on the servers, and counting optimizer steps.
The loops decide when each action happens. At the end are the frozen models, the reference policy of the KL term and a
teacher: where their weights come from, and the check that the reference has the policy's shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TypeVar

import gspo_mega.engine  # noqa: F401  before the modules of `checkpoint`, which import Megatron
from gspo_mega.base import progress
from gspo_mega.base.errors import ModelError, NumericsError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.checkpoint.peer_copies import PeerCopies
from gspo_mega.config.derived import critic_of, penalises_kl
from gspo_mega.config.prompt_sources import HeldOutSet, eval_sets
from gspo_mega.config.schema import Config, Kl, Model
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.memory import DeviceMemory
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import ParallelGroups, groups_of
from gspo_mega.engine.reference import FrozenBase, ReferencePolicy, Snapshots, Teachers
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
from gspo_mega.train.rank0 import Prefetch, Rank0
from gspo_mega.train.scatter import Exchange, RankLink
from gspo_mega.train.servers import Gpus, LiveServers, NoServers, OwnGpus, ServerLink, SharedGpus, local_address

T = TypeVar("T")


class RankSession:
    """Everything one rank has while it runs; a context manager. The constructor is collective.

    Attributes:
        lead: what only rank 0 has; None on every other rank.
        async_evaluations: evaluations that run while training goes on. Rank 0 has them if `evaluates_async`; None on
            other ranks.
        prefetch: prepares what rank 0 distributes for a step, ahead of time if possible. None on every other rank, in a
            cold start and with `train.rollouts_only`.
        engine: the policy. `reference`: the frozen policy of a KL term or penalty; None without one and in supervised
            training. `teachers`: what scores the policy's tokens, None without any. `critic`: the value
            model; None if the algorithm has none.
        snapshots: weights of earlier versions; None if `diagnostics.exact_staleness` has no effect.
        state: the run's counters, from the latest checkpoint (`resumed_from`) or fresh. `is_from_copies`: they, and all
            else, come from the ranks' copies in memory.
        gpus: moves GPU memory between ranks and servers if they share GPUs (`cluster.colocated`).
        profiling: writes the profiler's traces if `profile` asks for any.
        ranks, servers, saving, phases: what all ranks do together: follow rank 0, publish to servers, save the run, and
            time the phases.
    """

    def __init__(self, context: WorkerContext, num_optimizer_steps: int, trains_policy: bool = True) -> None:
        config = context.config
        self.context, self.config = context, config
        self.attempt = Attempt(context.attempt_dir)
        self.run_folder = self.attempt.run_folder
        self.phases = Phases()
        self.spec = read_model_spec(config.model.path)
        self.layout = resolve_layout(config, self.spec)
        self.groups = groups_of(config.parallel, config.run.seed)
        self._cleanup = contextlib.ExitStack()
        self.profiling = Profiling(config.profile, self.groups.world.rank, self.run_folder, self.say)
        self._cleanup.callback(self.profiling.close)
        self.phases.named_range = self.profiling.range
        heartbeat_store = context.open_store() if context.is_lead else None
        replicas = [self.layout.ranks_of(data) for data in range(self.layout.data)]
        self.exchange = Exchange(context.open_store(), self.groups.host, replicas, heartbeat_store)
        self._cleanup.callback(self.exchange.close)

        # Rank 0 reads the data and starts the scorers while the other ranks build the model, so that errors in either
        # come early.
        rollouts_only = config.train is None or config.train.rollouts_only
        recorded_dir = config.train.from_rollouts if trains_policy and config.train is not None else None
        self.lead: Rank0 | None = None
        if context.is_lead:
            self.lead = self._cleanup.enter_context(Rank0(context, self.spec, recorded_dir, trains_policy))
        self.prefetch: Prefetch | None = None
        if self.lead is not None and trains_policy and not rollouts_only:
            self.prefetch = Prefetch(config, self.spec, self.layout)
            self._cleanup.callback(self.prefetch.close)
            self.lead.source.on_ready(self.prefetch.begin)
        self.ranks = RankLink(self.exchange, self.layout, self.groups.world.rank)

        # The models. `progress.beat` tells the watchdog that this long start makes progress.
        progress.beat()
        self.engine = PolicyEngine(config, self.spec, self.groups, num_optimizer_steps)
        progress.beat()
        self.reference = None
        if trains_policy and (config.kl.coefficient > 0 or penalises_kl(config.algorithm, config.critic)):
            is_own_base = config.lora is not None and config.kl.reference_path is None
            self.reference = FrozenBase(self.engine) if is_own_base else load_reference(config, self.spec, self.groups)
        self.teachers: Teachers | None = None
        if trains_policy and not rollouts_only:
            self.teachers = load_teachers(config, self.groups)
            progress.beat()
        self.critic: CriticEngine | None = None
        if trains_policy and not rollouts_only and critic_of(config.algorithm, config.critic) is not None:
            self.critic = build_critic(config, self.spec, self.groups)
            progress.beat()
        self.snapshots = None
        if trains_policy and config.diagnostics.exact_staleness and config.rollout.max_staleness > 0:
            self.snapshots = Snapshots(self.engine, config.rollout.max_staleness + 1)

        # Where the run continues from, and what it needs to save and to publish.
        copies: PeerCopies | None = None
        if trains_policy and not rollouts_only and config.checkpoint.peer_copies:
            apart = config.cluster.ranks_per_node if config.cluster.num_nodes > 1 else 1
            copies = PeerCopies(self.run_folder, self.engine, self.critic, apart)
        self.state, self.resumed_from = restore(self.run_folder, self.engine, self.say, self.critic, copies)
        self.is_from_copies = copies is not None and copies.restored_step is not None
        progress.beat()
        self.gpus: Gpus = OwnGpus()
        if config.cluster.colocated and recorded_dir is None:
            frozen = [self.reference] if isinstance(self.reference, ReferencePolicy) else []
            frozen += list(self.teachers.models.values()) if self.teachers is not None else []
            memory = DeviceMemory(self.engine, *frozen)
            self.gpus = SharedGpus(
                config.server,
                config.rollout,
                config.publish,
                memory,
                self.ranks,
                self.groups.host.group,
                self.lead,
                self.phases,
            )
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
            copies,
        )
        self.servers: ServerLink = NoServers(self.lead) if recorded_dir is not None else self._live_servers()
        if self.lead is not None:
            self.lead.resume(self.state)

        # Held-out evaluation, while training waits or while it goes on.
        self.evaluates = config.eval is not None and recorded_dir is None
        self.eval_sets: tuple[HeldOutSet, ...] = eval_sets(config.eval, config.data) if self.evaluates else ()
        self.evaluates_async = config.eval is not None and not (config.eval.blocking or rollouts_only)
        self.evaluates_async &= self.evaluates and trains_policy
        self.async_evaluations: AsyncEvaluations | None = None
        if self.lead is not None and self.evaluates_async:
            self.async_evaluations = AsyncEvaluations(config, self.lead, self.state)
            self._cleanup.callback(self.async_evaluations.close)

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
            self._note_group,
        )
        self._cleanup.callback(publisher.close)
        return LiveServers(config.server, config.rollout, publisher, self.ranks, self.lead, self.phases, self.gpus)

    def _note_group(self, name: str) -> None:
        """Rank 0: record a group that servers join, which they leave if they outlive this process."""
        if self.config.train is not None and self.config.train.keep_servers:
            with contextlib.suppress(OSError), self.attempt.weight_groups_file.open("a", encoding="ascii") as file:
                file.write(f"{name}\n")

    def _versions_in_use(self) -> set[int]:
        """Rank 0: the published versions that must stay on disk even if they are old."""
        due = set() if self.async_evaluations is None else self.async_evaluations.versions()
        return versions_being_loaded(self.attempt.servers_dir) | due

    def __enter__(self) -> RankSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def say(self, line: str) -> None:
        """Show a line to the user. Does nothing on ranks other than 0."""
        if self.lead is not None:
            self.lead.console(line)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context manager: the block is the phase `name` of the step."""
        return self.phases.phase(name)

    def each_in_phase(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, all within one phase `name` of the step."""
        return self.phases.each_in_phase(name, items)

    def on_wait(self) -> None:
        """Rank 0 calls this while it waits for rollouts: it checks for a stop request and publishes to servers that
        came back. Raises StopRequested.
        """
        assert self.lead is not None
        self.lead.check_stop()
        self.servers.catch_up()

    def start_async_evaluation(self, names: list[str]) -> bool:
        """Start to evaluate the named sets with the committed weights while training goes on. Collective, as
        `evaluate`.

        Returns False on every rank if no server can be spared, so that training has to wait for the evaluation. After a
        stop request the evaluation stays due, and the next start of the run begins it.
        """
        begun = True
        with self.phase("eval"):
            if self.async_evaluations is not None:
                with contextlib.suppress(StopRequested):
                    begun = self.async_evaluations.start(
                        self.state.step, self.state.weight_version, names, self.on_wait
                    )
            return self.ranks.agree(begun)

    def wait_for_async_evaluations(self) -> str | None:
        """Training is over: wait for the evaluations that still run. Returns the reason if a stop was requested, else
        None. Collective, as `evaluate`.
        """
        stop = None
        with self.phase("eval"):
            if self.async_evaluations is not None:
                try:
                    self.async_evaluations.wait_for_all(self.on_wait)
                except StopRequested as request:
                    stop = str(request)
            return self.ranks.agree(stop)

    def evaluate(self, names: list[str]) -> dict[str, Evaluation] | None:
        """Evaluate the named held-out sets with the committed weights while training waits.

        Returns the results by set, or None on every rank if a stop was requested. Collective: the other ranks wait, and
        take part in a publish if a server comes back.
        """
        evaluation = None
        self.gpus.switch_to("sample")
        with self.phase("eval"):
            if self.lead is not None:
                with contextlib.suppress(StopRequested):  # the next wait for rollouts finds the request again
                    evaluation = self.lead.evaluate(self.state.step, self.on_wait, names)
            found = None if evaluation is None else {name: asdict(one) for name, one in evaluation.items()}
            value = self.ranks.agree(found)
        return None if value is None else {name: Evaluation(**one) for name, one in value.items()}

    def count_step(self, skipped: bool, grad_norm: float) -> None:
        """Count an optimizer step of the policy. `grad_norm` is for the message.

        Raises NumericsError, on all ranks, after `optimizer.max_skipped_in_a_row` skipped steps in a row.
        """
        progress.beat()
        state = self.state
        state.num_optimizer_steps += not skipped
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if skipped else 0
        limit = self.config.optimizer.max_skipped_in_a_row
        _check_skipped("optimizer.max_skipped_in_a_row", limit, state.skipped_in_a_row, grad_norm)

    def count_critic_step(self, skipped: bool, grad_norm: float) -> None:
        """Count an optimizer step of the critic. Raises NumericsError as `count_step`."""
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
            f" ({key}); none of these steps was applied, so the weights are those from before them"
        )


def reference_path(kl: Kl, model: Model) -> str:
    """The Hugging Face folder of the KL term's reference policy."""
    return kl.reference_path or model.path


def load_reference(config: Config, spec: ModelSpec, groups: ParallelGroups) -> ReferencePolicy:
    """The frozen reference policy of the KL term with its weights loaded. Collective.

    Raises ModelError if its shape differs from the policy's, because it uses the policy's layout, packs and vocabulary.
    """
    path = reference_path(config.kl, config.model)
    if different := shape_differences(read_model_spec(path), spec):
        raise ModelError(f"kl.reference_path {path} does not have the policy's shape: {', '.join(different)}")
    reference = ReferencePolicy(config, spec, groups)
    import_huggingface(path, spec, groups, reference.chunks)
    return reference


def load_teachers(config: Config, groups: ParallelGroups) -> Teachers | None:
    """The teachers with their weights loaded, in the policy's layout and precision; None without one. The plan compared
    the models (`plan/teacher.py`). Collective.
    """
    if config.teacher is None:
        return None
    found = Teachers(config, groups)
    for folder, model in found.models.items():
        import_huggingface(folder, read_model_spec(folder), groups, model.chunks)
    return found
