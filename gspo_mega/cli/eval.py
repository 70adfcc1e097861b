"""Sampled accuracy of a run's newest weights, of a Hugging Face folder, or of a configuration's model.

    gspo-mega eval runs/quickstart/train                          the run's newest exported or published weights
    gspo-mega eval path/to/hf --config configs/quickstart.yaml    a folder, on that configuration's held-out prompts
    gspo-mega eval configs/quickstart.yaml                        the configuration's own model.path

Samples the held-out prompts of `eval` through SGLang servers and scores them with the configuration's reward; starts no
trainer ranks. Writes its logs to its own run folder: `eval` inside the run, else <run.dir>/<run.name>-eval.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.near_paths import did_you_mean
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.base.untrusted import read_text
from gspo_mega.cli.screen import Screen
from gspo_mega.config import load_config
from gspo_mega.config.prompt_sources import RESPONSES_FILE
from gspo_mega.launcher.local import launch
from gspo_mega.launcher.prepare import yaml_string

# An evaluation trains nothing and publishes nothing to a server, even if an override says so.
_NO_TRAINING = ("train=null", "sft=null")
# One process collects the samples. Without training there is no layout.
_ONE_RANK = (
    "cluster.num_nodes=1",
    "cluster.num_rollout_nodes=0",
    "cluster.ranks_per_node=1",
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.context=1",
    "parallel.virtual_pipeline=null",
    "parallel.expert=1",
    "parallel.expert_tensor=1",
    "publish.lora=merged",  # the evaluated folder holds whole weights, not an adapter
)


@dataclass(frozen=True)
class Target:
    """What to evaluate: the configuration, the model's folder, and the folder and name of the run that holds the logs.

    None for `model`: the configuration's own model.path. None for `run_dir` and `run_name`: the configuration's
    `run.dir`, and its `run.name` with `-eval` appended.
    """

    config: Path
    model: Path | None
    run_dir: Path | None
    run_name: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", type=Path, help="a run's folder, a Hugging Face folder, or a YAML file"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG",
        help="configuration to evaluate with; required for a Hugging Face folder",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object and everything else to standard error"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write every response of every set to FILE, one JSON object per line"
    )


def run(args: argparse.Namespace) -> int:
    target = find_target(args.target, args.config)
    refuse_another_model(target, args.target, args.overrides)
    loaded = load_config(target.config, [*_overrides(target), *args.overrides, *_NO_TRAINING], "eval")
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"gspo-mega eval: --out {args.out}: {args.out.parent} is no folder; make it first")
    with Screen(sys.stderr if args.json else sys.stdout) as say:
        code = launch(loaded, "eval", say)
    if code != 0:
        return code
    attempt = RunFolder(Path(loaded.config.run.dir) / loaded.config.run.name).latest_attempt()
    measured = read_json(attempt.result_file) if attempt is not None else None
    assert measured is not None  # the launch made the attempt, and its rank wrote the result before it ended with 0
    if args.out is not None and attempt is not None:
        shutil.copyfile(attempt.path / RESPONSES_FILE, args.out)
    result = {"model": loaded.config.model.path, **measured}
    with Screen() as show:  # if these lines are lost, result.json has the result
        show(json.dumps(result) if args.json else render_result(result))
    return 0


def find_target(path: Path, config: Path | None) -> Target:
    """Tell a run's folder, a Hugging Face folder and a configuration apart. Raises ConfigError for anything else."""
    if path.is_file():
        if config is not None:
            raise ConfigError(f"gspo-mega eval: {path} is already a configuration; leave out --config")
        return Target(path, None, None, None)
    folder = RunFolder(path)
    if folder.config_file.is_file():
        return Target(config or folder.config_file, _newest_weights(folder), folder.path, "eval")
    if (path / "config.json").is_file():
        if config is None:
            raise ConfigError(
                f"gspo-mega eval: {path} is a Hugging Face folder. Name the configuration with its prompts and reward:"
                " --config CONFIG"
            )
        return Target(config, path, None, None)
    what = (
        "holds neither config.resolved.yaml (a run) nor config.json (a Hugging Face folder)"
        if path.is_dir()
        else "does not exist"
    )
    raise ConfigError(
        f"gspo-mega eval: {path} {what}; give a run's folder, a Hugging Face folder or a YAML file{did_you_mean(path)}"
    )


def refuse_another_model(target: Target, path: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if an override names another model than the target does, which would silently be measured."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if target.model is not None and key in ("model", "model.path", "model.weights"):
            raise ConfigError(
                f"gspo-mega eval: {override} names another model than {path}; leave it out, or name a configuration"
                " (a YAML file) in place of the folder"
            )


def _newest_weights(folder: RunFolder) -> Path:
    """The exported or published folder of the highest weight version: a continued run may have an older result (`hf`)
    and newer published weights.
    """
    exported = [folder.huggingface_dir, *folder.huggingface_steps_dir.glob("step_*")]
    found = {path: _version_of(path) for path in exported if (path / "config.json").is_file()}
    published = read_json(folder.current_weights_file)
    if published is not None and (Path(published["path"]) / "config.json").is_file():
        found.setdefault(Path(published["path"]), int(published["weight_version"]))
    if not found:
        raise ConfigError(
            f"gspo-mega eval: the run {folder.path} has no result (hf/), and none of its published weights are left."
            " Continue the run, or convert a checkpoint with gspo-mega convert"
        )
    newest = max(found, key=lambda path: found[path])  # among equal versions the result (`hf`), which comes first
    trained = _checkpoint_version(folder)
    if trained is not None and trained > found[newest]:
        raise ConfigError(
            f"gspo-mega eval: the run {folder.path} has trained to weight version {trained} (its last checkpoint),"
            f" but the newest weights that a server can load, {newest}, are of version {found[newest]}. Convert the"
            f" checkpoint (gspo-mega convert) and evaluate the result with --config {folder.config_file}, or"
            f" evaluate {newest} in the same way"
        )
    return newest


def _version_of(folder: Path) -> int:
    """The weight version of an exported folder; 0 if its manifest has none."""
    return int((read_json(folder / "manifest.json") or {}).get("weight_version", 0))


def _checkpoint_version(folder: RunFolder) -> int | None:
    """The weight version of the run's latest checkpoint, or None without a checkpoint."""
    if not folder.latest_checkpoint_file.is_file():
        return None
    name = read_text(folder.latest_checkpoint_file).strip()
    record = read_json(folder.checkpoints_dir / name / "state.json") or {}
    return record.get("state", {}).get("weight_version")


def _overrides(target: Target) -> list[str]:
    """The overrides for a target. Paths are quoted."""
    own: list[str] = list(_ONE_RANK)
    if target.model is not None:
        own += [f"model.path={yaml_string(str(target.model))}", "model.weights=null"]
    if target.run_dir is not None:
        own += [f"run.dir={yaml_string(str(target.run_dir))}", f"run.name={target.run_name}"]
    else:
        own.append(f"run.name={load_config(target.config).config.run.name}-eval")
    return own


def render_result(result: dict[str, Any]) -> str:
    """The result as text for a person. `result`: the `model`, and under `sets` what was measured on each set."""
    blocks = [f"{'model':<12} {result['model']}"]
    for name, measured in result["sets"].items():
        blocks.append(_set_lines(measured, name if len(result["sets"]) > 1 else None))
    return "\n".join(blocks)


def _set_lines(result: dict[str, Any], name: str | None) -> str:
    lines = [("set", name)] if name is not None else []
    lines += [
        ("accuracy", f"{result['accuracy']:.4f} +- {result['standard_error']:.4f} (standard error)"),
        ("samples", f"{result['num_samples']} of {result['num_prompts']} prompts"),
        ("mean reward", f"{result['reward_mean']:.4f}"),
        ("mean length", f"{result['response_tokens_mean']:.1f} tokens"),
        ("truncated", f"{result['truncated_fraction']:.2%}"),
    ]
    for k, (value, error) in result["pass_at"].items():
        lines.append((f"pass@{k}", f"{value:.4f} +- {error:.4f}"))
    if result["majority"] is not None:
        value, error = result["majority"]
        lines.append(("majority", f"{value:.4f} +- {error:.4f}"))
    if result["turns_mean"] > 1:
        lines.append(("mean turns", f"{result['turns_mean']:.1f}"))
    if result["num_left_out"]:
        lines.append(("left out", f"{result['num_left_out']} prompts, longer than data.max_prompt_tokens"))
    if result["num_reward_failures"]:
        lines.append(
            (
                "not scored",
                (
                    f"{result['num_reward_failures']} samples, on which the reward failed; accuracy and reward leave"
                    " them out"
                ),
            )
        )
    return "\n".join(f"{name:<12} {value}" for name, value in lines)
