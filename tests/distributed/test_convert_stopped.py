"""A conversion that stops continues where it was, and what it must not touch stays as it is."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conversions import FILE_BYTES, found, quiet, tensors_of

from gspo_mega.base.errors import CheckpointError
from gspo_mega.checkpoint.convert import to_huggingface, to_megatron
from gspo_mega.checkpoint.tensor_sources import open_checkpoint


class Stopped(Exception):
    pass


@pytest.mark.parametrize("into", [to_megatron, to_huggingface])
def test_a_stopped_conversion_goes_on_and_ends_the_same(tmp_path, mixtral, into):
    source = open_checkpoint(mixtral[0])
    count, num_tensors = 0, len(tensors_of(mixtral[0]))

    def stop(done: int, total: int, name: str) -> None:
        nonlocal count
        count += 1
        if count == num_tensors // 2:
            raise Stopped

    with pytest.raises(Stopped):
        into(source, tmp_path / "out", progress=stop, file_bytes=FILE_BYTES)
    assert not (tmp_path / "out").exists()
    record = tmp_path / "out.converting" / "progress.jsonl"
    record.write_text(record.read_text() + '{"file": "torn')  # as a power cut leaves it
    done_before = len(record.read_text().splitlines()) - 2
    assert done_before > 1

    read = []
    into(source, tmp_path / "out", progress=lambda done, total, name: read.append(name), file_bytes=FILE_BYTES)
    assert 0 < len(read) < num_tensors, "finished files are not written again"
    assert not record.parent.exists() and not (tmp_path / "out" / "progress.jsonl").exists()
    assert found(tmp_path / "out", mixtral[0]) == []
    manifest, whole = (json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "out", mixtral[1]))
    assert {n: t["sha256"] for n, t in manifest["tensors"].items()} == {
        n: t["sha256"] for n, t in whole["tensors"].items()
    }


def test_the_rest_of_another_conversion_is_not_gone_on_with(tmp_path, mixtral):
    def stop(done: int, total: int, name: str) -> None:
        if done > total // 2:
            raise Stopped

    with pytest.raises(Stopped):
        to_megatron(open_checkpoint(mixtral[0]), tmp_path / "out", progress=stop, file_bytes=FILE_BYTES)
    with pytest.raises(CheckpointError, match="belongs to another conversion"):
        to_megatron(
            open_checkpoint(mixtral[0]), tmp_path / "out", progress=quiet, file_bytes=FILE_BYTES, dtype=torch.bfloat16
        )
    victim = tmp_path / "out.converting" / "megatron" / "__0_0.distcp"
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="differs from its record"):
        to_megatron(open_checkpoint(mixtral[0]), tmp_path / "out", progress=quiet, file_bytes=FILE_BYTES)


def test_one_process_at_a_time(tmp_path, mixtral):
    def second(done: int, total: int, name: str) -> None:
        with pytest.raises(CheckpointError, match="another process runs this conversion"):
            to_megatron(open_checkpoint(mixtral[0]), tmp_path / "out", progress=quiet)
        raise Stopped

    with pytest.raises(Stopped):
        to_megatron(open_checkpoint(mixtral[0]), tmp_path / "out", progress=second, file_bytes=FILE_BYTES)
    to_megatron(open_checkpoint(mixtral[0]), tmp_path / "out", progress=quiet, file_bytes=FILE_BYTES)
    assert found(tmp_path / "out", mixtral[0]) == []


def test_nothing_is_overwritten_and_the_disk_is_looked_at(tmp_path, mixtral, monkeypatch):
    before = {p: p.read_bytes() for p in mixtral[2].iterdir()}
    with pytest.raises(CheckpointError, match="already exists"):
        to_huggingface(open_checkpoint(mixtral[0]), mixtral[2], progress=quiet)
    assert {p: p.read_bytes() for p in mixtral[2].iterdir()} == before
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(CheckpointError, match="1000000 are free"):
        to_huggingface(open_checkpoint(mixtral[0]), tmp_path / "out", progress=quiet)
