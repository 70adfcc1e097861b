"""A rank of `gspo-mega certify`: run the cases of its start one after another in one process.

The cases are `certify.cases` of the run's configuration. References run first and save their numbers in the run folder,
where the other cases find them. For each completed case rank 0 appends a line to `cases.jsonl` of the attempt.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from gspo_mega.algorithm.terms import log_lower_edge, objective_settings
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, read_json
from gspo_mega.checkpoint.adapters import init_adapters
from gspo_mega.checkpoint.collectives import all_gather_json
from gspo_mega.checkpoint.gather import PolicyTensors
from gspo_mega.checkpoint.hf_folder import open_folder
from gspo_mega.checkpoint.hf_import import import_huggingface
from gspo_mega.config.precision import is_sharp_fp8
from gspo_mega.config.schema import CertifyCase, Config, Moe, Objective, Precision
from gspo_mega.engine.policy import PolicyEngine
from gspo_mega.engine.process_groups import create_groups, destroy_groups
from gspo_mega.engine.routing import has_router_losses
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.models.spec import ModelSpec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.layout import Layout
from gspo_mega.train.context import WorkerContext
from gspo_mega.train.session import load_teachers
from gspo_mega.verify.certify.batch import Draws, old_log_probs, recorded_batch, redraw, set_old_log_probs
from gspo_mega.verify.certify.cases import RESULTS_FILE, case_config, folder_name
from gspo_mega.verify.certify.compare import CaseComparison, CaseDifference, Reference, outside, tolerance_of, widened
from gspo_mega.verify.certify.continued import RandomStates, continue_run, stop_run, stopped_folder
from gspo_mega.verify.certify.critic_case import CriticMeasurement, build_critic, compare_critic, record_critic
from gspo_mega.verify.certify.measure import Measurement, Numbers, RouterMargins, gather_routes, tie_routers

# Minimum distance of the recorded batch's router scores from a tie. A large model has too many routes to keep it; its
# flips are counted.
ROUTER_MARGIN = 1e-4
MOST_DRAWS = 100
# Every layout pads sequences to a multiple of this many tokens, which suits up to two context or tensor ranks in the
# recipes with one scale per tensor.
_EQUAL_PADDING = 32
_MOVED = "moved"  # the weights of a `rounded` case before its steps


def run_certify(context: WorkerContext) -> dict[str, Any] | None:
    """Run every case of this start, in order. Collective over all ranks."""
    certify = context.config.certify
    for case in certify.cases:
        started = time.monotonic()
        config = case_config(RunFolder(context.run_dir).config_file, case).config
        folder = context.run_dir / "reference" / folder_name(config.model.path)
        result = run_case(
            context, config, case, Reference(folder), is_reference=case.name.startswith(certify.reference.name)
        )
        if context.is_lead:
            line = {"name": case.name, "seconds": time.monotonic() - started, **result}
            with (context.attempt_dir / RESULTS_FILE).open("a", encoding="utf-8") as results:
                results.write(json.dumps(line) + "\n")
            logging.info("%s: %s", case.name, line)
    return {"num_cases": len(certify.cases)} if context.is_lead else None


def run_case(
    context: WorkerContext, config: Config, case: CertifyCase, reference: Reference, is_reference: bool
) -> dict[str, Any]:
    """Run one case in this process: record its numbers if it `is_reference`, else compare it with `reference`. Returns
    its row of the table on rank 0, an empty one elsewhere. Collective over all ranks.
    """
    parallel = config.parallel
    spec = read_model_spec(config.model.path)
    layout = resolve_layout(config, spec)
    if config.certify.equal_padding:
        layout = _padded_alike(config.precision, config.moe, layout)
    groups = create_groups(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        seed=config.run.seed,
    )
    if is_reference:  # its own routers choose
        config = _with_routing(config, "none")
    elif _follows_reference(config.precision, config.moe, spec):
        config = _with_routing(config, "R3")
    try:
        # Measure passes and gradients of whole batches, even if the run corrects the mismatch.
        uncorrected = {"mismatch": config.mismatch.model_copy(update={"correction": "none"})}
        engine = PolicyEngine(
            config.model_copy(update=uncorrected), spec, groups, num_optimizer_steps=2 * config.certify.num_steps
        )
        critic = build_critic(config, spec, groups)
        carried = None
        if case.continued_from is None:
            _load(engine, config)
        else:
            source = stopped_folder(context.run_dir, case.continued_from)
            carried = continue_run(source, engine, critic)
        draws = None if is_reference else reference.draws()
        batch = recorded_batch(config, spec.vocab_size, draws)
        measurement = Measurement(engine, config, layout, batch, case.packing, load_teachers(config, groups))
        of_critic = None if critic is None else CriticMeasurement(critic, config, measurement)
        if of_critic is not None:
            of_critic.begins = carried is None
        if is_reference:
            result = _record(measurement, of_critic, reference, case)
        else:
            stopped = stopped_folder(context.run_dir, case.name) if case.stops else None
            result = _compare(measurement, of_critic, reference, case, stopped, carried)
        return result if context.is_lead else {}
    finally:
        destroy_groups()


def _load(engine: PolicyEngine, config: Config) -> None:
    import_huggingface(config.model.path, engine.spec, engine.groups, engine.chunks)
    init_adapters(engine)
    engine.after_weights_loaded()


@torch.no_grad()
def round_weights(engine: PolicyEngine) -> None:
    """Move every parameter element to the next number of its dtype, randomly up or down. On one rank, before a step;
    the optimizer's fp32 copies of the parameters are updated as well.
    """
    for index, parameter in enumerate(parameter for chunk in engine.chunks for parameter in chunk.parameters()):
        coin = torch.randint(0, 2, parameter.shape, generator=torch.Generator().manual_seed(index), dtype=torch.int8)
        ends = torch.where(coin.to(parameter.device) > 0, math.inf, -math.inf).to(parameter.dtype)
        parameter.copy_(torch.nextafter(parameter, ends))
    engine.after_weights_loaded()


def _follows_reference(precision: Precision, moe: Moe, spec: ModelSpec) -> bool:
    """Return whether a case replays the reference's experts although its configuration does not ask for it. In FP8 its
    routers would choose other experts for some tokens; and padding, which is routed in its own way in replayed passes,
    affects scales and blocks of tokens.
    """
    return precision == "fp8" and spec.moe is not None and moe.routing_replay == "none"


def _padded_alike(precision: Precision, moe: Moe, layout: Layout) -> Layout:
    """Return the layout with the same padding per sequence as every other layout, if padding affects the numbers: in
    FP8, the scale of a tensor, and with router losses, these losses.
    """
    if precision != "fp8" and not has_router_losses(moe):
        return layout
    sequence, pack = (
        math.lcm(n, _EQUAL_PADDING) for n in (layout.sequence_multiple_tokens, layout.pack_multiple_tokens)
    )
    return replace(layout, sequence_multiple_tokens=sequence, pack_multiple_tokens=pack)


def _with_routing(config: Config, replay: str) -> Config:
    return config.model_copy(update={"moe": config.moe.model_copy(update={"routing_replay": replay})})


def clip_edges(objective: Objective) -> tuple[float, float]:
    """Return the clip range of log s_i, nats; a `clip_low` of 1 or more leaves that side open."""
    return log_lower_edge(objective.clip_low), math.log1p(objective.clip_high)


def _compare(
    measurement: Measurement,
    critic: CriticMeasurement | None,
    reference: Reference,
    case: CertifyCase,
    stopped: RunFolder | None,
    carried: CaseDifference | None,
) -> dict[str, Any]:
    """Return how far this case is from the reference, on rank 0. `stopped`: where to save the run after its steps;
    `carried`: what was read of the run that this case continues. Collective.
    """
    begun = None if carried is None else reference
    reference = reference if begun is None else begun.continued
    config, engine, trajectories = measurement.config, measurement.engine, measurement.batch.trajectories
    settings, comparison = (
        objective_settings(config.algorithm, config.objective),
        CaseComparison(
            reference, clip_edges(config.objective), counts_reached=is_sharp_fp8(config.precision, config.certify)
        ),
    )
    replayed = config.moe.routing_replay == "R3"
    if replayed:
        routes = reference.load("numbers", Numbers).routes
        assert routes is not None  # routing replay without experts was refused
        _set_routes(measurement, routes)
    recorded = np.load(reference.recorded_file)
    set_old_log_probs(measurement.batch, recorded)
    random = RandomStates()
    of_critic = {} if critic is None else compare_critic(critic, reference, begun)
    if case.rounded:
        round_weights(engine)
        reference.save_tensors(_MOVED, PolicyTensors(engine.spec, engine.groups, engine.chunks).stream(torch.float32))
    moved = reference.weights(_MOVED) if case.rounded else None
    with open_folder(config.model.path, engine.spec) as folder:
        start = folder if begun is None else begun.weights("weights")
        # Replayed routes belong to the first weights; after a step the reference chooses again, except in FP8.
        is_first_alone = replayed and config.precision != "fp8" and config.certify.num_steps > 1
        numbers, steps = measurement.run(
            recorded,
            settings,
            1 if is_first_alone else config.certify.num_steps,
            comparison.take_gradient,
            None if is_first_alone else lambda tensors: comparison.take_weights(tensors, start, moved),
        )
    if engine.groups.is_lead:
        comparison.take_steps(steps, config)
    result = comparison.result(
        numbers, [t.trajectory_id for t in trajectories], [t.num_response_tokens for t in trajectories]
    )
    result |= of_critic
    drawn = sorted({name for part in all_gather_json([*random.drawn_since()], engine.groups.host) for name in part})
    if carried is not None:
        if drawn:
            carried.note(carried.value + len(drawn), drawn[0])
        result["carried"] = asdict(carried)
    if stopped is not None:
        stop_run(stopped, engine, None if critic is None else critic.engine, config)
    if case.rounded:
        atomic_write_json(reference.rounding_file(config.precision), result)
        result["outside"] = []
    else:
        rounding: dict[str, Any] | None = read_json((begun or reference).rounding_file(config.precision))
        tolerance = widened(tolerance_of(config, case), rounding, config.certify.rounding_factor)
        result["outside"] = outside(result, tolerance, case.exact)
    if config.certify.edges and begun is None:
        _load(engine, config)
        tie_routers(engine)
        result["edges"] = comparison.flips_on_edges(
            measurement.on_edges(np.load(reference.recorded_on_edges_file), settings)
        )
    return result


def _set_routes(measurement: Measurement, routes: np.ndarray) -> None:
    """Route the batch to the reference's experts (from `gather_routes`), as if the rollout engine had chosen them."""
    routes = np.where(routes < 0, np.arange(routes.shape[2]), routes)  # tokens that nothing depends on go anywhere
    start = 0
    for trajectory in measurement.batch.trajectories:
        end = start + trajectory.num_tokens - 1
        trajectory.routed_experts = routes[start:end].astype(np.int32)
        start = end


def _record(
    measurement: Measurement, critic: CriticMeasurement | None, reference: Reference, case: CertifyCase
) -> dict[str, Any]:
    """Measure the reference, save its numbers, and return what its batch covers. Collective."""
    config, engine = measurement.config, measurement.engine
    settings, is_lead = objective_settings(config.algorithm, config.objective), engine.groups.is_lead
    draws, router_margin = _keep_from_ties(measurement)
    routes = _follow_own_routes(measurement) if _follows_reference(config.precision, config.moe, engine.spec) else None
    if engine.scales.is_active:  # the scales were measured on earlier draws, which no case sees
        engine.scales.forget()
        _load(engine, config)
    batch = measurement.batch
    ends = np.cumsum([t.num_response_tokens for t in batch.trajectories])

    def recorded(on_edges: bool) -> np.ndarray:
        return np.concatenate(
            old_log_probs(batch, np.split(measurement.log_probs(), ends[:-1]), config.objective, config.run, on_edges)
        )

    def measure(into: Reference) -> tuple[Numbers, np.ndarray]:
        """Record the batch at the weights of now, take the steps, and save it all. Returns the numbers, and the
        advantage of each trajectory or the sum over its tokens.
        """
        if is_lead:
            into.folder.mkdir(parents=True, exist_ok=True)
        old = recorded(on_edges=False)
        set_old_log_probs(batch, old)
        advantages = np.array([t.advantage or 0.0 for t in batch.trajectories], np.float64)
        if critic is not None:
            by_token = record_critic(critic, into).advantages
            advantages = np.array([part.sum() for part in np.split(by_token, ends[:-1])])
        numbers, steps = measurement.run(
            old,
            settings,
            config.certify.num_steps,
            lambda tensors: into.save_tensors("gradient", tensors),
            lambda tensors: into.save_tensors("weights", tensors),
        )
        if routes is not None:
            numbers.routes = routes
        if is_lead:
            np.save(into.recorded_file, old)
            into.save("numbers", numbers)
            into.save("steps", steps)
        return numbers, advantages

    if is_lead:
        shutil.rmtree(reference.folder, ignore_errors=True)
        reference.folder.mkdir(parents=True)
        atomic_write_json(reference.draws_file, asdict(draws))
    numbers, advantages = measure(reference)
    if case.stops:  # the reference does not stop: it goes on
        if critic is not None:
            critic.begins = False
        measure(reference.continued)
    description = _describe(numbers, measurement, advantages) | {"router_margin": router_margin}
    if config.certify.edges:
        _load(engine, config)
        tie_routers(engine)
        old = recorded(on_edges=True)
        edges = measurement.on_edges(old, settings)
        if is_lead:
            np.save(reference.recorded_on_edges_file, old)
            reference.save("edges", edges)
    return {"batch": description}


def _keep_from_ties(measurement: Measurement) -> tuple[Draws, float | None]:
    """Draw tokens again until no route is near a tie, so that rounding cannot change one. Returns the draws and the
    smallest gap between the last expert chosen and the first not chosen; None if it is not known: without experts, or
    if the reference has several ranks.
    """
    engine, config = measurement.engine, measurement.config
    draws, margin = Draws.first(config), None
    if engine.spec.moe is None or engine.groups.world.size > 1:
        return draws, margin
    for _ in range(MOST_DRAWS):
        mine = measurement.shard()
        with RouterMargins(engine) as margins:
            engine.old_pass(mine.micro_batches)
        gaps = margins.by_trajectory(measurement.batch, mine.micro_batches)
        margin = float(min(gap.min() for gap in gaps))
        if not redraw(measurement.batch, [gap < ROUTER_MARGIN for gap in gaps], draws):
            break
        measurement.batch = recorded_batch(config, engine.spec.vocab_size, draws)
    return draws, margin


def _follow_own_routes(measurement: Measurement) -> np.ndarray:
    """Make the reference replay from now on the experts that its routers choose now, as its cases do: also after
    optimizer steps, and with the same routing of padding. Returns the routes. Collective.
    """
    engine, mine = measurement.engine, measurement.shard()
    routes = gather_routes(engine, measurement.batch, mine.micro_batches, engine.old_pass(mine.micro_batches).routes)
    assert routes is not None  # the model has experts, and its routers chose
    engine.config = measurement.config = _with_routing(measurement.config, "R3")
    _set_routes(measurement, routes)
    return routes


def _describe(numbers: Numbers, measurement: Measurement, advantages: np.ndarray) -> dict[str, Any]:
    """Return what the recorded batch covers: a certificate on a batch that clips nothing would show little.
    `advantages` [n]: of each trajectory, or the sum over its tokens.
    """
    trajectories = measurement.batch.trajectories
    active = np.array([any(t.response_mask) for t in trajectories])
    edges = np.array(clip_edges(measurement.config.objective))
    return {
        "num_trajectories": len(trajectories),
        "num_tokens": sum(t.num_tokens for t in trajectories),
        "group_sizes": sorted({len(g.trajectories) for g in measurement.batch.groups}),
        "response_lengths": [
            min(t.num_response_tokens for t in trajectories),
            max(t.num_response_tokens for t in trajectories),
        ],
        "num_fully_masked": int((~active).sum()),
        "num_clipped_high": round(numbers.sums["clipped_high_sequences"]),
        "num_clipped_low": round(numbers.sums["clipped_low_sequences"]),
        "num_positive": int((advantages > 0).sum()),
        "num_negative": int((advantages < 0).sum()),
        "clip_margin": float(np.abs(numbers.log_s[active, None] - edges[None]).min()),
        "grad_norms": numbers.grad_norms,
        "num_routes": 0 if numbers.routes is None else int((numbers.routes >= 0).all(axis=2).sum()),
    }
