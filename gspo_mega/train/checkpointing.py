"""The run's state to disk and back: what a run continues from (`restore`), its checkpoints and its Hugging Face exports
(`Saving`).

This file decides when a checkpoint is not needed, and what follows once one is committed. `gspo_mega.checkpoint` reads
and writes the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from gspo_mega.base.errors import CheckpointError, ModelError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint import folders
from gspo_mega.checkpoint.adapters import export_adapters, init_adapters
from gspo_mega.checkpoint.collectives import broadcast_json, raise_together
from gspo_mega.checkpoint.critic import export_critic, import_critic
from gspo_mega.checkpoint.hf_export import export_huggingface
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.checkpoint.load import (
    CRITIC_FOLDER,
    TrainedModel,
    TrainState,
    find_checkpoint,
    load_checkpoint,
    load_weights,
)
from gspo_mega.checkpoint.mtp_layers import CarriedLayers
from gspo_mega.checkpoint.peer_copies import PeerCopies
from gspo_mega.checkpoint.save import Saver, SaveReport
from gspo_mega.config.derived import critic_path
from gspo_mega.config.schema import Checkpoint
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.precision import DTYPES
from gspo_mega.engine.process_groups import ParallelGroups
from gspo_mega.models.low_rank import ADAPTER_FOLDER
from gspo_mega.models.spec import ModelSpec
from gspo_mega.train.phases import Phases
from gspo_mega.train.rank0 import Rank0
from gspo_mega.train.scatter import RankLink
from gspo_mega.train.servers import Gpus


def restore(
    run_folder: RunFolder,
    engine: PolicyEngine,
    say: Callable[[str], None],
    critic: CriticEngine | None = None,
    copies: PeerCopies | None = None,
) -> tuple[TrainState, Path | None]:
    """Load the engine's weights from the ranks' `copies` in memory, or else from the run's latest checkpoint, or
    without one from `model.weights` or `model.path`. With `lora`, the weights that are not trained always come from the
    latter. The critic, if there is one, is loaded from the same copies or checkpoint, or from its own folder.
    Collective.

    Returns the run's state, and the checkpoint that holds it if there is one. `say` gets the warnings for the user
    before anything is loaded from a checkpoint. Raises CheckpointError as `find_checkpoint` and `load_checkpoint` do.
    """
    config = engine.config
    check_carried_layers(Path(config.model.path), engine.spec, engine.groups, say)

    def load_start(model: TrainedModel) -> None:
        if isinstance(model, CriticEngine):
            import_critic(critic_path(config), model.spec, model.groups, model.chunks)
        elif config.model.weights is not None:
            load_weights(Path(config.model.weights), model)
        else:
            import_huggingface(config.model.path, model.spec, model.groups, model.chunks)

    def begin(model: TrainedModel) -> None:
        load_start(model)
        model.after_weights_loaded()

    why = None
    if copies is not None:
        if config.lora is not None:
            load_start(engine)
        saved = _latest_checkpoint(run_folder, engine.groups)
        state, why = copies.restore(0 if saved is None else folders.step_of(saved))
        if state is not None:
            say(f"resumed from the ranks' copies in memory: {why}, weight version {state.weight_version}")
            return state, saved if saved is not None and folders.step_of(saved) == state.step else None
    checkpoint, warnings = find_checkpoint(run_folder, engine.groups)
    for warning in warnings:
        say(warning)
    if why is not None and _has_died(run_folder, engine.groups):
        begin_at = "its start" if checkpoint is None else f"the checkpoint {checkpoint.name}"
        say(f"notice   no copies in memory to go on from ({why}): the run goes on from {begin_at}")
    if checkpoint is not None and config.lora is None:
        return load_checkpoint(checkpoint, engine, critic, begin), checkpoint
    load_start(engine)
    if checkpoint is not None:  # with `lora` it holds only the adapters
        return load_checkpoint(checkpoint, engine), checkpoint
    init_adapters(engine)
    engine.after_weights_loaded()
    if critic is not None:
        begin(critic)
    return TrainState(), None


def _latest_checkpoint(run_folder: RunFolder, groups: ParallelGroups) -> Path | None:
    """The checkpoint that `latest` names, unread; None without one. Collective."""
    found: str | None = None
    if groups.is_lead:
        with contextlib.suppress(OSError, CheckpointError):  # `find_checkpoint` says what is wrong, if it is asked
            folders.restore_moved_aside(run_folder)
            named = folders.candidates(run_folder)
            found = str(named[0]) if named and named[0].is_dir() else None
    found = broadcast_json(found, groups.host)
    return None if found is None else Path(found)


def _has_died(run_folder: RunFolder, groups: ParallelGroups) -> bool:
    """Whether the start of the run before this one ended without a result: copies in memory were to be expected.
    Collective.
    """
    attempts = run_folder.attempts()[:-1] if groups.is_lead else []
    return broadcast_json(bool(attempts) and not attempts[-1].result_file.exists(), groups.host)


def check_carried_layers(folder: Path, spec: ModelSpec, groups: ParallelGroups, say: Callable[[str], None]) -> None:
    """Check before training that the model's layers for multi-token prediction can be exported. Collective.

    Raises ModelError on every rank if they cannot. Tells the user if the folder has no tensors for the layers that its
    config.json names.
    """
    if not spec.num_ignored_layers:
        return
    problems: list[str] = []
    if groups.is_lead:
        try:
            if not CarriedLayers(folder).entries:
                say(
                    f"{folder}: config.json names {spec.num_ignored_layers} layers for multi-token prediction and the"
                    " folder has none of their tensors; what the run exports names none"
                )
        except ModelError as error:
            problems = [str(error)]
    raise_together(problems, groups.host, ModelError, "the run could not export its result")


class Saving:
    """The checkpoints and exports of a run; one object on every rank. `resumed_from`: the checkpoint that holds `state`
    at the start, if there is one.
    """

    def __init__(
        self,
        settings: Checkpoint,
        run_folder: RunFolder,
        engine: PolicyEngine,
        state: TrainState,
        resumed_from: Path | None,
        ranks: RankLink,
        lead: Rank0 | None,
        phases: Phases,
        gpus: Gpus,
        critic: CriticEngine | None = None,
        copies: PeerCopies | None = None,
    ) -> None:
        """Removes what an interrupted save left behind. Collective."""
        self._run_folder, self._engine, self._state = run_folder, engine, state
        self._ranks, self._lead, self._phases, self._gpus = ranks, lead, phases, gpus
        self._critic, self._copies = critic, copies
        self._saver = Saver(run_folder, engine, settings, critic)
        if resumed_from is not None or (copies is not None and copies.restored_step is not None):
            self._saver.tidy(state.step)
        self._saved_state = None if resumed_from is None else asdict(state)
        self._seconds: dict[str, float] = {}

    def checkpoint(self) -> None:
        """Save the run's state. Collective.

        Does nothing before the first optimizer step, because a fresh start has the same state, and if the last
        checkpoint already holds this state: a stop right after a checkpoint must not put that checkpoint at risk.
        Raises FolderError on rank 0 if a later start of the run has taken over its folder.
        """
        if self._state.num_optimizer_steps == self._state.num_critic_steps == 0:
            return
        if self._lead is not None:
            self._lead.check_newest_attempt()
        with self._phases.phase("checkpoint"):
            if self._lead is not None:
                self._lead.source.save_position(self._state)
            state = asdict(self._state)
            if self._ranks.agree(state != self._saved_state):
                self._gpus.switch_to("train")
                self._record(self._saver.save(self._state))
                self._saved_state = state

    def keep_copy(self) -> None:
        """Begin to copy every rank's state to its neighbour's memory, if `checkpoint.peer_copies` asks for it.
        Collective.
        """
        if self._copies is None:
            return
        with self._phases.phase("checkpoint"):
            if self._lead is not None:
                self._lead.source.save_position(self._state)
            self._show(self._copies.keep(self._state))

    def finish_copy(self) -> None:
        """Wait until the copy of the step before this one is with the neighbour. Collective."""
        if self._copies is not None:
            with self._phases.phase("checkpoint"):
                self._show(self._copies.finish())

    def _show(self, lines: list[str]) -> None:
        if self._lead is not None:
            for line in lines:
                self._lead.console(line)

    def end_copies(self) -> None:
        """Remove the copies in memory: the run ends, and a checkpoint holds its state. Collective."""
        if self._copies is not None:
            self._copies.end()

    def poll(self, wait: bool = False) -> None:
        """Commit the save that is written while training goes on, if it is complete. `wait`: wait until it is.
        Collective.
        """
        with self._phases.phase("checkpoint"):
            self._record(self._saver.finish() if wait else self._saver.poll())

    def _record(self, reports: list[SaveReport]) -> None:
        for report in reports:
            self._seconds = {
                "time/checkpoint/pause_seconds": report.pause_seconds,
                "time/checkpoint/write_seconds": report.write_seconds,
            }
            if self._lead is not None:
                self._lead.source.on_checkpoint_saved(report.folder)

    def take_seconds(self) -> dict[str, float]:
        """The times of the last committed save and the figures of the last copy in memory, as metrics. Each is returned
        once.
        """
        seconds, self._seconds = self._seconds, {}
        return seconds if self._copies is None else seconds | self._copies.take_metrics()

    def export(self, folder: Path | None = None) -> None:
        """Write the weights as a Hugging Face folder. Collective.

        The default folder is `hf` in the run folder, the run's result. Adapters are merged into the weights. With the
        result, adapters are also written as a PEFT folder, `adapter`, and a critic as the folder `critic`.
        """
        engine = self._engine
        self._gpus.switch_to("train")
        with self._phases.phase("checkpoint"):
            export_huggingface(
                folder or self._run_folder.huggingface_dir,
                engine.spec,
                engine.groups,
                engine.chunks,
                engine.parameter_dtype(),
                engine.config.model.path,
                self._state.weight_version,
                end_token_ids=() if self._lead is None else self._lead.end_token_ids,
            )
            if (critic := self._critic) is not None and folder is None:
                export_critic(
                    self._run_folder.huggingface_dir.with_name(CRITIC_FOLDER),
                    critic.spec,
                    critic.groups,
                    critic.chunks,
                    DTYPES[critic.config.precision],
                    engine.config.model.path,
                    self._state.num_critic_steps,
                )
            if engine.config.lora is not None and folder is None:
                export_adapters(
                    self._run_folder.huggingface_dir.with_name(ADAPTER_FOLDER),
                    engine.config.lora,
                    engine.spec,
                    engine.groups,
                    engine.chunks,
                    engine.config.model.path,
                )
