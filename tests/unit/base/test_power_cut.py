"""A machine that loses power at any moment leaves the old file, folder or record, or the new one: never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from power_cut import Disk

from gspo_mega.base import atomic_io
from gspo_mega.base.episodes import Episode, Group, Node, RolloutBatch
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.checkpoint import folders
from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.hf_export import copy_description
from gspo_mega.checkpoint.tensor_sources import open_checkpoint, write_safetensors
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import TokenGaps, write_token_gaps
from gspo_mega.metrics.writer import MetricsWriter, read_metrics
from gspo_mega.rollout.registration import Registration, read_registrations
from gspo_mega.verify.certify.program import make_random_folder

SHAPE = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=64, hidden_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64, max_position_embeddings=256,
    rope_theta=1e4, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False, attention_bias=False,
    eos_token_id=2, dtype="float32",
)  # fmt: skip


@pytest.fixture(params=[False, True], ids=["shorter", "zeros"])
def disk(request, tmp_path, monkeypatch):
    """`zeros`: a file keeps its length, with zeros for what was not flushed."""
    (tmp_path / "run").mkdir()
    made = Disk(tmp_path / "run", monkeypatch, request.param)
    yield made
    made.close()


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def visible(folder: Path) -> dict[str, str]:
    """What a reader looks at: temporary files have a name that begins with a dot."""
    return {name: text for name, text in contents(folder).items() if not name.startswith(".")}


def test_the_model_itself_loses_what_is_not_flushed(disk, request):
    (disk.root / "file").write_text("new")
    flushed, named = disk.leavings()
    keeps_lengths = "zeros" in request.node.callspec.id
    assert contents(flushed) == {} and contents(named) == {"file": "\0\0\0" if keeps_lengths else ""}
    atomic_io.sync(disk.root / "file")
    flushed, named = disk.leavings()
    assert contents(flushed) == {} and contents(named) == {"file": "new"}
    atomic_io.sync(disk.root)
    (disk.root / "file").write_text("newer")
    os.rename(disk.root / "file", disk.root / "other")
    flushed, named = disk.leavings()
    assert contents(flushed) == {"file": "new"} and contents(named) == {"other": "new\0\0" if keeps_lengths else "new"}


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_that_is_written_whole(disk, before):
    if before is not None:
        (disk.root / "latest").write_text(before)
        disk.settle()
    old, new = ({} if before is None else {"latest": before}), {"latest": "new"}
    seen = []
    with disk.cut_at_every_operation(lambda left: seen.append(visible(left))):
        atomic_io.atomic_write_text(disk.root / "latest", "new", at="save.latest")
    assert all(one in (old, new) for one in seen) and seen[0] == old
    assert seen[-2:] == [new, new], "it is there when the call has returned"
    assert len(seen) == 10


def test_small_files_without_a_kill_point_too(disk):
    atomic_io.atomic_write_json(disk.root / "state.json", {"state": 1})
    assert [contents(left) for left in disk.leavings()] == [{"state.json": '{"state": 1}\n'}] * 2
    atomic_io.write_whole(disk.root / "state.json", b"2")
    assert [contents(left) for left in disk.leavings()] == [{"state.json": "2"}] * 2


def test_a_renamed_file_and_a_copy(disk):
    (disk.root / "from").write_text("text")
    disk.settle()
    (disk.root / "inner").mkdir()
    disk.settle()
    atomic_io.rename(disk.root / "from", disk.root / "inner" / "to", at="journal.aside")
    assert [contents(left).get("inner/to") for left in disk.leavings()] == ["text", "text"]
    atomic_io.copy_file(disk.root / "inner" / "to", disk.root / "copy", at="publish.copy")
    atomic_io.sync(disk.root)  # the copier's caller, which makes many of them in one folder
    assert [contents(left).get("copy") for left in disk.leavings()] == ["text", "text"]


def write_draft(run: RunFolder, step: int, mark: str) -> Path:
    """A checkpoint's files as libraries write them: nothing of it is flushed."""
    draft = folders.draft_folder(run.checkpoint_dir(step), "a1")
    (draft / "model" / "inner").mkdir(parents=True)
    (draft / "rng_00000").write_text(mark)
    (draft / "model" / "__0_0.distcp").write_text(mark * 3)
    (draft / "model" / "inner" / "part").write_text(mark * 4)
    (draft / "state.json").write_text(f'{{"format_version": {folders.FORMAT_VERSION}}}')
    return draft


def test_a_checkpoint_is_complete_under_its_name_at_every_moment(disk):
    """First a step with a checkpoint before it, then the same step once more."""
    run = RunFolder(disk.root)
    run.checkpoints_dir.mkdir()
    disk.settle()

    def save(step: int, mark: str) -> None:
        draft = write_draft(run, step, mark)
        atomic_io.sync_tree(draft, at="save.sync")
        folders.commit_draft(run, draft, run.checkpoint_dir(step))

    def marks(left: Path) -> set[str]:
        """Of the checkpoint that a restart would take."""
        there = RunFolder(left)
        folders.restore_moved_aside(there)
        chosen = folders.candidates(there)[0]
        files = contents(chosen)
        assert len(files) == 4, "it is whole"
        mark = files["rng_00000"]
        assert files["model/__0_0.distcp"] == mark * 3 and files["model/inner/part"] == mark * 4
        folders.read_record(chosen)
        return {mark}

    save(1, "a")
    assert [marks(left) for left in disk.leavings()] == [{"a"}, {"a"}]
    for step, before, after in ((2, "a", "b"), (2, "b", "c")):
        seen: list[set[str]] = []
        with disk.cut_at_every_operation(lambda left: seen.append(marks(left))):
            save(step, after)
        assert seen[0] == {before} and seen[-2:] == [{after}] * 2 and set().union(*seen) == {before, after}


def episode_of(sample: int) -> Episode:
    prompt = Prompt("p:0", "p", (1, 2), "text")
    nodes = [
        Node(0, -1, "context", [{"role": "user", "content": "text"}], (1, 2)),
        Node(1, 0, "sampled", [{"role": "assistant", "content": "x"}], (5, 6), [-0.5, -0.25], [0, 0]),
    ]
    nodes[1].finish_reason, nodes[1].text = "stop", "x"
    return Episode(f"step000000-g00000-s{sample:03d}", 0, prompt, nodes, reward=float(sample))


def test_a_step_of_the_journal(disk):
    """Every moment leaves a readable record or none, and once the step is settled all of it is there."""
    journal, episodes = Journal(disk.root / "journal"), [episode_of(0), episode_of(1)]
    batch = RolloutBatch(0, [Group(0, episodes[0].prompt, episodes)])

    def rewards(left: Path) -> list[float]:
        there = Journal(left / "journal")
        record = there.read(0) if 0 in there.steps() else None
        return (
            [] if record is None else [one.reward or 0.0 for group in record.groups.values() for one in group.episodes]
        )

    seen: list[list[float]] = []
    note = disk.cut_at_every_operation(lambda left: seen.append(rewards(left)))
    with note, journal.begin(0, 0, 2, {}) as writer:
        for episode in episodes:
            writer.add(episode)
        writer.finish(batch, {})
        writer.settle()
    assert seen[0] == [] and seen[-2:] == [[0.0, 1.0]] * 2
    for left in disk.leavings():
        record = Journal(left / "journal").read(0)
        assert record is not None and record.batch is not None and record.num_torn_bytes == 0

    # What a step takes over is on disk before the first new episode.
    with journal.begin(0, 0, 2, {0: Group(0, episodes[0].prompt, episodes[:1])}):
        assert [rewards(left) for left in disk.leavings()] == [[0.0]] * 2
    aside = journal.put_aside(0)
    for left in disk.leavings():
        assert [path.name for path in (left / "journal").iterdir()] == [aside.name]


def test_what_a_long_step_has_so_far_reaches_the_disk_before_its_end(disk, monkeypatch):
    monkeypatch.setattr("gspo_mega.data.journal.steps.SYNC_SECONDS", -1.0)
    with Journal(disk.root / "journal").begin(0, 0, 2, {}) as writer:
        writer.add(episode_of(0))
        for left in disk.leavings():
            record = Journal(left / "journal").read(0)
            assert record is not None and [len(group.episodes) for group in record.groups.values()] == [1]


def test_the_gaps_of_a_steps_tokens(disk):
    episodes = [episode_of(0)]
    write_token_gaps(disk.root, RolloutBatch(0, [Group(0, episodes[0].prompt, episodes)]), [])
    for left in disk.leavings():
        assert list(TokenGaps(left, 0).of(episodes[0])) == [1]


def test_a_servers_registration(disk):
    seen = []

    def state(left: Path) -> str | None:
        found = read_registrations(left)
        return found[0].state if found else None

    for now in ("starting", "ready"):
        Registration("server-0", "http://a", 1, now, 1, 0, 0.0).write(disk.root)
        seen.append([state(left) for left in disk.leavings()])
    assert seen == [["starting"] * 2, ["ready"] * 2]


def test_a_line_of_metrics_is_on_disk_when_it_is_written(disk):
    with MetricsWriter(disk.root) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": 0.5})
            for left in disk.leavings():
                assert [line["step"] for line in read_metrics(left / "metrics.jsonl")] == list(range(1, step + 1))
    with MetricsWriter(disk.root) as writer:
        writer.resume_from(2)
        for left in disk.leavings():
            steps = [line["step"] for line in read_metrics(left / "metrics.jsonl")]
            assert steps in ([1, 2], [1, 2, 3]), "it is never empty"
            aside = RunFolder(left).superseded_metrics_file
            assert steps[-1] == 3 or [line["step"] for line in read_metrics(aside)] == [3], "no line is lost"
        writer.write(3, {"reward/mean": 0.25})
        for left in disk.leavings():
            assert [line["reward/mean"] for line in read_metrics(left / "metrics.jsonl")] == [0.5, 0.5, 0.25]


def test_a_file_of_weights_and_a_models_description(disk, tmp_path):
    source, target = tmp_path / "source", disk.root / "target"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text('{"dtype": "float32"}')
    (source / "tokenizer.json").write_text("{}")
    disk.settle()
    write_safetensors(target / "x.safetensors", {"w": (torch.float32, (2,))}, iter([torch.tensor([1.0, 2.0])]))
    copy_description(source, target, "bfloat16")
    atomic_io.sync(target)
    for left in disk.leavings():
        assert (left / "target" / "config.json").read_text() == '{"dtype": "bfloat16"}\n'
        assert (left / "target" / "tokenizer.json").read_text() == "{}"
        assert (left / "target" / "x.safetensors").read_bytes() == (target / "x.safetensors").read_bytes()


@pytest.mark.parametrize("convert", [to_megatron, to_huggingface])
def test_a_converted_checkpoint(disk, tmp_path, convert):
    """Under its name it is whole, with every file of every library."""
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(SHAPE))
    model = make_random_folder(shape, tmp_path / "model", seed=0)
    seen: list[dict[str, bytes]] = []

    def look(left: Path) -> None:
        out = left / "out"
        seen.append({str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()})

    replace = os.rename

    def renamed(source, target) -> None:
        replace(source, target)
        disk.look(look)

    disk.patch.setattr(os, "rename", renamed)
    convert(open_checkpoint(model), disk.root / "out", progress=lambda *told: None)
    disk.look(look)
    out = disk.root / "out"
    whole = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert len(whole) >= 4
    for one in seen:
        assert not one or [name for name in whole if one.get(name) != whole[name]] == []
    assert seen[-2:] == [whole] * 2
