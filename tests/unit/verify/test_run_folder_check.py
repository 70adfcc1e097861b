"""`gspo-mega inspect RUN --verify`: every injected fault is named, and a sound folder has none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.records import Prompt
from gspo_mega.base.run_folder import RunFolder, atomic_write_json, atomic_write_text
from gspo_mega.checkpoint import folders
from gspo_mega.checkpoint.hf_export import tensor_digest
from gspo_mega.cli.main import main
from gspo_mega.config import load_config, render_config
from gspo_mega.data.held_out_responses import write_responses_of
from gspo_mega.data.journal.frames import FrameFile
from gspo_mega.data.journal.journal import Journal
from gspo_mega.verify.run_folder_check import Finding, check_run_folder

NUM_STEPS = 3


@pytest.fixture
def run() -> Iterator[RunFolder]:
    """A run of three steps with checkpoints of the last two, a fourth step that was interrupted, and its result."""
    root = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    root.chmod(0o755)
    folder = RunFolder(root / "run")
    folder.path.mkdir()
    atomic_write_text(folder.config_file, render_config(load_config("configs/quickstart.yaml").config))
    attempt = folder.new_attempt()
    atomic_write_text(attempt.command_file, "train\n")
    shutil.copy(folder.config_file, attempt.config_file)
    journal = Journal(folder.journal_dir)
    for step in range(NUM_STEPS):
        with journal.begin(step, step, 2, {}) as writer:
            group = _group(step)
            for episode in group.episodes:
                writer.add(episode)
            writer.finish(RolloutBatch(step, [group], {}, {}), {})
    with journal.begin(NUM_STEPS, NUM_STEPS, 2, {}) as writer:
        writer.add(_group(NUM_STEPS).episodes[0])
    for step in (2, 3):
        _checkpoint(folder, step)
    atomic_write_text(folder.latest_checkpoint_file, "step_00000003")
    lines = [json.dumps({"step": step, "time": 1.0, "reward/mean": 0.5}) for step in range(1, NUM_STEPS + 1)]
    folder.metrics_file.write_text("\n".join(lines) + "\n")
    _export(folder.huggingface_dir)
    _export(folder.weights_version_dir(3))
    atomic_write_json(folder.current_weights_file, {"weight_version": 3, "path": str(folder.weights_version_dir(3))})
    yield folder
    shutil.rmtree(root)


def _group(step: int) -> Group:
    prompt = Prompt(f"train:{step}", "train", (1, 2), "1 + 1 =", answer="2")
    rows = [
        one_turn_row(
            f"step{step:06d}-g00000-s{sample:03d}", 0, prompt, [5, 6], [1, 1], [-1.0, -0.5], [step] * 2, "stop", "two",
            reward=float(sample),
        )
        for sample in range(2)
    ]  # fmt: skip
    return Group.from_rows(0, prompt, rows)


def _checkpoint(folder: RunFolder, step: int) -> None:
    final = folder.checkpoint_dir(step)
    files = [final / "megatron" / "__0_0.distcp", final / "megatron" / "__0_1.distcp", final / "rng" / "rank_00000"]
    for number, file in enumerate(files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([step, number]) * 500)
    record = {"format_version": 2, "state": {"step": step, "prompts": {}}, "files": folders.checksums(final, files)}
    atomic_write_json(final / "state.json", record)


def _export(folder: Path) -> None:
    import torch

    folder.mkdir(parents=True)
    tensors = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float32)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "model.safetensors").chmod(0o644)  # the library makes it for its owner alone
    described = {
        name: {"file": "model.safetensors", "sha256": tensor_digest(torch.from_numpy(tensor))}
        for name, tensor in tensors.items()
    }
    atomic_write_json(folder / "manifest.json", {"weight_version": 3, "tensors": described})


def test_held_out_responses_are_read_and_what_they_hold_is_no_reason_to_stop(run, capsys):
    write_responses_of(run, 2, [{"set": "a", "row": 1, "prompt": "p", "response": "r", "correct": True}])
    assert found(run) == []
    file = run.evaluations_dir / "step_00000002.jsonl"
    file.write_text(file.read_text()[:-9])
    finding = only(run)
    assert finding.where.startswith(str(file)) and "1: is not a line with a held-out response" in finding.problem
    assert main(["inspect", str(run.path), "--verify"]) == 9
    file.rename(run.evaluations_dir / "other.txt")
    assert only(run).is_note


def found(run: RunFolder) -> list[Finding]:
    return check_run_folder(run)[0]


def only(run: RunFolder) -> Finding:
    (finding,) = found(run)
    return finding


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def looks(folder: Path) -> dict[str, tuple[int, int, int]]:
    """What changes when a file is written, renamed, or removed."""
    return {
        str(path): (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
        for path in [folder, *folder.rglob("*")]
        for stat in [path.lstat()]
    }


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Root may read every file, so root's rights are given up for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_sound_folder_reports_nothing_and_stays_as_it_is(run, capsys):
    before = looks(run.path)
    assert main(["inspect", str(run.path), "--verify"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "checkpoints  2 read",
        "journal      4 steps read",
        "metrics      3 lines read",
        "weights      4 tensors compared with their manifests",
        f"{run.path}: nothing is damaged",
    ]
    assert looks(run.path) == before
    run.superseded_metrics_file.write_bytes(run.metrics_file.read_bytes())
    assert main(["inspect", str(run.path), "--verify"]) == 0
    assert (
        "metrics      3 lines read; metrics.superseded.jsonl has 3 of steps that were trained again after a restart\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("step, loss", [(3, "step_00000002 is sound and is taken instead"), (2, "to fall back on")])
def test_a_flipped_byte_of_a_checkpoint(run, step, loss, capsys):
    file = run.checkpoint_dir(step) / "megatron" / "__0_1.distcp"
    flip(file, 123)
    finding = only(run)
    assert (finding.path, finding.problem) == (file, "has other bytes than were written")
    assert loss in finding.loss
    assert main(["inspect", str(run.path), "--verify", "--json"]) == 6
    assert json.loads(capsys.readouterr().out)["findings"][0]["path"] == str(file)


def test_a_missing_shard(run):
    file = run.checkpoint_dir(3) / "megatron" / "__0_0.distcp"
    file.unlink()
    assert (only(run).path, only(run).problem) == (file, "is missing")


def test_a_shorter_shard_says_both_lengths(run):
    file = run.checkpoint_dir(3) / "rng" / "rank_00000"
    os.truncate(file, 999)
    assert (only(run).path, only(run).problem) == (file, "has 999 bytes instead of 1000")


def test_a_manifest_with_another_hash(run):
    state = run.checkpoint_dir(3) / "state.json"
    record = json.loads(state.read_text())
    record["files"]["megatron/__0_0.distcp"][1] = "0" * 64
    state.write_text(json.dumps(record))
    assert only(run).path == run.checkpoint_dir(3) / "megatron" / "__0_0.distcp"
    manifest = run.huggingface_dir / "manifest.json"
    record = json.loads(manifest.read_text())
    record["tensors"]["b"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(record))
    _, exported = found(run)
    assert exported.path == run.huggingface_dir / "model.safetensors"
    assert exported.problem == "tensor b has other bytes than its manifest says"
    assert exported.loss == "an exported result; no continuation reads it"


def test_no_sound_checkpoint_is_said(run):
    for step in (2, 3):
        (run.checkpoint_dir(step) / "state.json").write_text("{")
    assert [finding.path.parent.name for finding in found(run)] == ["step_00000003", "step_00000002"]
    assert "no checkpoint is sound" in found(run)[0].loss


def test_latest_that_names_nothing(run):
    run.latest_checkpoint_file.write_text("garbage\n")
    assert only(run).path == run.latest_checkpoint_file
    run.latest_checkpoint_file.write_text("step_00000009\n")
    assert only(run).path == run.checkpoint_dir(9) / "state.json"


def test_a_flipped_byte_of_the_journal_has_its_place(run, capsys):
    file = Journal(run.journal_dir).file(1)
    flip(file, 300)
    finding = only(run)
    assert (finding.path, finding.area) == (file, "journal")
    assert finding.place.startswith("byte ") and int(finding.place.split()[1].rstrip(",")) <= 300
    assert "its checksum does not hold" in finding.problem
    assert "nothing of a continuation, which has trained on step 2" in finding.loss
    assert main(["inspect", str(run.path), "--verify"]) == 8


def test_a_cut_file_of_a_trained_step_is_damage_and_of_the_last_step_is_not(run):
    journal = Journal(run.journal_dir)
    size = journal.file(1).stat().st_size
    os.truncate(journal.file(1), size - 7)
    finding = only(run)
    assert finding.path == journal.file(1)
    assert "cut short, and the run went on after it" in finding.problem

    os.truncate(journal.file(3), journal.file(3).stat().st_size - 7)
    notes = [finding for finding in found(run) if finding.is_note]
    assert [note.path for note in notes] == [journal.file(3)]
    torn = FrameFile(journal.file(3))
    list(torn.frames())
    assert notes[0].place == f"byte {journal.file(3).stat().st_size - torn.num_torn_bytes}"


def test_zeros_at_the_end_are_damage_where_the_run_went_on_after_them(run):
    """A power cut may leave them in the last file only."""
    journal = Journal(run.journal_dir)
    for step, is_note in ((3, True), (1, False)):
        whole = journal.file(step).read_bytes()
        first = 8 + 8 + int.from_bytes(whole[8:12], "little")
        journal.file(step).write_bytes(whole[:first] + bytes(len(whole) - first))
        finding = next(finding for finding in found(run) if finding.path == journal.file(step))
        assert (finding.is_note, finding.place) == (is_note, f"byte {first}")
        assert f"its last {len(whole) - first} bytes are" in finding.problem


def test_a_file_that_ends_before_its_batch_is_damage(run):
    """Every frame is intact; the record of the batch is gone with the end of the file."""
    journal = Journal(run.journal_dir)
    *_, episode = _group(1).episodes
    with journal.begin(3, 3, 2, {}) as writer:
        writer.add(episode)
    shutil.copy(journal.file(3), journal.file(2))
    assert "it ends before the record of its batch" in only(run).problem


def test_a_journal_file_of_another_step_and_a_missing_one(run):
    journal = Journal(run.journal_dir)
    shutil.copy(journal.file(0), journal.file(1))
    assert only(run).problem == "is the file of step 1"
    journal.file(1).unlink()
    assert (only(run).path, only(run).problem) == (journal.file(1), "is missing between two steps")


def test_a_missing_end_of_the_journal(run):
    for step in (2, 3):
        Journal(run.journal_dir).file(step).unlink()
    assert (only(run).path.name, only(run).problem) == ("step_00000002", "is missing; the checkpoint is of step 3")


def test_what_was_sampled_ahead_is_said_to_be_needed(run):
    state = run.checkpoint_dir(3) / "state.json"
    record = json.loads(state.read_text())
    record["state"]["prompts"] = {"tickets": {"first": 0, "since": 1}}
    state.write_text(json.dumps(record))
    flip(Journal(run.journal_dir).file(1), 300)
    assert "groups that were sampled ahead" in only(run).loss


def test_a_line_of_metrics_has_its_number(run):
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.write_bytes(b"".join([lines[0], lines[1][:20] + b"\n", lines[2]]))
    finding = only(run)
    assert (finding.path, finding.place, finding.problem) == (run.metrics_file, "line 2", "is not a line of metrics")
    run.metrics_file.write_bytes(lines[0] + lines[2])
    assert (only(run).place, only(run).problem) == ("line 2", "step 3 follows step 1")
    run.metrics_file.write_bytes(b"".join([*lines, lines[2][:9]]))
    assert (only(run).place, only(run).is_note) == ("line 4", True)
    run.metrics_file.write_bytes(lines[0])
    assert only(run).loss == "the curves of steps 2 to 3"


def test_a_damaged_configuration_names_a_copy(run):
    run.config_file.write_bytes(run.config_file.read_bytes()[:200])
    assert only(run).path == run.config_file
    assert only(run).remedy == f"copy {run.attempt(1).config_file} there"


def test_published_weights(run):
    file = run.weights_version_dir(3) / "model.safetensors"
    flip(file, file.stat().st_size - 1)
    assert (only(run).path, only(run).loss[:12]) == (file, "servers star")
    os.truncate(file, file.stat().st_size - 4)
    assert f"it ends at byte {file.stat().st_size}" in found(run)[0].problem
    shutil.rmtree(run.weights_version_dir(3))
    assert only(run).path == run.current_weights_file and only(run).is_note
    run.current_weights_file.write_text("{")
    assert only(run).path == run.current_weights_file and not only(run).is_note


def test_a_folder_that_was_moved_is_sound(run):
    moved = RunFolder(run.path.rename(run.path.with_name("moved")))
    assert found(moved) == []
    moved.path.rename(run.path)


def test_foreign_files_and_drafts_are_notes(run, capsys):
    foreign = [run.checkpoint_dir(3) / "megatron" / "core.1234", run.journal_dir / "lost+found"]
    for path in (*foreign, run.checkpoints_dir / "step_00000004.1a2b.part"):
        path.write_bytes(b"?")
    notes = found(run)
    assert all(note.is_note for note in notes)
    assert [note.path for note in notes if note.problem.startswith("foreign: ")] == foreign
    assert [note.path.name for note in notes if "draft" in note.problem] == ["step_00000004.1a2b.part"]
    assert main(["inspect", str(run.path), "--verify"]) == 0
    assert "damaged: 0, and notes: 3" in capsys.readouterr().out


def test_files_and_folders_that_may_not_be_read(run):
    closed = [run.checkpoint_dir(3) / "megatron" / "__0_0.distcp", Journal(run.journal_dir).file(1), run.metrics_file]
    for path in closed:
        path.chmod(0)
    with another_user():
        denied = found(run)
    assert [(finding.path, "Permission denied" in finding.problem) for finding in denied] == [
        (path, True) for path in (closed[0], closed[2], closed[1])
    ]
    for path in closed:
        path.chmod(0o644)
    run.journal_dir.chmod(0)
    with another_user():
        denied = found(run)
    run.journal_dir.chmod(0o755)
    assert {finding.path for finding in denied} == {run.journal_dir}


def test_what_a_running_run_removes_meanwhile_is_no_finding(run, monkeypatch):
    read = folders.checksum_problems

    def prune_while_reading(folder: Path, *more):
        if folder == run.checkpoint_dir(2):
            shutil.rmtree(folder)
        return read(folder, *more)

    monkeypatch.setattr(folders, "checksum_problems", prune_while_reading)
    assert found(run) == []


def test_another_folder_is_refused(tmp_path, capsys):
    assert main(["inspect", str(tmp_path), "--verify"]) == 9
    assert "is not a run's folder" in capsys.readouterr().err
