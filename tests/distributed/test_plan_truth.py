"""What the plan says a rank holds is what the engine holds, to the element and the byte, on every layout of the
matrices.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from family_models import make_family_folder
from layout_jobs import layout_config
from layout_models import make_folder

from gspo_mega.config import load_config
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import resolve_layout
from gspo_mega.plan.activations import head_activations, layer_activations
from gspo_mega.plan.state import ModelShares, state_bytes
from gspo_mega.verify.certify.cases import case_config

CONFIGS = Path(__file__).parents[2] / "configs"
# What does not change the state: one of each would be enough, and each costs ranks' time.
SAME_STATE = ("recompute.", "batch.", "moe.", "rollout.", "engine.", "parallel.expert_dispatcher")


def cases():
    """(name, number of ranks, configuration) of every layout in the matrices, each state once."""
    seen = set()
    for kind, shape in (("dense", "dense"), ("moe", "moe"), ("mla", "mla"), ("delta", "qwen3_next"), ("lora", "moe")):
        file = CONFIGS / f"certify_{kind}.yaml"
        certify = load_config(file, (), "certify").config.certify
        for case in certify.cases:
            state = (
                kind,
                case.ranks,
                str(sorted((k, str(v)) for k, v in case.set.items() if not k.startswith(SAME_STATE))),
            )
            if case.refused or state in seen:
                continue
            seen.add(state)
            model = CONFIGS.parent / case.set.get("model.path", f"configs/models/certify_{shape}.json")
            config = case_config(file, case, [f"model.path={model}"]).config
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
            yield f"{kind} {case.name}", case.ranks, config


def test_parameters_gradients_and_optimizer_state_are_those_of_the_engine(rank_pools):
    """Elements exact, bytes exact, padding its own number."""
    by_ranks = defaultdict(list)
    for name, ranks, config in cases():
        by_ranks[ranks].append((name, config))
        if (
            config.optimizer.distributed
        ):  # and in bf16, where main parameters are copies, with the reference of a KL term
            kl = config.kl.model_copy(update={"coefficient": 0.05})
            plain = config.engine.model_copy(update={"transformer_engine": False})  # gated delta nets have no others
            in_bf16 = config.model_copy(update={"precision": "bf16", "kl": kl, "engine": plain})
            by_ranks[ranks].append((f"{name} bf16", in_bf16))
            if ranks == 2:
                optimizer = config.optimizer.model_copy(update={"gradients_dtype": "bf16"})
                bf16 = in_bf16.model_copy(update={"optimizer": optimizer})
                by_ranks[ranks].append((f"{name} gradients in bf16", bf16))
    assert sum(map(len, by_ranks.values())) > 50
    padded = referred = 0
    for ranks, group in sorted(by_ranks.items()):
        found = rank_pools(ranks).run(
            "plan_jobs:count_state", cases=[{"config": config.model_dump_json()} for _, config in group]
        )
        for index, (name, config) in enumerate(group):
            layout = resolve_layout(config, spec := read_model_spec(config.model.path))
            shares = ModelShares(spec)
            for rank in range(ranks):
                stage = shares.state(config, layout, layout.coordinates(rank).pipeline)
                state, real = stage.of_rank(rank), found[rank][index]
                size = state_bytes(config, state)
                per_gradient = {"fp32": 4, "bf16": 2}[config.optimizer.gradients_dtype]
                padded += state.padding > 0
                referred += size.reference > 0
                assert (
                    dict(
                        parameters=state.parameters,
                        gradients=state.gradients,
                        optimized=state.optimized,
                        weight_bytes=size.weights + size.padding - state.padding * per_gradient,
                        gradient_bytes=state.gradients * per_gradient,
                        main_bytes=size.main,
                        moment_bytes=size.moments,
                        reference_bytes=size.reference,
                    )
                    == real
                ), f"{name}, rank {rank}"
                assert stage.largest.optimized >= state.optimized
    assert padded > 0 and referred > 0  # else their arithmetic was not tried


def test_a_critics_state_is_that_of_its_engine(rank_pools):
    """Without a head, with a row in its place, and embeddings tied to nothing: elements and bytes."""
    layouts = {"DP2 distributed optimizer", "TP2+SP", "PP2 tied", "EP2"}
    chosen = [(name, ranks, config) for name, ranks, config in cases() if name.partition(" ")[2] in layouts]
    assert {ranks for _, ranks, _ in chosen} == {2} and len(chosen) >= len(layouts)
    settings = []
    for name, _, config in chosen:
        optimizer = config.optimizer.model_copy(update={"distributed": True})
        settings.append((name, config.model_copy(update={"optimizer": optimizer, "precision": "bf16", "lora": None})))
    found = rank_pools(2).run(
        "plan_jobs:count_critic", cases=[{"config": config.model_dump_json()} for _, config in settings]
    )
    for index, (name, config) in enumerate(settings):
        layout = resolve_layout(config, spec := read_model_spec(config.model.path))
        for rank in range(2):
            state = ModelShares(spec).critic.state(config, layout, layout.coordinates(rank).pipeline).of_rank(rank)
            size, real = state_bytes(config, state, is_critic=True), found[rank][index]
            assert (
                dict(
                    parameters=state.parameters,
                    gradients=state.gradients,
                    optimized=state.optimized,
                    weight_bytes=size.weights + size.padding - state.padding * 4,
                    gradient_bytes=state.gradients * 4,
                    main_bytes=size.main,
                    moment_bytes=size.moments,
                    reference_bytes=0,
                )
                == real
            ), f"{name}, rank {rank}"


SAVED = [
    ("dense", "fp32", {}, 1),
    ("dense", "bf16", {}, 1),
    ("moe", "fp32", {}, 1),
    ("moe", "bf16", {}, 1),
    ("dense", "bf16", dict(tensor=2), 2),
    ("dense", "fp32", dict(tensor=2, sequence=False), 2),
    ("dense", "fp32", dict(tensor=4), 4),  # two ranks a key-value head
    ("dense", "bf16", dict(tensor=4), 4),
    ("moe", "bf16", dict(tensor=2, expert=2), 2),
    ("moe", "fp32", dict(expert=2), 2),
    ("qwen2_moe", "fp32", {}, 1),
    ("glm4_moe", "fp32", {}, 1),
    ("gpt_oss", "fp32", {}, 1),
]
FUSED = [("dense", "fp32", {}, 1), ("moe", "bf16", {}, 1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {kind: str(make_folder(root / kind, moe=kind == "moe")) for kind in ("dense", "moe")}
    return made | {kind: str(make_family_folder(root / kind, kind)) for kind in ("qwen2_moe", "glm4_moe", "gpt_oss")}


@pytest.mark.parametrize(
    ("kind", "precision", "parallel", "ranks", "fused"),
    [*((*case, False) for case in SAVED), *((*case, True) for case in FUSED)],
)
def test_what_a_layer_saves_for_its_backward_pass(rank_pools, folders, kind, precision, parallel, ranks, fused):
    """Within 10 %, each half of a layer; experts are loaded as they are, so the mean over their ranks is compared."""
    parallel = {"expert_tensor": 1, **parallel}
    found = rank_pools(ranks).run(
        "plan_jobs:saved_bytes",
        folder=folders[kind],
        parallel=parallel,
        precision=precision,
        num_tokens=48,
        num_sequences=4,
        engine=dict(fuse_activation=fused),
    )
    config = layout_config(folders[kind], parallel, precision=precision, engine=dict(fuse_activation=fused))
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"ranks_per_node": ranks})})
    spec = read_model_spec(folders[kind])
    terms = layer_activations(config, spec, resolve_layout(config, spec), "cpu")
    for half in ("attention", "mlp"):
        mean = sum(result[half] for result in found) / ranks
        assert mean == pytest.approx(getattr(terms, half), rel=0.1), half


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("blocks_of", [1, 2])
def test_full_recomputation_keeps_the_input_of_each_block(rank_pools, folders, blocks_of, kind):
    """Outside its layers, that is all that a recomputed model saves, with the final norm and the head's rows."""
    recompute = dict(granularity="full", num_layers=blocks_of)
    found = rank_pools(1).run(
        "plan_jobs:saved_bytes",
        folder=folders[kind],
        parallel={},
        precision="bf16",
        num_tokens=48,
        num_sequences=4,
        recompute=recompute,
    )[0]
    config = layout_config(folders[kind], {}, precision="bf16", recompute=recompute)
    layout = resolve_layout(config, spec := read_model_spec(folders[kind]))
    terms, head = layer_activations(config, spec, layout, "cpu"), head_activations(config, spec, layout)
    inputs = spec.num_layers // blocks_of * terms.layer_input
    assert found["outside"] == pytest.approx(inputs + head.token + 47 / 48 * head.row, rel=0.1)
    assert inputs > 0.25 * found["outside"]
