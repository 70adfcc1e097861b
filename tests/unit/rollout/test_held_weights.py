"""A server's copy of the weights: what it takes, what it refuses, and that it never holds half of a version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gspo_mega.base.errors import PublishError
from gspo_mega.rollout.server.held_weights import HeldWeights, open_reserved, reserve
from gspo_mega.sync.delta import BEGIN, CHANGE, PublishedChanges, make_record, message

SIZES = {
    "a.weight": (torch.bfloat16, (40, 30)),
    "b.weight": (torch.float8_e4m3fn, (64, 7)),
    "b.scale": (torch.float32, (3,)),
}


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SIZES.items()}


def moved(before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    after = {name: tensor.clone() for name, tensor in before.items()}
    for tensor in after.values():
        tensor.view(-1).view(torch.uint8)[:3] ^= 1
    return after


def content(held: HeldWeights) -> dict[str, bytes]:
    return {name: bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in held.tensors()}


def bytes_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()}


class Sender:
    def __init__(self, sender: int = 0, num_senders: int = 1, only: tuple[str, ...] = tuple(SIZES)) -> None:
        self.changes = PublishedChanges(100, sender, num_senders, torch.device("cpu"))
        self.only = only

    def send(self, base: int | None, version: int, tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        self.changes.begin(base, version)
        sent = list(self.changes.messages((n, t) for n, t in tensors.items() if n in self.only))
        self.changes.end()
        return sent


def empty(writes: bool = True) -> HeldWeights:
    return HeldWeights(torch.zeros(10_000, dtype=torch.uint8), writes)


@pytest.fixture
def at_1() -> tuple[HeldWeights, Sender, dict[str, torch.Tensor]]:
    held, sender, first = empty(), Sender(), weights(0)
    whole = held.take(sender.send(None, 1, first))
    assert [name for name, _ in whole] == list(first), "SGLang loads whole tensors as they come"
    held.loaded(True)
    assert held.version == 1 and content(held) == bytes_of(first)
    return held, sender, first


def test_changes_make_the_next_version_to_the_bit(at_1):
    held, sender, first = at_1
    for version in (2, 3, 4):
        first = moved(first)
        for name_and_tensor in sender.send(version - 1, version, first):  # in buckets of one
            assert held.take([name_and_tensor]) == []
        assert held.is_change and held.is_complete and held.version is None
        held.loaded(True)
        assert held.version == version and content(held) == bytes_of(first)


def test_nothing_changed_is_a_version_too(at_1):
    held, sender, first = at_1
    held.take(sender.send(1, 2, first))
    assert held.is_complete
    held.loaded(True)
    assert held.version == 2 and content(held) == bytes_of(first)


def test_a_bucket_that_comes_twice_changes_nothing(at_1):
    held, sender, first = at_1
    sent = sender.send(1, 2, second := moved(first))
    for bucket in (sent[:2], sent[:2], sent[2:], sent[2:]):
        held.take(bucket)
    held.loaded(True)
    assert held.version == 2 and content(held) == bytes_of(second)


def test_two_senders_in_turns():
    held, first = empty(), weights(0)
    senders = [Sender(0, 2, ("a.weight",)), Sender(1, 2, ("b.weight", "b.scale"))]
    for base, version, tensors in ((None, 1, first), (1, 2, moved(first))):
        one, other = (sender.send(base, version, tensors) for sender in senders)
        for bucket in (one[:2], other[:2], other[2:]):
            held.take(bucket)
            assert not held.is_complete
        held.take(one[2:])
        assert held.is_complete
        held.loaded(True)
        assert held.version == version and content(held) == bytes_of(tensors)


def test_a_rank_that_does_not_write_knows_the_same_places(at_1):
    held, sender, first = at_1
    other = HeldWeights(held._memory, writes=False)
    sender = Sender()
    for base, version, tensors in ((None, 1, first), (1, 2, moved(first))):
        sent = sender.send(base, version, tensors)
        for one in (held, other):
            one.take(sent)
            one.loaded(True)
    assert other.version == 2 and content(other) == content(held) == bytes_of(moved(first))


@pytest.mark.parametrize("base, holds", [(2, "version 1"), (7, "version 1"), (0, "version 1")])
def test_a_change_of_another_version_is_refused_before_it_is_applied(at_1, base, holds):
    held, sender, first = at_1
    before = content(held)
    with pytest.raises(
        PublishError, match=f"changes of version {base} to version 9, and holds {holds}; it needs a full"
    ):
        held.take(sender.send(base, 9, moved(first)))
    assert content(held) == before and held.version is None and held.problem
    held.loaded(False)
    with pytest.raises(PublishError, match="holds no whole version"):
        held.take(sender.send(1, 2, moved(first)))
    held.loaded(False)
    held.take(sender.send(None, 9, first))
    held.loaded(True)
    assert held.version == 9, "a full publish mends it"


def test_a_damaged_change_leaves_no_version(at_1):
    held, sender, first = at_1
    sent = sender.send(1, 2, moved(first))
    name, record = sent[2]
    damaged = record.clone()
    damaged[-1] ^= 1
    held.take(sent[:2])
    with pytest.raises(PublishError, match=r"b\.weight: the change is damaged"):
        held.take([(name, damaged)])
    for again in (sent, sent[2:]):  # the reason, not that it came again
        with pytest.raises(PublishError, match=r"b\.weight: the change is damaged"):
            held.take(again)
    held.loaded(False)
    assert held.version is None


@pytest.mark.parametrize("missing", [1, 3, 4])
def test_what_is_not_complete_is_no_version(at_1, missing):
    held, sender, first = at_1
    sent = sender.send(1, 2, moved(first))
    held.take([one for place, one in enumerate(sent) if place != missing])
    assert not held.is_complete
    held.loaded(True)
    assert held.version is None


def test_a_change_of_another_publish_is_refused(at_1):
    held, _, first = at_1
    second = moved(first)
    held.take([(BEGIN, message(base=1, version=2, send=5, sender=0, num_senders=1))])
    record, _ = make_record("a.weight", first["a.weight"], second["a.weight"], 1, 3)
    assert record is not None
    with pytest.raises(PublishError, match=r"a\.weight: the change is of version 1 to version 3"):
        held.take([(CHANGE + "a.weight", record)])
    record, _ = make_record("c", None, torch.ones(2), 1, 2)
    assert record is not None
    held.loaded(False)
    held.version = 1
    with pytest.raises(PublishError, match="c: a change of a tensor that is not held"):
        held.take([(BEGIN, message(base=1, version=2, send=6, sender=0, num_senders=1)), (CHANGE + "c", record)])


def test_a_trainer_that_does_not_say_what_it_sends_leaves_no_version(at_1):
    held, _, first = at_1
    assert len(held.take(list(first.items()))) == 3
    held.loaded(True)
    assert held.version is None


def test_weights_that_do_not_fit_are_refused():
    held = HeldWeights(torch.zeros(100, dtype=torch.uint8), True)
    with pytest.raises(PublishError, match="would have more than 100 bytes"):
        held.take([("x", torch.zeros(200))])


def test_the_copy_is_shared_with_other_processes_by_its_path(tmp_path):
    save_file({"x": torch.zeros(1000)}, tmp_path / "model.safetensors")
    reserved = reserve(str(tmp_path), 2)
    first, second = open_reserved(reserved, 0), open_reserved(reserved, 1)
    tensors = weights(1)
    sent = Sender().send(None, 1, tensors)
    for one in (second, first):
        one.take(sent)
        one.loaded(True)
    assert content(second) == bytes_of(tensors), "written by rank 0, read by rank 1"


# --- folders --------------------------------------------------------------------------------------------------------


def write_version(folder: Path, version: int, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    names = list(tensors)
    save_file({n: tensors[n] for n in names[:1]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1:]}, folder / "model-00002-of-00002.safetensors")
    (folder / "manifest.json").write_text(json.dumps({"weight_version": version}))
    return folder


def write_changes(folder: Path, base: int, version: int, before, after) -> Path:
    folder.mkdir()
    records = {}
    for name, tensor in after.items():
        record, _ = make_record(name, before[name], tensor, base, version)
        if record is not None:
            records[CHANGE + name] = record
    save_file(records, folder / "rank00000-00000.safetensors")
    files = {"rank00000-00000.safetensors": len(records)}
    (folder / "delta.json").write_text(json.dumps({"base": base, "weight_version": version, "files": files}))
    return folder


def test_folders_of_versions_and_of_changes(tmp_path):
    held, other = empty(), empty(writes=False)
    other._memory = held._memory
    first, second = weights(0), moved(weights(0))
    for folder, tensors, version in (
        (write_version(tmp_path / "v1", 1, first), first, 1),
        (write_changes(tmp_path / "v2.delta", 1, 2, first, second), second, 2),
    ):
        for one in (held, other):
            assert one.read_folder(folder)
            one.loaded(True)
        assert held.version == other.version == version
        assert content(held) == content(other) == bytes_of(tensors)


def test_a_folder_that_no_publish_wrote_is_left_to_sglang(tmp_path, at_1):
    held, *_ = at_1
    save_file(weights(0), tmp_path / "model.safetensors")
    assert not held.read_folder(tmp_path) and held.version is None


@pytest.mark.parametrize("fault", ["base", "damaged", "missing file", "missing record", "no json"])
def test_a_faulty_folder_of_changes_is_refused_and_nothing_of_it_is_applied(tmp_path, at_1, fault):
    held, _, first = at_1
    before = content(held)
    base = 5 if fault == "base" else 1
    folder = write_changes(tmp_path / "v2.delta", base, 2, first, moved(first))
    file = folder / "rank00000-00000.safetensors"
    records = load_file(file)
    if fault == "damaged":
        records[CHANGE + "b.scale"][-1] ^= 1
        save_file(records, file)
    elif fault == "missing record":
        del records[CHANGE + "b.scale"]
        save_file(records, file)
    elif fault == "missing file":
        file.unlink()
    elif fault == "no json":
        (folder / "delta.json").write_text("{")
    said = {
        "base": "changes of version 5 to version 2, and holds version 1",
        "damaged": r"b\.scale: the change is damaged",
        "missing file": "cannot be read",
        "missing record": "has 2 records where 3 were written",
        "no json": "cannot be read",
    }[fault]
    with pytest.raises(PublishError, match=said):
        held.read_folder(folder)
    assert content(held) == before and held.version is None
