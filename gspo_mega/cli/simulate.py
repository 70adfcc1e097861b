"""Simulate a run on many machines, on the plan's cost model: step times, idle, staleness, failures, saves, nodes.

    gspo-mega simulate my_run.yaml                          a week of the run, without failures
    gspo-mega simulate my_run.yaml --mtbf 6000              a node fails every 6000 hours
    gspo-mega simulate my_run.yaml --nodes 128 --days 30    the best division of 128 nodes, for a month
    gspo-mega simulate my_run.yaml --fit runs/my_run        as fast as that run was, instead of the estimates

Starts nothing and imports no torch. The same seed prints the same figures. Exit code 0: simulated; 2: the
configuration, the nodes or a file cannot be used, with the reason.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.plan import estimate, plan_run
from gspo_mega.verify.simulate.job import check_simulated, read_lengths
from gspo_mega.verify.simulate.outcome import SimulationRequest, read_measured, simulate
from gspo_mega.verify.simulate.report import draw_outcome, outcome_json, render_outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the run's YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    parser.add_argument(
        "--model", metavar="PATH", help="simulate with this Hugging Face folder or config.json instead of model.path"
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="divide this many nodes between trainer and servers, as fast as possible"
    )
    parser.add_argument("--days", type=float, default=7.0, metavar="D", help="days to simulate (default: 7)")
    parser.add_argument(
        "--mtbf", type=float, metavar="HOURS", help="mean time between failures of one node (default: none fails)"
    )
    parser.add_argument(
        "--length-distribution",
        metavar="LENGTHS",
        help=(
            "lengths of responses: a run's folder (its journal), a file with one length per line, constant:TOKENS or"
            " lognormal:MEAN[:SIGMA] (default: a log-normal with the plan's mean)"
        ),
    )
    parser.add_argument(
        "--fit",
        metavar="RUN",
        help="use the two rates that this run measured: the folder of a run without sampling ahead, or its"
        " metrics.jsonl",
    )
    parser.add_argument(
        "--shared-cores", action="store_true", help="servers and ranks share the cores of one machine, without GPUs"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="seed of lengths and failures (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--svg", metavar="FILE", help="also draw the figures into this file")


def run(args: argparse.Namespace) -> int:
    _check(args)
    loaded = load_config(args.config, args.overrides, "train")
    config = loaded.config
    check_simulated(config.train, loaded.where)
    if config.cluster.gpu is None and args.fit is None:
        raise ConfigError(
            f"{loaded.where('cluster.gpu')}: cluster.gpu: not given, so nothing says how long a step takes; give it, or"
            " --fit with a run that was measured"
        )
    plan = plan_run(loaded, None, args.model)
    figures = estimate(plan, loaded.where)
    lengths = args.length_distribution
    asked = SimulationRequest(
        days=args.days,
        mtbf_hours=math.inf if args.mtbf is None else args.mtbf,
        num_nodes=args.nodes,
        lengths=None if lengths is None else read_lengths(lengths, config.rollout.max_new_tokens),
        measured=None if args.fit is None else read_measured(Path(args.fit)),
        shared=args.shared_cores,
        seed=args.seed,
    )
    outcome = simulate(plan, figures, asked, loaded.where)
    if args.svg is not None:
        title = f"{config.run.name}: {outcome.job.num_gpus} GPUs, {args.days:g} days, simulated"
        try:
            Path(args.svg).write_text(draw_outcome(outcome, title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {args.svg}: cannot be written: {error.strerror}") from None
    print(outcome_json(outcome) if args.json else render_outcome(outcome))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.nodes is not None and args.nodes < 2:
        raise ConfigError(f"--nodes {args.nodes}: trainer and servers need a node each; at least 2")
    for name in ("days", "mtbf"):
        value = getattr(args, name)
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(f"--{name} {value:g}: give a number above 0")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed}: give a whole number from 0 on")
