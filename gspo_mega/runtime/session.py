"""One rank's running parts and how the ranks act together: what `loop.py` and `sft_loop.py` are written in.

Owns setting the parts up and down, waiting for rank 0, publishing, checkpoints and evaluation as collective acts.
The order of these acts is the loop's.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo_mega import beats
from gspo_mega.batches.assemble import MiniBatch, for_ranks
from gspo_mega.batches.held_out import Evaluation
from gspo_mega.batches.recorded import ReplaySide
from gspo_mega.batches.rollouts import RolloutSide
from gspo_mega.checkpoint.initial_weights import load_weights
from gspo_mega.checkpoint.save import Saver, SaveReport
from gspo_mega.checkpoint.train_state import TrainState, find_checkpoint, load_checkpoint
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups
from gspo_mega.errors import FolderError, NumericsError, PublishError
from gspo_mega.metrics.timer import PhaseTimer
from gspo_mega.metrics.writer import MetricsWriter
from gspo_mega.model.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.run_folder import Attempt
from gspo_mega.runtime.exchange import Exchange
from gspo_mega.runtime.reference_policy import load_reference
from gspo_mega.runtime.stop import StopRequest
from gspo_mega.runtime.worker import WorkerContext
from gspo_mega.weights.hf_export import export_huggingface
from gspo_mega.weights.hf_import import import_huggingface
from gspo_mega.weights.publish import Publisher, PublishResult

# A server that could not take the committed weights is tried again after so long.
CATCH_UP_PAUSE_SECONDS = 5.0
# A server's death is in its registration, and with the pool, well within so long.
DEATH_NOTICE_SECONDS = 5.0


class StopRequested(Exception):
    """Somebody asked for an orderly stop; the text is the reason."""


@dataclass
class Work:
    """What rank 0 hands out for one step: this rank's mini-batches, or the reason to stop.

    `num_positions`: positions computed on all data-parallel ranks together, padding and filler included; rank 0 only.
    """

    mini_batches: list[MiniBatch] = field(default_factory=list)
    stop: str | None = None
    num_positions: int = 0


class Session:
    """Everything one rank has while it runs; a context manager. `side` and `writer` exist on rank 0 only.

    Constructing it is collective: groups, model, weights (from the latest checkpoint, `model.weights` or `model.path`).
    `reference` exists where the policy's loss has a KL term; supervised training has none (`trains_policy` False).
    """

    def __init__(self, context: WorkerContext, num_optimizer_steps: int, trains_policy: bool = True) -> None:
        config = context.config
        self.context, self.config = context, config
        self.attempt = Attempt(context.attempt_dir)
        self.run_folder = self.attempt.run_folder
        self.num_restarts = self.run_folder.num_restarts() if context.rank == 0 else 0
        self.timer = PhaseTimer()
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
        self.exchange = Exchange(
            context.open_store(), self.groups.host, context.open_store() if context.rank == 0 else None
        )
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self.exchange.close)
        self.is_replay = trains_policy and config.train is not None and config.train.from_rollouts is not None
        # Rank 0 reads data and starts scorers while every rank builds the model: errors of either come early.
        self.side = self._cleanup.enter_context(self._make_side()) if context.rank == 0 else None
        beats.beat()
        self.engine = PolicyEngine(config, self.spec, self.groups, num_optimizer_steps)
        beats.beat()
        self.reference = (
            load_reference(config, self.spec, self.groups) if trains_policy and config.kl.coefficient > 0 else None
        )
        checkpoint, warnings = find_checkpoint(self.run_folder, self.groups)
        for warning in warnings:
            self.say(warning)
        if checkpoint is None:
            if config.model.weights is not None:
                load_weights(Path(config.model.weights), self.engine)
            else:
                import_huggingface(config.model.path, self.spec, self.groups, self.engine.chunks)
            self.engine.after_weights_loaded()
            self.state = TrainState()
        else:
            self.state = load_checkpoint(checkpoint, self.engine)
        beats.beat()
        self.resumed_from = checkpoint
        self._saver = Saver(self.run_folder, self.engine, config.checkpoint)
        if checkpoint is not None:
            self._saver.tidy(self.state.step)
        self._save_seconds: dict[str, float] = {}
        self._saved_state = None if checkpoint is None else asdict(self.state)
        self.publisher = Publisher(
            config,
            self.spec,
            self.groups,
            self.engine.chunks,
            self.run_folder.weights_dir,
            _address_for(config.server.host),
        )
        self._cleanup.callback(self.publisher.close)
        self._catch_up_after = 0.0
        self.stop_request = StopRequest(context.attempt_dir)
        self.writer = None
        if self.side is not None:
            self.side.batches.restore(self.state)
            self.writer = self._cleanup.enter_context(
                MetricsWriter(self.run_folder.path, tensorboard=config.metrics.tensorboard)
            )
            self.writer.resume_from(self.state.step)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._cleanup.close()

    def _make_side(self) -> RolloutSide | ReplaySide:
        return (
            ReplaySide(self.config, self.attempt)
            if self.is_replay
            else RolloutSide(self.config, self.spec, self.attempt)
        )

    @property
    def evaluates(self) -> bool:
        """Whether there is a held-out evaluation: it is asked for, and there are servers to sample it."""
        return self.config.eval is not None and not self.is_replay

    @property
    def is_lead(self) -> bool:
        return self.side is not None

    def say(self, line: str) -> None:
        """Show a line to the user (from rank 0)."""
        if self.is_lead:
            self.context.console(line)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.timer.phase(name), beats.during(name):
            yield

    # --- rank 0 leads, the others follow ---------------------------------------------------------------------

    def wait_for_servers(self) -> str | None:
        """Until every server of the run is up. Returns the reason where a stop was asked for meanwhile. Collective."""
        stop = None
        if isinstance(self.side, RolloutSide):
            server = self.config.server
            deadline_seconds = server.start_deadline_seconds * (1 + server.max_restarts)
            try:
                self.side.pool.wait_ready(server.num_servers, deadline_seconds, self._wait_for_start)
                self.publisher.check_servers(self.attempt.software_dir)
            except StopRequested as request:
                stop = str(request)
        stop = self.agree(stop)
        beats.enter("other")  # the start is over
        return stop

    def publish(self) -> PublishResult | None:
        """Send the engine's weights to all servers as `state.weight_version`; None where the run has none. Collective.

        Waits while all of them are being restarted, and begins again when all of them died meanwhile. A server that
        fails otherwise gets no work until it holds a committed version. Raises PublishError on every rank when none
        is left, RolloutError when none comes back.
        """
        self.check_held()
        if self.is_replay:
            return None
        with self.phase("publish"):
            result = None
            while result is None:
                beats.beat()
                servers = self._servers_up()
                try:
                    result = self.publisher.publish(self.state.weight_version, servers)
                except PublishError as error:
                    # Every rank is here, with the same error. Each round costs all servers a restart, so
                    # server.max_restarts ends it.
                    if not self.agree(self._are_gone(servers)):
                        raise
                    self.say(f"warning  {error}\nwarning  published again as soon as a server is back")
        self._commit(result)
        return result

    def _servers_up(self) -> list[Any]:
        """Rank 0: all servers that are up, at least one; elsewhere none."""
        if not isinstance(self.side, RolloutSide):
            return []
        self.side.pool.wait_ready(1, self.config.rollout.no_server_deadline_seconds)
        return self.side.pool.controls()

    def _are_gone(self, servers: list[Any]) -> bool:
        """Rank 0: whether none of these servers, of these starts, runs any more. Their end may be known a little
        later.
        """
        if not isinstance(self.side, RolloutSide) or not servers:
            return False
        tried = {(server.server_id, server.generation) for server in servers}
        deadline = time.monotonic() + DEATH_NOTICE_SECONDS
        while tried & {(server.server_id, server.generation) for server in self.side.pool.controls()}:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _commit(self, result: PublishResult) -> None:
        if isinstance(self.side, RolloutSide):
            self.side.pool.commit(result.weight_version, result.verified)
            for server, why in result.failed.items():
                self.say(
                    f"warning  {server} does not hold weight version {result.weight_version} and gets no work until it"
                    f" does: {why}"
                )

    def _publish_again(self, servers: list[Any]) -> None:
        """The committed weights once more, to servers that came back (known on rank 0). Collective."""
        result = self.publisher.publish_again(self.state.weight_version, servers)
        self._commit(result)
        if result.failed:
            self._catch_up_after = time.monotonic() + CATCH_UP_PAUSE_SECONDS

    def agree(self, value: Any) -> Any:
        """Rank 0's `value` (JSON types) on every rank."""
        if self.is_lead:
            return self.exchange.send_all({"kind": "agree", "value": value})["value"]
        return self._follow("agree")["value"]

    def hand_out(self, shards: list[list[MiniBatch]]) -> Work:
        """Rank 0: send every rank its shard and return its own."""
        own = self.exchange.send_each(
            [{"kind": "work", "mini_batches": shard} for shard in for_ranks(shards, self.layout)]
        )
        work = _to_work(own)
        work.num_positions = sum(m.num_tokens for shard in shards for mini in shard for m in mini.micro_batches)
        return work

    def hand_out_stop(self, reason: str) -> Work:
        """Rank 0: tell every rank to stop."""
        return _to_work(self.exchange.send_all({"kind": "work", "mini_batches": [], "stop": reason}))

    def receive_work(self) -> Work:
        """Other ranks: follow rank 0 until it hands out work."""
        with self.phase("rollout"):
            return _to_work(self._follow("work"))

    def _follow(self, until: str) -> dict[str, Any]:
        """Other ranks: do what rank 0 asks for until it sends a message of the kind `until`."""
        while True:
            message = self.exchange.receive()
            if message["kind"] == until:
                return message
            assert message["kind"] == "publish_again", f"rank 0 sent {message['kind']!r} where {until!r} was due"
            self._publish_again([])

    def on_wait(self) -> None:
        """Rank 0, while it waits for rollouts: look for a stop request and for servers that came back."""
        self._check_stop()
        if not isinstance(self.side, RolloutSide):
            return
        behind = self.side.pool.servers_behind()
        if behind and time.monotonic() >= self._catch_up_after:
            self.exchange.send_all({"kind": "publish_again"})
            self._publish_again(behind)

    def _wait_for_start(self) -> None:
        """Servers have a deadline of their own to start in."""
        beats.beat()
        self._check_stop()

    def _check_stop(self) -> None:
        reason = self.stop_request.check()
        if reason is not None:
            raise StopRequested(reason)

    # --- acts of all ranks -----------------------------------------------------------------------------------

    def evaluate(self) -> Evaluation | None:
        """Held-out evaluation with the committed weights; None on every rank when a stop was asked for. Collective:
        the other ranks stand by, for servers that come back meanwhile."""
        evaluation = None
        with self.phase("eval"):
            if isinstance(self.side, RolloutSide):
                with contextlib.suppress(StopRequested):  # the next wait for rollouts meets the request again
                    evaluation = self.side.evaluate(self.on_wait)
            value = self.agree(None if evaluation is None else asdict(evaluation))
        return None if value is None else Evaluation(**value)

    def note_step(self, skipped: bool, grad_norm: float) -> None:
        """Count an optimizer step. Raises NumericsError after too many skipped ones in a row; alike on all ranks."""
        beats.beat()
        if not skipped:
            self.state.num_optimizer_steps += 1
            self.state.skipped_in_a_row = 0
            return
        self.state.skipped_in_a_row += 1
        limit = self.config.optimizer.max_skipped_in_a_row
        if self.state.skipped_in_a_row >= limit:
            raise NumericsError(
                f"the gradient was not finite (norm {grad_norm}) in {limit} optimizer steps in a row"
                " (optimizer.max_skipped_in_a_row); no step was applied, the weights are those before them"
            )

    def checkpoint(self) -> None:
        """Save the run's state; before the first optimizer step there is nothing yet that a fresh start lacks.
        Collective.

        Nor is there where this very state is saved: a stop right after a checkpoint must not put that one at risk.
        """
        if self.state.num_optimizer_steps == 0:
            return
        self.check_held()
        with self.phase("checkpoint"):
            if self.side is not None:
                self.side.batches.note(self.state)
            state = asdict(self.state)
            if self.agree(state != self._saved_state):
                self._note_saves(self._saver.save(self.state))
                self._saved_state = state

    def check_held(self) -> None:
        """Rank 0: raises FolderError where the run was started elsewhere meanwhile, before something of the run is
        overwritten.
        """
        if self.is_lead and not self.attempt.is_newest():
            raise FolderError(
                f"{self.run_folder.path} was taken over by a later start of the run, attempt"
                f" {self.run_folder.latest_attempt().number}; this one, attempt {self.attempt.number}, ends and writes"
                " nothing more"
            )

    def poll_checkpoint(self, wait: bool = False) -> None:
        """Commit the save that is written beside the training, once it is, or now with `wait`. Collective."""
        with self.phase("checkpoint"):
            self._note_saves(self._saver.finish() if wait else self._saver.poll())

    def _note_saves(self, reports: list[SaveReport]) -> None:
        for report in reports:
            self._save_seconds = {
                "time/checkpoint/pause_seconds": report.pause_seconds,
                "time/checkpoint/write_seconds": report.write_seconds,
            }
            if self.side is not None:
                self.side.batches.is_durable(report.folder)

    def take_save_seconds(self) -> dict[str, float]:
        """The times of the save that was committed last, once."""
        seconds, self._save_seconds = self._save_seconds, {}
        return seconds

    def export(self, folder: Path | None = None) -> None:
        """Write the weights as a Hugging Face folder, by default `hf` in the run folder: the run's result.
        Collective.
        """
        with self.phase("checkpoint"):
            export_huggingface(
                folder or self.run_folder.huggingface_dir,
                self.spec,
                self.groups,
                self.engine.chunks,
                self.engine.parameter_dtype(),
                self.config.model.path,
                self.state.weight_version,
            )


def _to_work(message: dict[str, Any]) -> Work:
    return Work([MiniBatch.from_wire(m) for m in message["mini_batches"]], message.get("stop"))


def _address_for(server_host: str) -> str:
    """This machine's address as a server bound to `server_host` reaches it: what a connection to there comes from."""
    family, kind, _, _, there = socket.getaddrinfo(server_host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # a datagram socket sends nothing on connect
        return probe.getsockname()[0]
