"""The whole of `gspo-mega certify`: references first, then every case, on ranks that live for many cases.

Owns which ranks are started for what, and goes on after a case that fails. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import LoadedConfig, load_config
from gspo_mega.config.schema import CertifyCase
from gspo_mega.launcher.gpus_and_ports import device_here
from gspo_mega.launcher.launch_local import WORKER_COMMAND, launch
from gspo_mega.verify.certify.cases import RESULTS_FILE, Case, case_config, folder_name, resolve_cases, starts
from gspo_mega.verify.certify.random_folder import make_random_folder
from gspo_mega.verify.certify.table import Row, render_batch, render_table

# The start's own configuration needs a layout that fits any model; each case brings its own.
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
    """Run the cases of `loaded` (read with `overrides`) and show the table. Returns 0 when every case holds, 1 when one
    does not, 130 when stopped. `worker_command`: the command of a rank without its own arguments.

    Raises ConfigError or PlanError before anything starts.
    """
    config = loaded.config
    # Beside the run's own folder, which may be in use.
    folder = RunFolder(Path(config.run.dir) / f"{config.run.name}-certify")
    references, cases = resolve_cases(loaded, overrides, device_here())
    runnable = [case for case in cases if case.refusal is None]
    say(
        f"certify  {len(cases)} case{'s' if len(cases) > 1 else ''}, {len(cases) - len(runnable)} refused before they"
        f" start; run folder {folder.path}"
    )
    found: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for group in (references, runnable):
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
    )
    return 0 if passed == len(rows) else 1


def _row(case: Case, result: dict[str, Any] | None, error: str) -> Row:
    if result is None:
        return Row(case, None, error=error)
    # The comparison knows its tolerances and lists what is outside.
    return Row(case, result, tuple(result["outside"]))


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
    """Run some cases on one start of ranks; after a case that fails, run the rest on new ranks."""
    left = list(together)
    while left:
        specs = [_with_weights(case.spec, case.model, folder, loaded.config.run.seed) for case in left]
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


def _with_weights(spec: CertifyCase, model: str, folder: RunFolder, seed: int) -> CertifyCase:
    """The case with a model that has weights: a shape alone (a .json file) is filled with random ones."""
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        path = make_random_folder(path, folder.path / "models" / folder_name(model), seed)
    return spec.model_copy(update={"set": {**spec.set, "model.path": str(path)}})


def _read_results(file: Path) -> dict[str, dict[str, Any]]:
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["name"]: line for line in lines}
