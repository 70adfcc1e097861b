"""Stop a case's run with a checkpoint, and continue it in another case: in another layout, on other ranks.

The checkpoint is one of a run, written and read by the code of `gspo-mega train` (`checkpoint/save.py`,
`train/checkpointing.py`). With it goes a list of what was saved: a digest of every whole tensor of weights, of the
optimizer's own copies and of both moments, FP8 scales, and the counters. What is read in the other layout must be all
of that to the bit, however the layouts cut it. The engine that reads it begins with weights of its own.

The random states of ranks are not carried into another layout. `RandomStates` counts those from which optimizer steps
draw: while there are none, a layout cannot change what a trajectory's numbers are.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gspo_mega.base.errors import CheckpointError
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, read_json
from gspo_mega.checkpoint.adapters import AdapterTensors
from gspo_mega.checkpoint.collectives import all_gather_json, raise_together
from gspo_mega.checkpoint.critic import CriticTensors
from gspo_mega.checkpoint.fp8_scales import by_tensor
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.load import TrainState, random_state
from gspo_mega.checkpoint.save import Saver
from gspo_mega.config.schema import Checkpoint, Config
from gspo_mega.engine.critic import CriticEngine
from gspo_mega.engine.optimizer import HeldParameter, held_parameters, moment, overwrite_gradient_buffers
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.train.checkpointing import restore
from gspo_mega.verify.certify.cases import folder_name
from gspo_mega.verify.certify.compare import CaseDifference
from gspo_mega.verify.certify.measure import main_grad
from gspo_mega.verify.certify.steps import complete_gradients

_MOMENTS = ("exp_avg", "exp_avg_sq")
# A place in the order of prompts, for which certificates have no data.
_PROMPTS = {"position": 7}


def stopped_folder(run_dir: Path, case: str) -> RunFolder:
    """Return the folder of the run of `case` that others continue."""
    return RunFolder(run_dir / "stopped" / folder_name(case))


def _saved_file(folder: RunFolder) -> Path:
    return folder.path / "saved.json"


def stop_run(folder: RunFolder, engine: PolicyEngine, critic: CriticEngine | None, config: Config) -> None:
    """Save the run as `gspo-mega train` does when it stops after `certify.num_steps` optimizer steps, with the list of
    what was saved. What an earlier certificate left there is removed. Overwrites the gradients. Collective.
    """
    problems: list[str] = []
    if engine.groups.is_lead:
        try:
            shutil.rmtree(folder.path, ignore_errors=True)
            folder.path.mkdir(parents=True)
        except OSError as error:
            problems.append(str(error))
    raise_together(problems, engine.groups.host, CheckpointError, f"{folder.path} cannot be written")
    steps = config.certify.num_steps
    state = TrainState(
        step=1,
        num_optimizer_steps=steps,
        weight_version=1,
        prompts=dict(_PROMPTS),
        num_critic_steps=0 if critic is None else steps,
    )
    Saver(folder, engine, Checkpoint(), critic).save(state)
    saved = _digests(engine, critic)
    if engine.groups.is_lead:
        atomic_write_json(_saved_file(folder), {"state": asdict(state), "digests": saved})


def continue_run(folder: RunFolder, engine: PolicyEngine, critic: CriticEngine | None) -> CaseDifference:
    """Fill the engine and the critic from the stopped run. Returns, on rank 0, how many of the saved things were read
    otherwise, and one of them. Collective. Raises CheckpointError as `restore` does, and without a checkpoint.
    """
    state, checkpoint = restore(folder, engine, lambda line: None, critic)
    if checkpoint is None:
        raise CheckpointError(f"{folder.path}: the case that was to stop there left no checkpoint")
    found, carried = _digests(engine, critic), CaseDifference()
    if not engine.groups.is_lead:
        return carried
    saved: dict[str, Any] = read_json(_saved_file(folder)) or {"state": {}, "digests": {}}
    want = saved["digests"]
    other = [name for name in sorted(want.keys() | found.keys()) if want.get(name) != found.get(name)]
    counters = asdict(state)
    other += [name for name in sorted(counters) if counters[name] != saved["state"].get(name)]
    if other or not want:
        carried.note(float(max(len(other), 1)), other[0] if other else "everything: no list of what was saved")
    return carried


@torch.no_grad()
def _digests(engine: PolicyEngine, critic: CriticEngine | None) -> dict[str, str]:
    """Return a digest of every whole tensor of the state, by kind and name, on rank 0; empty elsewhere. Overwrites the
    gradients. Collective.
    """
    found: dict[str, str] = {}
    for prefix, model in (("", engine), ("critic/", critic)):
        if model is None:
            continue
        own = (model.spec, model.groups, model.chunks)
        lora = model.config.lora
        if isinstance(model, CriticEngine):
            weights, gradients = CriticTensors(*own), CriticTensors(*own, main_grad)
        elif lora is not None:
            weights, gradients = AdapterTensors(lora, *own), AdapterTensors(lora, *own, main_grad)
        else:
            weights, gradients = PolicyTensors(*own), PolicyTensors(*own, main_grad)
        found |= {f"{prefix}weights of {name}": _digest(tensor) for name, tensor in weights.stream(torch.float32)}
        for kind in ("copies", *_MOMENTS):
            overwrite_gradient_buffers(model.optimizer, lambda held, kind=kind: _values(held, kind))
            complete_gradients(model)
            found |= {f"{prefix}{kind} of {name}": _digest(t) for name, t in gradients.stream(torch.float32)}
        steps = sorted(
            {float(step) for part in all_gather_json(_adam_steps(model), model.groups.host) for step in part}
        )
        found |= {f"{prefix}Adam's steps": str(steps), f"{prefix}schedule": str(model.scheduler.num_steps)}
        for scales in all_gather_json(_scale_digests(model), model.groups.host):
            found |= {f"{prefix}{name}": digest for name, digest in scales.items()}
    return found if engine.groups.is_lead else {}


def _values(held: HeldParameter, kind: str) -> torch.Tensor | None:
    return held.main.float() if kind == "copies" else moment(held, kind)


def _scale_digests(model: PolicyEngine | CriticEngine) -> dict[str, str]:
    """Return digests of this rank's FP8 scales, and of the history that ranks share: all but the latest values."""
    moe = model.spec.moe
    num_experts = 0 if moe is None else moe.num_experts // model.groups.expert.size
    numbers = by_tensor(model.scales.state(), expert_rank=model.groups.expert.rank, num_local_experts=num_experts)
    return {f"FP8 {name}": _digest(tensor[1:] if tensor.dim() > 1 else tensor) for name, tensor in numbers}


def _adam_steps(model: PolicyEngine | CriticEngine) -> list[float]:
    """Return the step counts of this rank's parameters, each once. An optimizer has one per parameter or per group."""
    counts: set[float] = set()
    for held in held_parameters(model.optimizer):
        own = held.part.optimizer.state.get(held.main, {}).get("step", held.settings.get("step"))
        if own is not None:
            counts.add(float(own))
    return sorted(counts)


def _digest(values: torch.Tensor) -> str:
    raw = values.detach().contiguous().cpu()
    return hashlib.sha256(raw.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


class RandomStates:
    """A rank's random states at one moment."""

    def __init__(self) -> None:
        self._before = random_state()

    def drawn_since(self) -> Iterator[str]:
        """Yield the states from which this rank has drawn since then."""
        now = random_state()
        for name, state in self._before.items():
            if not torch.equal(state, now[name]):
                yield f"the rank's random state {name}, from which the steps draw"
