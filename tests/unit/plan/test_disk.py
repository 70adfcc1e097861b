"""The plan's bytes against a journal that was really written, and its verdict against the free space."""

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt, route_type
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.base.sampling_masks import SamplingMasks
from gspo_mega.cli.main import main
from gspo_mega.data.held_out_responses import MOST_KEPT_PROMPTS, write_responses_of
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import token_gaps_file, write_token_gaps
from gspo_mega.metrics.catalogue import CATALOGUE
from gspo_mega.metrics.sink_loading import TensorBoardSink
from gspo_mega.metrics.sinks import SinkMaker, Sinks
from gspo_mega.metrics.writer import MetricsWriter
from gspo_mega.models.huggingface import read_model_spec
from gspo_mega.plan import disk
from gspo_mega.plan.disk import HELD_OUT_RESPONSE_BYTES, METRICS_BYTES_PER_STEP, disk_use, journal_bytes
from gspo_mega.plan.sampling_masks import mask_cost, mask_lines
from gspo_mega.train.held_out import kept_responses

# Text is of about four characters a token, never exactly: what the estimate may be off from a journal of the longest
# lengths.
TOLERANCE = 0.05


def write_step(folder, config, spec, characters=4):
    """A step whose prompts and responses are all of their longest lengths."""
    num_prompt, num_response = config.data.max_prompt_tokens, config.rollout.max_new_tokens
    routes = masks = None
    if config.rollout.top_k > 1:
        step = spec.vocab_size // config.rollout.top_k
        masks = SamplingMasks.of([range(step, step * (config.rollout.top_k + 1), step)] * num_response)
    if config.rollout.return_routed_experts:
        routes = np.zeros((num_prompt + num_response - 1, spec.num_layers, spec.moe.experts_per_token), np.uint8)
    groups = []
    for number in range(config.batch.prompts_per_step):
        prompt = Prompt(
            f"train:{number}",
            "train",
            (40_000,) * num_prompt,
            "x" * num_prompt * characters,
            answer="123",
            metadata={"level": 3},
        )
        rows = []
        for sample in range(config.batch.group_size):
            rows.append(
                one_turn_row(
                    f"step000007-g{number:05d}-s{sample:03d}",
                    number,
                    prompt,
                    [40_000] * num_response,
                    [1] * num_response,
                    [-0.123456789] * num_response,
                    [7] * num_response,
                    "stop",
                    "x" * num_response * characters,
                    reward=1.0,
                    reward_parts={"gsm8k": 1.0},
                    routed_experts=routes,
                    sampling_masks=masks,
                )
            )
        groups.append(Group.from_rows(number, prompt, rows))
        for episode in groups[-1].episodes:
            episode.nodes[1].server_id = "server-0"
    journal = Journal(folder)
    with journal.begin(
        7, 7, config.batch.group_size, {}, {"rewards": "r" * 32, "sampling": "s" * 32, "weights": "w" * 32}
    ) as writer:
        for group in groups:
            for episode in group.episodes:
                writer.add(episode)
        writer.finish(RolloutBatch(7, groups, {"num_trajectories": 32.0}), {"seed": 1})
    if config.diagnostics.token_mismatch:
        write_token_gaps(folder, RolloutBatch(7, groups), [])
    return journal


@pytest.mark.parametrize("lengths", [(16, 32), (200, 1000), (1, 1), (500, 4)])
@pytest.mark.parametrize("routes", [False, True])
def test_the_estimate_is_what_the_journal_takes(load, shape, tmp_path, lengths, routes):
    config = load(
        f"data.max_prompt_tokens={lengths[0]}",
        f"rollout.max_new_tokens={lengths[1]}",
        f"rollout.return_routed_experts={str(routes).lower()}",
    ).config
    spec = read_model_spec(shape("moe"))
    journal = write_step(tmp_path / "journal", config, spec)
    own, of_routes = journal_bytes(config, spec)
    assert journal.file(7).stat().st_size == pytest.approx(own + of_routes, rel=TOLERANCE)
    if routes:
        journal.prune_routes(8)
        assert journal.file(7).stat().st_size == pytest.approx(own, rel=TOLERANCE)


@pytest.mark.parametrize(("top_k", "vocab_size"), [(20, 151936), (200, 151936), (4000, 32000), (2, 32000)])
def test_sampling_masks_take_at_most_what_is_said(load, shape, tmp_path, top_k, vocab_size):
    lengths = ("data.max_prompt_tokens=16", "rollout.max_new_tokens=100")
    config, spec = load(*lengths, f"rollout.top_k={top_k}").config, read_model_spec(shape("moe", vocab_size=vocab_size))
    journal = write_step(tmp_path / "journal", config, spec)
    with_masks = journal.file(7).stat().st_size
    journal.prune_routes(8)
    took, cost = with_masks - journal.file(7).stat().st_size, mask_cost(config, spec)
    assert took <= cost.held * 1.02 and cost.held <= 1.6 * took
    trained = load(*lengths, f"rollout.top_k={top_k}", "train.num_steps=3").config
    assert disk_use(trained, spec, 1, 1).masks_step == cost.held
    digits = len(str(vocab_size)) + 1
    assert cost.http == 100 * config.batch.prompts_per_step * config.batch.group_size * top_k * digits
    assert mask_cost(load(*lengths).config, spec) is None and mask_lines(None) == []
    assert "over HTTP" in mask_lines(cost)[0]


def test_the_mismatch_of_tokens_is_counted(load, shape, tmp_path):
    lengths, spec = ("data.max_prompt_tokens=16", "rollout.max_new_tokens=200"), read_model_spec(shape("moe"))
    without, config = load(*lengths).config, load(*lengths, "diagnostics.token_mismatch=true").config
    write_step(tmp_path / "journal", config, spec)
    more = journal_bytes(config, spec)[0] - journal_bytes(without, spec)[0]
    assert token_gaps_file(tmp_path / "journal", 7).stat().st_size == pytest.approx(more, rel=TOLERANCE)


def use(load, shape, tmp_path, *overrides, kind="moe"):
    config = load("train.num_steps=100", f"run.dir={tmp_path}", "checkpoint.every_steps=10", *overrides).config
    return disk_use(config, read_model_spec(shape(kind)), 1_000_000, 16_000_000)


def test_what_is_kept_is_counted(load, shape, tmp_path):
    base = use(load, shape, tmp_path)
    assert base.parts["journal"] == 100 * base.journal_step
    assert base.parts["checkpoints"] == 3 * 16_000_000, "two are kept, one is being written"
    assert base.parts["exports"] == 2_000_000 and base.parts["published weights"] == 3 * 2_000_000
    assert use(load, shape, tmp_path, "journal.keep_last=7").parts["journal"] == 7 * base.journal_step
    assert use(load, shape, tmp_path, "checkpoint.keep_every=20").parts["checkpoints"] == 8 * 16_000_000
    assert use(load, shape, tmp_path, "checkpoint.export_every_steps=25").parts["exports"] == 5 * 2_000_000
    assert "published weights" not in use(load, shape, tmp_path, "publish.method=distributed").parts
    assert use(load, shape, tmp_path, "train.rollouts_only=true").parts.keys() == {"journal", "metrics"}
    routes = use(load, shape, tmp_path, "rollout.return_routed_experts=true")
    assert routes.parts["journal"] == 100 * (routes.journal_step + routes.routes_step)
    pruned = use(load, shape, tmp_path, "rollout.return_routed_experts=true", "journal.prune_routes=true")
    assert pruned.parts["journal"] == 100 * routes.journal_step + 10 * routes.routes_step
    ahead = ("rollout.max_staleness=2", "rollout.return_routed_experts=true", "journal.prune_routes=true")
    found = use(load, shape, tmp_path, *ahead).parts["journal"]
    assert found == 100 * routes.journal_step + 12 * routes.routes_step, "groups of two steps before wait for theirs"
    assert use(load, shape, tmp_path, ahead[0], "journal.keep_last=7").parts["journal"] == 9 * base.journal_step


def test_the_figures_that_were_derived_by_hand(load, shape):
    """8192 trajectories of 4000 tokens: 0.52 GB of numbers, besides text; routed experts as many as layers and
    choices.
    """
    config = load(
        "batch={prompts_per_step: 1024, group_size: 8, micro_batch_tokens: 8192}",
        "rollout.max_new_tokens=4000",
        "rollout.return_routed_experts=true",
    ).config
    for num_experts, size in ((256, 1), (264, 2)):
        spec = read_model_spec(shape("moe", num_hidden_layers=48, num_experts_per_tok=8, num_experts=num_experts))
        own, routes = journal_bytes(config, spec)
        assert own == pytest.approx(0.524e9 + 4 * 8192 * 4000, rel=0.02)
        assert routes == 8192 * (4015 * 48 * 8 * size + 38)
        assert np.dtype(route_type(num_experts)).itemsize == size


def test_plan_shows_it_and_warns_when_it_does_not_fit(load, shape, tmp_path, monkeypatch, capsys):
    config = tmp_path / "c.yaml"
    load()
    arguments = [
        "plan",
        str(config),
        f"run.dir={tmp_path}",
        "train.num_steps=1000",
        "--model",
        str(shape("dense")),
        "--device",
        "cpu",
    ]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert (
        "disk     rollouts per step: at most" in shown
        and f"are free under {tmp_path}" in shown
        and "disk: the run may take" not in shown
    )

    monkeypatch.setattr(
        disk.shutil, "disk_usage", lambda path: disk.shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)
    )
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "notice" in shown
        and "disk: the run may take" in shown
        and "most of it journal" in shown
        and "journal.keep_last keeps fewer steps, or choose another run.dir" in shown
    )
    assert main([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (
        value["disk"]["fits"] is False
        and value["disk"]["free_bytes"] == 10**6
        and any("disk: the run" in notice for notice in value["notices"])
    )

    # What is there of this run already counts as had.
    (tmp_path / "test" / "journal").mkdir(parents=True)
    with (tmp_path / "test" / "journal" / "step_00000000").open("wb") as file:
        file.truncate(value["disk"]["run_bytes"]["journal"] * 2)
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["disk"]["fits"] is True


def test_a_command_that_trains_nothing_has_no_such_lines(load, shape):
    assert disk_use(load().config, read_model_spec(shape("dense")), 1, 1) is None


def test_held_out_responses_take_at_most_what_is_said(load, shape, tmp_path):
    def bytes_of(settings):
        return use(load, shape, tmp_path, f"eval={{{settings}}}").parts["held-out responses"]

    assert bytes_of("path: h.jsonl, num_prompts: 5") == 2 * 5 * HELD_OUT_RESPONSE_BYTES
    assert bytes_of("path: h.jsonl, every_steps: 25") == 5 * MOST_KEPT_PROMPTS * HELD_OUT_RESPONSE_BYTES
    both = "{name: a, path: a.jsonl}, {name: b, path: b.jsonl, every_steps: 40}"
    assert bytes_of(f"sets: [{both}]") == (2 + 4) * MOST_KEPT_PROMPTS * HELD_OUT_RESPONSE_BYTES
    text = "x" * 50_000
    prompt = Prompt("held:7", "held", (1,), text, answer=text)
    row = one_turn_row("step000000-g00000-s000", 0, prompt, [1], [1], [0.0], [0], "stop", response_text=text)
    row.reward, row.correct = 1.0, True
    asked = SimpleNamespace(name="held_out", correct_threshold=None, place="eval")
    rows = kept_responses(cast(Any, asked), [Group.from_rows(0, prompt, [row])])
    write_responses_of(RunFolder(tmp_path), 0, rows)
    took = (tmp_path / "evaluations/step_00000000.jsonl").stat().st_size
    assert 0.95 * HELD_OUT_RESPONSE_BYTES < took <= HELD_OUT_RESPONSE_BYTES


def test_the_metrics_of_a_step_take_what_is_said(tmp_path):
    """All names of the catalogue at once, which no run has, against the bytes that a step is counted with."""
    names = [name for name in CATALOGUE if "<" not in name]
    with MetricsWriter(tmp_path, Sinks(RunFolder(tmp_path), [SinkMaker("tensorboard", TensorBoardSink)])) as writer:
        sizes = []
        for step in range(12):
            writer.write(step, dict.fromkeys(names, 1.0 / (step + 3)))
            sizes.append(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()))
    a_step = (sizes[-1] - sizes[1]) / 10
    assert a_step / 2 < METRICS_BYTES_PER_STEP < 4 * a_step
