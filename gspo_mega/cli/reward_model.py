"""Fit a reward model on answers that are known to be right or wrong, or better and worse, for `reward.model`.

    gspo-mega reward-model MODEL DATA.jsonl --out FOLDER                    rows with prompt, response, label (0 to 1)
    gspo-mega reward-model MODEL DATA.jsonl --out FOLDER --loss pairwise    rows with prompt, chosen, rejected
    gspo-mega reward-model MODEL DATA.jsonl --out FOLDER --ranks my_run.yaml parallel.tensor=8

MODEL is a Hugging Face folder. The command writes a folder that transformers' AutoModelForSequenceClassification loads
and SGLang serves (`--is-embedding`). Without --ranks, one process fits in fp32 with AdamW a model that one device
holds. With --ranks, the ranks of that file fit it on this machine, in the file's layout and precision, with its
optimizer and packs; MODEL is then a policy's folder, and the head starts at zero. Exit code 0: written.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder, read_json
from gspo_mega.cli.live import run_screen
from gspo_mega.config import load_config
from gspo_mega.config.validate_rewards import PLACEHOLDER
from gspo_mega.data.rows import JsonlFile

if TYPE_CHECKING:
    from gspo_mega.rewards.fitting import Fitted, Fitting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="Hugging Face folder to start from")
    parser.add_argument("data", metavar="DATA", type=Path, help="JSONL file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of CONFIG; with --ranks")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the reward model is written")
    parser.add_argument("--loss", choices=("pointwise", "pairwise"), default="pointwise", help="(default: pointwise)")
    parser.add_argument(
        "--text", default="{prompt}{response}", help="what the model reads, as in reward.model (default: %(default)s)"
    )
    parser.add_argument(
        "--train", choices=("head", "all"), default="all", help="which weights are fitted (default: all)"
    )
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="passes over the data (default: 1)")
    parser.add_argument(
        "--lr", type=float, metavar="LR", help="AdamW's learning rate (default: 1e-4; with --ranks optimizer.lr)"
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="rows per step (default: 32)")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N", help="longer texts lose their beginning (default: 4096)"
    )
    parser.add_argument(
        "--held-out", type=float, default=0.1, metavar="SHARE", help="share of the rows to test on (default: 0.1)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the head and the order (default: 1)")
    parser.add_argument(
        "--ranks", type=Path, metavar="CONFIG", help="fit with the ranks of a run's YAML file; its model is not used"
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    from gspo_mega.rewards.fitting import Fitting, examples_of, problem_of_row

    how = Fitting(
        args.loss, args.train, args.epochs, args.lr or 1e-4, args.batch_size, args.max_tokens, args.held_out, args.seed
    )
    rows = JsonlFile(args.data, lambda row: problem_of_row(row, how.loss))
    examples = examples_of((rows[number] for number in range(len(rows))), how.loss, args.text)
    if args.ranks is not None:
        code, fitted = _fit_by_ranks(args, how)
        if fitted is None:
            return code
    else:
        from gspo_mega.rewards.fitting import fit

        fitted = fit(args.model, examples, args.out, how, print)
    if fitted.accuracy is not None:
        print(f"held-out accuracy {fitted.accuracy:.3f} of {fitted.num_held_out}")
    print(f"reward model  {args.out}")
    return 0


_VALID = {"--held-out": "from 0 to below 1"}


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError if an option's value cannot be used."""
    if "response" not in PLACEHOLDER.findall(args.text):
        raise ConfigError("gspo-mega reward-model: --text: has no {response}, so the model would see no response")
    for option, value, valid in (
        ("--epochs", args.epochs, args.epochs >= 1),
        ("--batch-size", args.batch_size, args.batch_size >= 1),
        ("--max-tokens", args.max_tokens, args.max_tokens >= 1),
        ("--lr", args.lr, args.lr is None or args.lr > 0),
        ("--held-out", args.held_out, 0 <= args.held_out < 1),
    ):
        if not valid:
            raise ConfigError(f"gspo-mega reward-model: {option}: {value}; must be " + _VALID.get(option, "> 0"))
    if args.out.exists():
        raise ConfigError(f"gspo-mega reward-model: --out: {args.out} exists; name a folder that does not")
    if not (args.model / "config.json").is_file():
        raise ConfigError(
            f"gspo-mega reward-model: {args.model} is no Hugging Face model folder: it has no config.json"
        )
    if args.ranks is None and args.overrides:
        raise ConfigError(f"gspo-mega reward-model: {args.overrides[0]}: keys are overridden in the file of --ranks")
    if args.ranks is not None and args.train == "head":
        raise ConfigError("gspo-mega reward-model: --train head: with --ranks all weights are fitted; valid: all")


def _fit_by_ranks(args: argparse.Namespace, how: Fitting) -> tuple[int, Fitted | None]:
    """Returns (exit code, the fit's result), the result being None if the ranks failed. Raises ConfigError or PlanError
    before anything starts.
    """
    from gspo_mega.launcher.local import launch
    from gspo_mega.rewards.fitting import Fitted

    out = args.out.absolute()
    own = [f"model.path={args.model.resolve()}", f"run.dir={out.parent}", f"run.name={out.name}-fit"]
    # These keys are for policies.
    own += ["model.weights=null", "lora=null", "cluster.colocated=false", "cluster.num_rollout_nodes=0"]
    own += [f"optimizer.lr={args.lr}"] if args.lr is not None else []
    loaded = load_config(args.ranks, [*args.overrides, *own], "reward_model")
    ranks = loaded.config.cluster.ranks_per_node
    if how.batch_size < ranks:
        raise ConfigError(
            f"gspo-mega reward-model: --batch-size: {how.batch_size} is less than the {ranks} ranks of {args.ranks}"
            f" (cluster.ranks_per_node); at least {ranks}"
        )
    room = loaded.config.batch.micro_batch_tokens
    if how.max_tokens > room:
        raise ConfigError(
            f"gspo-mega reward-model: --max-tokens: {how.max_tokens} is more than a pack of {args.ranks} holds"
            f" (batch.micro_batch_tokens); at most {room}"
        )
    work = {"data": str(args.data.resolve()), "text": args.text, "out": str(out)}
    work["how"] = asdict(how) | {"lr": loaded.config.optimizer.lr}
    with run_screen() as say:
        code = launch(loaded, "reward_model", say, work=work, with_servers=False)
    if code:
        return code, None
    attempt = RunFolder(out.parent / f"{out.name}-fit").latest_attempt()
    result = read_json(attempt.result_file) if attempt is not None else None
    assert result is not None  # rank 0 wrote it
    return 0, Fitted(**result)
