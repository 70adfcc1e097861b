"""Run `gspo-mega certify`: start the references, then every case, and show the table.

One start of ranks runs many cases, and a case that fails does not end the program. For a model without weights, a
Hugging Face folder of random weights is written from the family's table of tensors. Imports no torch.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gspo_mega.base import atomic_io
from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.untrusted import read_text
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.derived import teachers
from gspo_mega.config.schema import CertifyCase, Teacher
from gspo_mega.launcher.local import WORKER_COMMAND, launch
from gspo_mega.launcher.prepare import device_here
from gspo_mega.models.delta_net import has_norm_around_zero
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import TensorEntry, checkpoint_tensors
from gspo_mega.verify.certify.cases import (
    CRITIC_KINDS,
    RESULTS_FILE,
    STEP_KINDS,
    Case,
    case_config,
    folder_name,
    resolve_cases,
    starts,
)

# Large enough that experts differ and the distribution over tokens is not uniform.
_MATRIX_STD, _VECTOR_STD = 0.08, 0.1
_FILE_BYTES = 2 * 1024**3


def make_random_folder(shape_file: str | Path, folder: Path, seed: int) -> Path:
    """Write `folder` with `shape_file` as its config.json and fp32 weights drawn from `seed`. Returns `folder`.

    An existing folder with the same shape and seed is kept. Raises ModelError for an unsupported shape.
    """
    spec = read_model_spec(shape_file)
    stamp = json.dumps({"shape": spec.raw, "seed": seed}, sort_keys=True)
    stamp_file = folder / "random.json"
    if stamp_file.is_file() and read_text(stamp_file) == stamp:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(shape_file, folder / "config.json")
    entries = checkpoint_tensors(spec)
    shards: list[list[TensorEntry]] = [[]]
    room = _FILE_BYTES
    for entry in entries:
        if shards[-1] and entry.num_elements * 4 > room:
            shards.append([])
            room = _FILE_BYTES
        shards[-1].append(entry)
        room -= entry.num_elements * 4
    names = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(
            {entry.name: _draw(spec, entry, index + len(names), seed) for index, entry in enumerate(shard)},
            folder / file,
        )
        atomic_io.follow_umask(folder / file)
        names |= {entry.name: file for entry in shard}
    size = sum(entry.num_elements * 4 for entry in entries)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": names}), encoding="utf-8"
    )
    stamp_file.write_text(stamp, encoding="utf-8")
    return folder


def _draw(spec: ModelSpec, entry: TensorEntry, index: int, seed: int) -> np.ndarray:
    values = np.random.default_rng((seed, index)).standard_normal(entry.shape, dtype=np.float32)
    if len(entry.shape) == 3:  # the kernels of a convolution, of few elements
        return 2 * _MATRIX_STD * values
    if entry.name.endswith("A_log"):  # heads of gated delta nets that remember one token, and a hundred
        return 2 * values - 2
    if has_norm_around_zero(spec, entry):
        return _VECTOR_STD * values
    if len(entry.shape) > 1:
        return _MATRIX_STD * values
    return _VECTOR_STD * values if entry.name.endswith("bias") else 1 + _VECTOR_STD * values


KINDS = ("log_prob", "loss", "gradient", "weights", *STEP_KINDS)
_HEADINGS = ("log-prob", "loss", "gradient", "weights", *STEP_KINDS)
_CRITIC_HEADINGS = ("values", "v. grad", "v. weight", *(f"v. {kind}" for kind in STEP_KINDS))

_LEGEND = (
    "log-prob: nats per token; loss: relative to mean |s A|; gradient: relative L2 of the tensor where it is largest;",
    "weights: relative L2 of the update. norm: that of each step's gradient, relative, and what each kind of parameter",
    "counts in it. steps: each step's clipped gradient, and Adam's moments, relative L2 of the tensor where it is",
    "largest, and routers' sums. state: rates, decay, zeros, skipped steps, buffers, copies that are not the same.",
    "flips: sequences clipped differently than in the reference, and tokens (times layers) that go to other experts.",
    "on edges: the same in a second batch, whose ratios and routers are on an edge on purpose, so that rounding",
    "decides; it is counted, not judged.",
)
_REACHED_LEGEND = (
    "reached: the share of tokens with a number that FP8 rounds otherwise; the others differ by fp32's rounding."
)
_CARRIED_LEGEND = (
    "carried: how much of a stopped run's checkpoint the layout that continues it read otherwise, to the bit."
)
_CRITIC_LEGEND = (
    "values, v. grad, v. weight, v. norm ...: the critic's values, in the unit of rewards; the others as the policy's."
)


@dataclass(frozen=True)
class CertificateRow:
    """A case and its outcome. `result`: from `CaseComparison.result`, None if there is none; `failed`: kinds of
    difference outside the tolerance; `error`: why there is no result.
    """

    case: Case
    result: dict[str, Any] | None
    failed: tuple[str, ...] = ()
    error: str = ""

    @property
    def passed(self) -> bool:
        if self.case.spec.refused:
            return self.case.refusal is not None
        return self.result is not None and not self.failed


def render_batch(name: str, batch: dict[str, Any]) -> str:
    """Return one line about a reference's recorded batch."""
    low, high = batch["response_lengths"]
    return (
        f"{name}: {batch['num_trajectories']} trajectories, {batch['num_tokens']} tokens, groups of"
        f" {' and '.join(map(str, batch['group_sizes']))}, responses of {low} to {high}, {batch['num_fully_masked']}"
        f" fully masked; {batch['num_clipped_high']} clipped above, {batch['num_clipped_low']} below,"
        f" {batch['num_positive']} with A > 0, {batch['num_negative']} with A < 0; nearest clip edge"
        f" {batch['clip_margin']:.1e} away"
        + (
            f", {batch['num_routes']} routes, nearest tie {batch['router_margin'] or math.nan:.1e} away"
            if batch["num_routes"]
            else ""
        )
        + f"; |grad| {', '.join(f'{norm:.6f}' for norm in batch['grad_norms'])}"
    )


def render_table(rows: Sequence[CertificateRow]) -> str:
    """Return the table: the largest differences of each case, the worst tensor, and pass or FAIL; below it, the reasons
    of refusals and errors.

    Flips are sequences that are clipped differently than in the reference, and tokens of a layer with other experts.
    `on edges` counts flips where ratios and routers were put on an edge on purpose; these are not judged.
    """
    has_critic = any(row.result is not None and "values" in row.result for row in rows)
    has_reached = any(row.result is not None and "reached" in row.result for row in rows)
    has_carried = any(row.result is not None and "carried" in row.result for row in rows)
    kinds, headings = (*KINDS, *CRITIC_KINDS) if has_critic else KINDS, _HEADINGS
    if has_critic:
        headings = (*_HEADINGS, *_CRITIC_HEADINGS)
    if has_reached:
        kinds, headings = ("reached", *kinds), ("reached", *headings)
    if has_carried:
        kinds, headings = ("carried", *kinds), ("carried", *headings)
    width = max(len("case"), *(len(row.case.name) for row in rows))
    lines = [
        f"{'case':<{width}}  ranks  "
        + "  ".join(f"{heading:>8}" for heading in headings)
        + "  flips  on edges  verdict   largest gradient difference in"
    ]
    notes = []
    for row in rows:
        begin = f"{row.case.name:<{width}}  {row.case.spec.ranks:>5}  "
        blank = "  ".join(f"{'-':>8}" for _ in kinds) + "      -         -"
        if row.case.refusal is not None:
            lines.append(f"{begin}{blank}  {'refused' if row.passed else 'REFUSED'}")
            notes.append(f"{row.case.name}: refused: {row.case.refusal}")
        elif row.result is None:
            lines.append(f"{begin}{blank}  FAILED")
            notes.append(f"{row.case.name}: {row.error}")
        elif row.case.spec.refused:
            lines.append(f"{begin}{_numbers(row, kinds)}  NOT REFUSED")
        else:
            place = row.result["gradient"]["place"]
            verdict = "measured" if row.case.spec.rounded else "pass" if row.passed else "FAIL"
            lines.append(f"{begin}{_numbers(row, kinds)}  {verdict:<8}  {place}")
            notes += [
                f"{row.case.name}: {kind} differs by {row.result[kind]['value']:.3g}, at most in"
                f" {row.result[kind]['place']}"
                for kind in row.failed
            ]
    legend = (
        *_LEGEND,
        *([_CRITIC_LEGEND] if has_critic else []),
        *([_REACHED_LEGEND] if has_reached else []),
        *([_CARRIED_LEGEND] if has_carried else []),
    )
    return "\n".join([*lines, "", *legend, *([""] if notes else []), *notes])


def _numbers(row: CertificateRow, kinds: Sequence[str]) -> str:
    assert row.result is not None
    edges = row.result.get("edges")
    on_edges = f"{edges['num_clip_flips']}, {edges['num_route_flips']}" if edges is not None else "-"
    flips = f"{row.result['num_clip_flips']}, {row.result['num_route_flips']}"
    found = [row.result.get(kind) for kind in kinds]
    numbers = [f"{one['value']:8.1e}" if one is not None else f"{'-':>8}" for one in found]
    return "  ".join(numbers) + f"  {flips:>5}  {on_edges:>8}"


# The configuration of a start of ranks needs a layout that fits any model; each case brings its own.
_ONE_OF_EACH = (
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.context=1",
    "parallel.expert=1",
    "parallel.expert_tensor=1",
    "parallel.virtual_pipeline=null",
)


def certify(
    loaded: LoadedConfig,
    overrides: Sequence[str],
    say: Callable[[str], None],
    worker_command: Sequence[str] = WORKER_COMMAND,
) -> int:
    """Run the cases of `loaded` (read with `overrides`) and show the table. Returns 0 if every case holds, 1 if one
    does not, 130 after a stop. `worker_command`: the command of a rank without its own arguments.

    Raises ConfigError or PlanError before anything starts.
    """
    config = loaded.config
    # Not the run's own folder, which may be in use.
    folder = RunFolder(Path(config.run.dir) / f"{config.run.name}-certify")
    references, cases = resolve_cases(loaded, overrides, device_here())
    runnable = [case for case in cases if case.refusal is None]
    say(
        f"certify  {len(cases)} case{'s' if len(cases) > 1 else ''}, {len(cases) - len(runnable)} refused before they"
        f" start; run folder {folder.path}"
    )
    found: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    rounded = [case for case in runnable if case.spec.rounded]  # other cases read their results
    ordinary = [case for case in runnable if not (case.spec.rounded or case.spec.continued_from)]
    continued = [case for case in runnable if case.spec.continued_from]  # of runs that ordinary cases stopped
    for group in (references, rounded, ordinary, continued):
        for together in starts(group, config.certify.cases_a_start):
            code = _start(loaded, overrides, folder, together, found, errors, say, worker_command)
            if code == 130:
                return code
        if missing := [case.name for case in references if case.name not in found]:
            say(f"\n{errors[missing[0]]}\nthe reference failed: there is nothing to compare with")
            return 1
    for reference in references:
        say(render_batch(reference.name, found[reference.name]["batch"]))
    rows = [_row(case, found.get(case.name), errors.get(case.name, "")) for case in cases]
    say("\n" + render_table(rows))
    passed = sum(row.passed for row in rows)
    say(
        f"\n{passed} of {len(rows)} cases hold"
        + ("" if passed == len(rows) else "; the others are FAIL, FAILED, REFUSED or NOT REFUSED above")
        + (
            f"; {len(refused)} of them were to be refused"
            if (refused := [r for r in rows if r.case.spec.refused])
            else ""
        )
    )
    return 0 if passed == len(rows) else 1


def _row(case: Case, result: dict[str, Any] | None, error: str) -> CertificateRow:
    if result is None:
        return CertificateRow(case, None, error=error)
    # The comparison on the ranks knows the tolerances, and lists what is outside them.
    return CertificateRow(case, result, tuple(result["outside"]))


def _start(
    loaded: LoadedConfig,
    overrides: Sequence[str],
    folder: RunFolder,
    together: list[Case],
    found: dict[str, dict[str, Any]],
    errors: dict[str, str],
    say: Callable[[str], None],
    worker_command: Sequence[str],
) -> int:
    """Run cases on one start of ranks; if a case fails, run the rest on new ranks. Returns 0, or 130 after a stop."""
    left = list(together)
    while left:
        models = [{"model.path": case.model} for case in left]
        folders = {f"{one.key}.path": one.settings.path for one in teachers(loaded.config.teacher)}
        models = [paths | {key: path for key, path in folders.items() if path is not None} for paths in models]
        seed = loaded.config.run.seed
        specs = [_with_weights(case.spec, paths, folder, seed) for case, paths in zip(left, models, strict=True)]
        specs = [_with_teachers_list(spec, loaded.config.teacher) for spec in specs]
        listed = json.dumps([spec.model_dump() for spec in specs])
        first = case_config(loaded.path, specs[0], overrides)
        base = [
            *overrides,
            f"run.name={folder.path.name}",
            "cluster.num_nodes=1",
            "cluster.num_rollout_nodes=0",
            f"cluster.ranks_per_node={specs[0].ranks}",
            f"certify.cases={listed}",
        ]
        base += [f"model.path={json.dumps(first.config.model.path)}", *_ONE_OF_EACH]
        failure = ""
        before = folder.latest_attempt()
        try:
            code = launch(
                load_config(loaded.path, base, "certify"), "certify", lambda line: None, worker_command=worker_command
            )
            if code == 130:
                return code
        except RankError as error:
            failure = str(error)
        attempt = folder.latest_attempt()
        assert attempt is not None and (before is None or attempt.number > before.number)  # the launch made it
        done = _read_results(attempt.path / RESULTS_FILE)
        for case in left:
            if case.name in done:
                found[case.name] = done[case.name]
                say(f"  {case.name:<40} {done[case.name]['seconds']:5.1f} s")
        left = [case for case in left if case.name not in done]
        if left:  # the first of them is the one that failed
            errors[left[0].name] = failure or f"its ranks ended without a result; see {attempt.logs_dir}"
            say(f"  {left[0].name:<40} failed")
            left = left[1:]
    return 0


def _with_weights(spec: CertifyCase, paths: dict[str, str], folder: RunFolder, seed: int) -> CertifyCase:
    """Return the case with models that have weights: for a shape only (a .json file), random weights are written.
    `paths`: each model's, by key.
    """
    found = {}
    for key, model in paths.items():
        path = Path(model)
        if path.suffix == ".json" and path.is_file():
            path = make_random_folder(path, folder.path / "models" / folder_name(model), seed)
        found[key] = str(path)
    return spec.model_copy(update={"set": {**spec.set, **found}})


def _with_teachers_list(spec: CertifyCase, teacher: Teacher | None) -> CertifyCase:
    """Return the case with the whole list of teachers by source in place of keys of its entries, which no override can
    name.
    """
    if teacher is None or not teacher.by_source:
        return spec
    entries = [one.model_dump(exclude_none=True) for one in teacher.by_source]
    kept = dict(spec.set)
    for place, entry in enumerate(entries):
        if (path := kept.pop(f"teacher.by_source.{place}.path", None)) is not None:
            entry["path"] = path
    return spec.model_copy(update={"set": kept | {"teacher.by_source": entries}})


def _read_results(file: Path) -> dict[str, dict[str, Any]]:
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines}
