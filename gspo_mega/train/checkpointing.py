"""The run's state to disk and back: where a run continues from, its checkpoints, its Hugging Face exports.

Owns which state needs no checkpoint, and what follows once one is committed. The files are
`gspo_mega.checkpoint`'s and `gspo_mega.checkpoint`'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from gspo_mega.base.errors import ModelError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint.adapters import export_adapters, init_adapters
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
from gspo_mega.checkpoint.save import Saver, SaveReport
from gspo_mega.config.derived import critic_path
from gspo_mega.config.schema import Checkpoint, Config
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.precision import DTYPES
from gspo_mega.engine.process_groups import ParallelGroups, raise_together
from gspo_mega.models.low_rank import ADAPTER_FOLDER
from gspo_mega.models.spec import ModelSpec
from gspo_mega.train.phases import Phases
from gspo_mega.train.rank0 import Rank0
from gspo_mega.train.scatter import RankLink
from gspo_mega.train.servers import Gpus


def restore(
    run_folder: RunFolder,
    engine: PolicyEngine,
    config: Config,
    say: Callable[[str], None],
    critic: CriticEngine | None = None,
) -> tuple[TrainState, Path | None]:
    """Fill the engine from the run's latest checkpoint, or from `model.weights` or `model.path`; with `lora` what is
    not trained is always from there. The critic, where there is one, is from that checkpoint or from its own folder.
    Collective.

    Returns the run's state, and the checkpoint if there is one. `say` gets the warnings for the user, before anything
    is loaded. Raises CheckpointError as `find_checkpoint` and `load_checkpoint` do.
    """
    checkpoint, warnings = find_checkpoint(run_folder, engine.groups)
    for warning in warnings:
        say(warning)
    look_at_carried_layers(Path(config.model.path), engine.spec, engine.groups, say)

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

    if checkpoint is not None and config.lora is None:
        return load_checkpoint(checkpoint, engine, critic, begin), checkpoint
    load_start(engine)
    if checkpoint is not None:  # it has the adapters alone
        return load_checkpoint(checkpoint, engine), checkpoint
    init_adapters(engine)
    engine.after_weights_loaded()
    if critic is not None:
        begin(critic)
    return TrainState(), None


def look_at_carried_layers(folder: Path, spec: ModelSpec, groups: ParallelGroups, say: Callable[[str], None]) -> None:
    """Refuse, before anything is trained, a model's folder whose layers for multi-token prediction could not be
    exported, with ModelError on every rank; say it where the folder has none of those that it names. Collective.
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
    """Checkpoints and exports of a run; one on every rank. `resumed_from`: the checkpoint that holds `state` now."""

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
    ) -> None:
        """Removes what an interrupted save left. Collective."""
        self._run_folder, self._engine, self._state = run_folder, engine, state
        self._ranks, self._lead, self._phases, self._gpus = ranks, lead, phases, gpus
        self._critic = critic
        self._saver = Saver(run_folder, engine, settings, critic)
        if resumed_from is not None:
            self._saver.tidy(state.step)
        self._saved_state = None if resumed_from is None else asdict(state)
        self._seconds: dict[str, float] = {}

    def checkpoint(self) -> None:
        """Save the run's state. Collective.

        Does nothing before the first optimizer step, where a fresh start lacks nothing, and where the last checkpoint
        has this very state: a stop right after a checkpoint must not put that one at risk. Raises FolderError on rank 0
        where another start of the run holds its folder.
        """
        if self._state.num_optimizer_steps == self._state.num_critic_steps == 0:
            return
        if self._lead is not None:
            self._lead.check_held()
        with self._phases.phase("checkpoint"):
            if self._lead is not None:
                self._lead.source.note(self._state)
            state = asdict(self._state)
            if self._ranks.agree(state != self._saved_state):
                self._gpus.turn("train")
                self._note(self._saver.save(self._state))
                self._saved_state = state

    def poll(self, wait: bool = False) -> None:
        """Commit the save that is written beside the training, once it is, or now with `wait`. Collective."""
        with self._phases.phase("checkpoint"):
            self._note(self._saver.finish() if wait else self._saver.poll())

    def _note(self, reports: list[SaveReport]) -> None:
        for report in reports:
            self._seconds = {
                "time/checkpoint/pause_seconds": report.pause_seconds,
                "time/checkpoint/write_seconds": report.write_seconds,
            }
            if self._lead is not None:
                self._lead.source.is_durable(report.folder)

    def take_seconds(self) -> dict[str, float]:
        """The times of the save that was committed last, as metrics; each save's are returned once."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def export(self, folder: Path | None = None) -> None:
        """Write the weights as a Hugging Face folder, by default `hf` in the run folder: the run's result. Adapters are
        merged into it, and the result's are a PEFT folder too, `adapter`; a critic is beside the result, `critic`.
        Collective.
        """
        engine = self._engine
        self._gpus.turn("train")
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
