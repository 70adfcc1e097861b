"""Show the resolved layout of a configuration, or every reason why it cannot run.

    gspo-mega plan my_run.yaml                       layout, memory, time; estimates are marked as such
    gspo-mega plan my_run.yaml --command train       also reads what `train` reads: data, rewards, tokenizer, headers
    gspo-mega plan my_run.yaml --read-weights        also reads all weights: are they there, and finite?
    gspo-mega plan my_run.yaml --search 4x8          rank the layouts on 4 nodes of 8 GPUs, print the YAML block
    gspo-mega plan --continue runs/my_run cluster.num_nodes=6    what it takes to continue a run so, or why it cannot be
    gspo-mega plan my_run.yaml --trace               the plan, and how a trace of the GPU code differs from it
    eval "$(gspo-mega plan my_run.yaml --shell)"     the numbers that a job script needs

Starts no part of a run and imports no torch, so it answers at once on a login node. With --command, a separate process
reads the inputs for some seconds; with --read-weights it reads for as long as the weights take. Exit code 0: the
configuration can run; 2: it cannot run, with one line per reason; 10: it does not fit into a GPU's or a node's memory
(see plan.over_memory).
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Literal

from gspo_mega.base.errors import ConfigError, PlanError
from gspo_mega.config import LoadedConfig, load_config, render_config, render_json_schema
from gspo_mega.launcher.continuation import plan_continuation, render_continuation
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import estimate, plan_run, refuse_what_does_not_fit, render_report
from gspo_mega.plan.fewer_nodes import fewer_nodes_lines
from gspo_mega.plan.report import plan_json, plan_shell
from gspo_mega.plan.search import parse_grid, render_search, search_layouts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument(
        "--model", metavar="PATH", help="plan with this Hugging Face folder or config.json instead of model.path"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), help="what the ranks will run on, if you know it")
    parser.add_argument(
        "--command",
        choices=("train", "sft", "eval", "certify", "mismatch", "budget"),
        help=(
            "also check what this command needs: its sections and rewards, and what its ranks read: tokenizer, chat"
            " template, tools, rows, names and shapes of the weights"
        ),
    )
    parser.add_argument(
        "--read-weights",
        action="store_true",
        help="also read every value of the folders' weights: tensors that are missing, misshaped or not finite",
    )
    parser.add_argument(
        "--trace", action="store_true", help="also trace one rank of each kind, and show where it differs from the plan"
    )
    parser.add_argument(
        "--continue",
        action="store_true",
        dest="continues",
        help="CONFIG is the folder of a run: what continuing it with these values changes, reads, needs and loses",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument("--shell", action="store_true", help="print what a job script needs as shell variables")
    parser.add_argument(
        "--search", metavar="NODESxGPUS", help="rank the layouts on this many trainer nodes and GPUs per node"
    )
    parser.add_argument(
        "--resolved", action="store_true", help="also print the configuration with every default written out"
    )
    parser.add_argument("--json-schema", action="store_true", help="print the JSON Schema for editors and nothing else")


def run(args: argparse.Namespace) -> int:
    if args.command == "mismatch":
        args.command = "budget"  # that command reads the section `budget` of the configuration
    if args.json_schema:
        print(render_json_schema(), end="")
        return 0
    if args.config is None:
        raise ConfigError("gspo-mega plan: no configuration; for example: gspo-mega plan configs/quickstart.yaml")
    if args.trace and (args.json or args.shell or args.search):
        raise ConfigError("--trace: prints text, without --json, --shell and --search; gspo-mega trace --json has all")
    if args.continues:
        return _continue(args)
    loaded = load_config(args.config, args.overrides, args.command)
    if args.search is not None:
        _input_notices(loaded, args.command, is_elsewhere=args.model is not None)
        spec = read_model_spec(args.model or loaded.config.model.path)
        print(render_search(search_layouts(loaded.config, spec, *parse_grid(args.search))))
        return 0
    plan = plan_run(loaded, args.device, args.model)
    read: list[str] = []
    plan = replace(
        plan,
        notices=(
            *plan.notices,
            *_input_notices(loaded, args.command, is_elsewhere=args.model is not None, read=read),
            *_weights_read(loaded, args),
        ),
    )
    figures = estimate(plan, loaded.where)
    if args.json or args.shell:
        print(plan_json(plan, figures) if args.json else plan_shell(plan, figures))
    else:
        print(render_report(plan, figures))
        for number, line in enumerate(read):
            print(f"{'read' if number == 0 else '':<8} {line}")
        for number, line in enumerate(fewer_nodes_lines(loaded, args.device)):
            print(f"{'' if number else 'nodes':<8} {line}")
        if args.resolved:
            print("\n" + render_config(loaded.config), end="")
    if args.trace:
        from gspo_mega.verify.trace.job import trace_run
        from gspo_mega.verify.trace.report import render_differences

        print("\n".join(render_differences(trace_run(args.config, args.overrides, model=args.model).differences)))
    if args.command in (None, "train", "sft"):
        refuse_what_does_not_fit(plan, figures, loaded.where)
    return 0


def _continue(args: argparse.Namespace) -> int:
    if args.json or args.shell or args.search or args.trace or args.model:
        raise ConfigError("--continue: prints text, without --json, --shell, --search, --trace and --model")
    found = plan_continuation(args.config, args.overrides, args.device)
    print(render_continuation(found))
    return PlanError.exit_code if found.problems else 0


def _weights_read(loaded: LoadedConfig, args: argparse.Namespace) -> list[str]:
    if not args.read_weights:
        return []
    from gspo_mega.launcher.trial_process import read_weights

    return read_weights(loaded, args.command)


def _input_notices(
    loaded: LoadedConfig,
    command: Literal["train", "sft", "eval", "certify", "budget"] | None,
    *,
    is_elsewhere: bool,
    read: list[str] | None = None,
) -> list[str]:
    """Notices on data and rewards; none without a named command, because the checks take a moment. `is_elsewhere`: the
    plan is for another model than model.path, which may not be on this machine. `read`: a list for lines that say what
    was read.
    """
    if command is None:
        return []
    from gspo_mega.launcher.inputs import check_all_inputs, check_inputs

    if is_elsewhere:
        return [
            *check_inputs(loaded, command),
            "--model: the tokenizer and the weights of model.path were not checked",
        ]
    return check_all_inputs(loaded, command, read)
