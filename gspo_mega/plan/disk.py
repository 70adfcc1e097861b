"""The disk space that a run takes, compared with what is free: rollout journal, checkpoints, exports, published
weights.

Lengths are not known beforehand, so the journal's bytes are an upper bound: every prompt and response has its longest
length (an episode of several turns has episodes.max_tokens, without branches). Nothing is deleted here; `journal`,
`checkpoint` and `publish` in the configuration decide what is kept.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from gspo_mega.config.derived import filters_groups
from gspo_mega.config.prompt_sources import MOST_KEPT_CHARACTERS, MOST_KEPT_PROMPTS, eval_sets
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan.delta import delta_bytes
from gspo_mega.plan.memory import GIB
from gspo_mega.plan.sampling_masks import mask_cost
from gspo_mega.plan.servers import needs_start_folder, version_bytes
from gspo_mega.plan.state import WEIGHT_BYTES
from gspo_mega.plan.teacher import served_bytes

# Bytes of the journal. Per response token: its id (4), log-prob (8) and weight version (4). Per prompt token: its id.
RESPONSE_TOKEN_BYTES, PROMPT_TOKEN_BYTES = 16, 4
# What is written as text: about four characters per token, and the names of the fields.
TEXT_BYTES_PER_TOKEN, EPISODE_BYTES, PROMPT_BYTES = 4, 418, 185
# Each turn after the first, with the messages before it.
TURN_BYTES = 250
# The trainer's difference of each token, and what names a response with them (`data/journal/steps.py`).
TOKEN_GAP_BYTES, RESPONSE_GAP_BYTES = 2, 40
# Expert numbers are kept for every layer, in an array with a name.
ROUTES_NAME_BYTES = 38
# Per step: a line of metrics.jsonl, TensorBoard's events of it, and the line of the console. The size of servers' logs
# depends on what happens, and is left out.
METRICS_BYTES_PER_STEP = 24 * 1024
# Of a held-out response that is kept: its prompt, answer and text at their longest, and the names of the fields.
HELD_OUT_RESPONSE_BYTES = 3 * MOST_KEPT_CHARACTERS + 600


@dataclass(frozen=True)
class DiskUse:
    """Bytes. `journal_step`: one step's trajectories without routed experts and sampling masks. `routes_step`: their
    routed experts. `masks_step`: their sampling masks. `parts`: the whole run by name, at the moment when they take
    most. `free`: what is free on the run folder's file system, None if that cannot be asked. `present`: what such parts
    already take there. `where`: the folder that was asked.
    """

    journal_step: int
    routes_step: int
    parts: dict[str, int]
    free: int | None
    present: int
    where: Path
    masks_step: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.free is None or self.total <= self.free + self.present


def disk_use(config: Config, spec: ModelSpec, total_parameters: int, checkpoint_bytes: int) -> DiskUse | None:
    """Return the disk use of a training run; None if the configuration has no `train` section."""
    train = config.train
    if train is None:
        return None
    journal_step, routes_step = journal_bytes(config, spec)
    masks = mask_cost(config, spec)
    masks_step = 0 if masks is None else masks.held
    scores_step, tops_step = served_bytes(config)
    steps = train.num_steps
    # A step may consume groups from the files of up to `ahead` earlier steps.
    keep, ahead = config.journal.keep_last, config.rollout.max_staleness
    kept = steps if keep is None else min(steps, keep + ahead)
    with_routes = min(kept, (config.checkpoint.every_steps or steps) + ahead) if config.journal.prune_routes else kept
    parts = {
        "journal": kept * (journal_step + scores_step) + with_routes * (routes_step + masks_step + tops_step),
        "metrics": steps * METRICS_BYTES_PER_STEP,
    }
    if train.from_rollouts is None and (sets := eval_sets(config.eval, config.data)):
        # Before the first step and after the last one, and between them.
        kept_of = [
            (2 + ((steps - 1) // one.every_steps if one.every_steps else 0), one.num_prompts or MOST_KEPT_PROMPTS)
            for one in sets
        ]
        num_kept = sum(times * min(prompts, MOST_KEPT_PROMPTS) for times, prompts in kept_of)
        parts["held-out responses"] = num_kept * HELD_OUT_RESPONSE_BYTES
    if not train.rollouts_only:
        saves = steps // config.checkpoint.every_steps if config.checkpoint.every_steps else 1
        # While a checkpoint is written, one more than `keep_last` is on disk.
        last = min(saves, config.checkpoint.keep_last + 1)
        for_good = steps // config.checkpoint.keep_every if config.checkpoint.keep_every else 0
        parts["checkpoints"] = min(max(saves, 1), last + for_good) * checkpoint_bytes
        weights = total_parameters * WEIGHT_BYTES[config.precision]
        every = config.checkpoint.export_every_steps
        parts["exports"] = (1 + (steps // every if every else 0)) * weights
        if train.from_rollouts is None:
            versions = config.publish.keep_last + 1 if config.publish.method == "disk" else 0
            versions += needs_start_folder(config, spec)
            if versions:
                parts["published weights"] = versions * version_bytes(config, spec, total_parameters)
            if config.publish.full_every > 1 and config.publish.method == "disk":
                changed = delta_bytes(config, spec, total_parameters)
                parts["published changes"] = round((config.publish.keep_last + 1) * changed)
    folder = Path(config.run.dir) / config.run.name
    where = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        free = shutil.disk_usage(where).free
    except OSError:
        free = None
    return DiskUse(journal_step, routes_step, parts, free, _present(folder), where, masks_step)


def journal_bytes(config: Config, spec: ModelSpec) -> tuple[int, int]:
    """Return the most that one step takes in the journal: (bytes without routed experts, bytes of routed experts)."""
    prompt, response, batch = config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.batch
    turns = 1
    if config.rollout.episode.function != "one_turn":
        turns = config.episodes.max_turns
        response = max(response, (config.episodes.max_tokens or 0) - prompt)
    sampled = config.rollout.max_oversampling if filters_groups(config.rollout) else 1.0
    prompts = int(batch.prompts_per_step * sampled)
    episodes = prompts * batch.group_size
    own = prompts * (PROMPT_BYTES + prompt * (PROMPT_TOKEN_BYTES + TEXT_BYTES_PER_TOKEN))
    own += episodes * (EPISODE_BYTES + (turns - 1) * TURN_BYTES)
    own += episodes * response * (RESPONSE_TOKEN_BYTES + TEXT_BYTES_PER_TOKEN)
    if config.diagnostics.token_mismatch:
        own += episodes * (RESPONSE_GAP_BYTES + response * TOKEN_GAP_BYTES)
    if spec.moe is None or not config.rollout.return_routed_experts:
        return own, 0
    position_bytes = spec.num_layers * spec.moe.experts_per_token * spec.moe.route_bytes
    return own, episodes * (turns * ROUTES_NAME_BYTES + (prompt + response - 1) * position_bytes)


def disk_lines(use: DiskUse | None) -> list[str]:
    """Return the report's lines about disk space."""
    if use is None:
        return []
    routes = f" and {_size(use.routes_step)} of routed experts" if use.routes_step else ""
    routes += f" and {_size(use.masks_step)} of sampling masks" if use.masks_step else ""
    parts = ", ".join(f"{name} {_size(size)}" for name, size in use.parts.items())
    free = "" if use.free is None else f"; {_size(use.free)} are free under {use.where}"
    return [
        f"rollouts per step: at most {_size(use.journal_step)}{routes}, if all have the longest length",
        f"run: {parts}: {_size(use.total)} in all{free}",
    ]


def disk_notices(use: DiskUse | None) -> list[str]:
    """Return a notice if the run may not fit on the disk."""
    if use is None or use.fits:
        return []
    largest = max(use.parts, key=lambda name: use.parts[name])
    advice = {
        "journal": (
            "journal.keep_last keeps fewer steps"
            + (", journal.prune_routes none of their routed experts" if use.routes_step else "")
            + (", journal.prune_routes none of their sampling masks" if use.masks_step else "")
        ),
        "checkpoints": "checkpoint.keep_last and checkpoint.keep_every keep fewer",
        "exports": "a larger checkpoint.export_every_steps writes fewer",
        "published weights": "publish.method: distributed writes none",
    }.get(largest, "fewer steps write less")
    return [
        f"disk: the run may take {_size(use.total)} and {_size((use.free or 0) + use.present)} are available under"
        f" {use.where}; most of it {largest} ({_size(use.parts[largest])}): {advice}, or choose another run.dir"
    ]


def _present(folder: Path) -> int:
    """Return the bytes that an earlier start of the run already wrote and that will not be written again."""
    size = 0
    for name in ("journal", "checkpoints", "weights", "hf", "hf_steps"):
        for parent, _, files in os.walk(folder / name):
            for file in files:
                try:
                    size += os.lstat(os.path.join(parent, file)).st_size
                except OSError:  # the run is going on, and removed the file
                    continue
    return size


def _size(size: float) -> str:
    for unit, factor in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", 2**20)):
        if size >= 0.1 * factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1024:.1f} KiB"
