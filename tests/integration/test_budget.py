"""`gspo-mega mismatch` with a real server and real ranks: weights that differ in one setting give the rows that
transformers computes for them, and injected faults are named.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from budget_faults import OF_BATCH, OF_PACKING, SCENARIOS, perturbed_folder
from forks import forked_ranks, forked_servers
from router_ties import TIE, margins
from run_support import Command, small_overrides

from gspo_mega.config import load_config
from gspo_mega.launcher.local import launch
from gspo_mega.verify.mismatch.attribution import make_row
from gspo_mega.verify.mismatch.causes import ENGINES, PREFIX_CACHE, SAMPLING
from gspo_mega.verify.mismatch.findings import find
from gspo_mega.verify.mismatch.fixed_tokens import FixedTokens
from gspo_mega.verify.mismatch.run import Conduct
from gspo_mega.verify.mismatch.walks import make_plan

CONFIG = "configs/quickstart.yaml"
ONE_RANK = ("cluster.ranks_per_node=1", "parallel.expert=1")


def overrides(quickstart_files, folder, *more):
    return [*small_overrides(quickstart_files, folder, "run"), *ONE_RANK, *more]


@pytest.fixture(scope="module")
def folders():
    """`model`: of the run; `attempt`: of the start, with a folder of each scenario. `found` fills them in."""
    return {}


@pytest.fixture(scope="module")
def found(tmp_path_factory, quickstart_files, folders):
    """What the budget finds in each scenario, from one start of a server and a rank."""
    folder = tmp_path_factory.mktemp("budget_faults")
    given = overrides(
        quickstart_files,
        folder,
        "budget.causes=[server batch, trainer packing]",
        "budget.num_prompts=24",
        "budget.samples_per_prompt=4",
    )
    conduct = Conduct(load_config(CONFIG, given, "budget"), given, print, ())
    conduct.refuse_impossible()
    plan = make_plan(conduct.facts, True, conduct.refused)
    sides = {side: [point for point in plan.points if point.side == side] for side in ("server", "trainer")}
    work = {
        "tokens": None,
        "server": [[point.side, point.settings] for point in sides["server"]],
        # Every point undoes what another one sets.
        "trainer": [
            [[p.side, p.settings], [f"moe.routing_replay={p.keys.get('moe.routing_replay', 'none')}"]]
            for p in sides["trainer"]
        ],
    }
    rank = forked_ranks().command("budget_faults")
    server = forked_servers().command("forked_serve")
    launched = launch(
        conduct.load({}), "budget", lambda line: None, worker_command=rank, serve_command=server, work=work
    )
    assert launched == 0
    attempt = conduct.folder.latest_attempt()
    assert attempt is not None

    folders.update(model=Path(conduct.loaded.config.model.path), attempt=attempt.path)

    def of(scenario):
        there = attempt.path / scenario.__name__
        scored = {point: np.load(there / f"{point.name}.npy") for point in plan.points}
        entropies = np.load(there / f"{plan.trained.name}.entropies.npy")
        return find(conduct.facts, plan, FixedTokens.load(there), scored, entropies)

    return {scenario.__name__: of(scenario) for scenario in SCENARIOS}


def test_the_parts_are_exactly_the_whole(found):
    for name, findings in found.items():
        assert set(findings.parts) == {"forward", "backward"}
        assert findings.residual < 1e-12, name
        for parts in findings.parts.values():
            assert sum(part.share.value for part in parts.values()) == pytest.approx(1.0, abs=1e-6), name


def tie_in(tokens: Path, *models: Path) -> bool:
    """Whether a router had a tie: then two engines of the same weights differ by more than rounding."""
    sequences = FixedTokens.load(tokens).sequences
    return any(margins(model, sequence.token_ids).min() < TIE for model in models for sequence in sequences)


def test_engines_that_agree_have_no_fault_and_a_mismatch_of_rounding(found, folders):
    clean = found["none"]
    assert clean.faults == ()
    by_rounding = clean.total.k3.value < 1e-11 and clean.total.maximum < 1e-4
    assert by_rounding or tie_in(folders["attempt"] / "none", folders["model"])
    assert clean.num_prompts == 24 and clean.num_sequences == 96


def by_transformers(folder, fixed):
    """log-probs of the responses' tokens, [sum R] float64 nats, as transformers computes them in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for sequence in fixed.sequences:
            log_p = model(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
            at = torch.arange(len(sequence.prompt), len(sequence.token_ids))
            found.append(log_p[at - 1, torch.tensor(sequence.response)].numpy())
    return np.concatenate(found)


def test_injected_sizes_are_recovered(found, folders):
    """Two engines of other weights in one setting each: the rows are what another library says of these weights."""
    fixed = FixedTokens.load(folders["attempt"] / "sizes")
    own, batch, packing = (
        by_transformers(folder, fixed)
        for folder in (folders["model"], *(perturbed_folder(folders["model"], size) for size in (OF_BATCH, OF_PACKING)))
    )
    sizes, tokens = found["sizes"], fixed.tokens()

    def other_than(row, expected) -> list:
        """What of the row is not as expected."""
        want = make_row(expected, tokens, sizes.band, sizes.lengths)
        assert want.k3.value > 1e-6 and want.maximum > 1e-2  # far above the rounding of fp32
        pairs = [(row.k3, want.k3), (row.mean, want.mean), (row.band_share, want.band_share)]
        values = [(one.value, pytest.approx(other.value, rel=1e-2, abs=1e-6)) for one, other in pairs]
        values.append((row.maximum, pytest.approx(want.maximum, rel=1e-2)))
        # A response at the edge of the range may change.
        values.append((row.negative.value, pytest.approx(want.negative.value, rel=0, abs=0.02)))
        return [pair for pair in values if pair[0] != pair[1]]

    others = other_than(sizes.total, packing - batch)
    for parts in sizes.parts.values():
        # The server's cause is taken away on the way, the trainer's put back.
        others += other_than(parts["server batch"].row, own - batch)
        others += other_than(parts["trainer packing"].row, packing - own)
        others += [value for value in [parts[ENGINES].row.k3.value] if value >= 1e-11]
    models = [folders["model"], *(perturbed_folder(folders["model"], size) for size in (OF_BATCH, OF_PACKING))]
    assert not others or tie_in(folders["attempt"] / "sizes", *models), others
    # And such sizes are no rounding of fp32.
    assert {fault.cause for fault in sizes.faults} == {"server batch", "trainer packing"}
    assert {fault.kind for fault in sizes.faults} == {"size"}


@pytest.mark.parametrize(
    ("scenario", "kind", "cause", "words"),
    [
        ("temperature", "temperature", SAMPLING, "a temperature of about 1.2"),
        ("cache", "cache", PREFIX_CACHE, "stale"),
        ("weights", "weights", ENGINES, "other weights"),
        ("prompt", "prompt", ENGINES, "up to token 3 of a sequence"),
    ],
)
def test_an_injected_fault_is_found_and_named(found, scenario, kind, cause, words):
    faults = found[scenario].faults
    assert [(fault.kind, fault.cause) for fault in faults if fault.cause == cause] == [(kind, cause)], faults
    assert words in next(fault.text for fault in faults if fault.cause == cause)


def test_the_command(tmp_path, quickstart_files):
    given = overrides(quickstart_files, tmp_path, "budget.num_prompts=8", "budget.causes=[trainer packing]")
    file = tmp_path / "budget.json"
    config = Path(__file__).parents[2] / CONFIG
    command = Command(tmp_path, "mismatch", str(config), "--quick", "--json", str(file), *given, forked=True)
    try:
        assert command.finish() == 0, command.out + command.err
    finally:
        assert command.end() == []
    assert "the clip range can bear that" in command.out
    assert "not changed here, so in the rows beside it:\n  server batch: left out by budget.causes" in command.out
    values = json.loads(file.read_text())
    assert list(values["parts"]) == ["forward"]
    assert list(values["parts"]["forward"]) == [SAMPLING, PREFIX_CACHE, ENGINES, "trainer packing"]
    assert values["faults"] == []
    assert values["made"]["seconds"] > 1 and values["made"]["overrides"] == given
    # The random model is never right: no response has another one to be compared with.
    assert "no prompt has two responses with different rewards" in values["unsigned"]
    (tokens,) = {file.parent for file in tmp_path.rglob("tokens.json")}
    assert values["total"]["k3"]["value"] < 1e-11 or tie_in(tokens, quickstart_files / "model")
