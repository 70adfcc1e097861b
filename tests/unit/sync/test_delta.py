"""Records of what changed between two versions: their bytes, what damages them, and what a sender keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.base.errors import PublishError
from gspo_mega.sync.delta import (
    BEGIN,
    CHANGE,
    END,
    PublishedChanges,
    SentCopy,
    as_bytes,
    make_record,
    read_message,
    read_record,
)

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float16)
# A record's header: 8 bytes of magic, seven numbers of 8 bytes, and a SHA-256.
HEADER = 8 + 7 * 8 + 32


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(as_bytes(one.contiguous()), as_bytes(other.contiguous()))


def random_bits(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    """Any bits at all: NaN, infinities, both zeros."""
    return torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_record_makes_the_later_version_of_the_earlier_one_to_the_bit(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 400))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    share = data.draw(st.sampled_from((0.0, 0.0005, 0.02, 0.3, 0.9, 1.0)))
    before = random_bits(dtype, rows * columns, generator).view(rows, columns)
    after = before.clone()
    chosen = torch.rand(rows * columns, generator=generator) < share
    as_bytes(after).view(-1, dtype.itemsize)[chosen] = as_bytes(random_bits(dtype, int(chosen.sum()), generator)).view(
        -1, dtype.itemsize
    )
    # The oracle counts by bytes, element by element.
    differing = (as_bytes(before).view(-1, dtype.itemsize) != as_bytes(after).view(-1, dtype.itemsize)).any(1)
    record, changed = make_record("x", before, after, 4, 5)
    assert changed == int(differing.sum())
    if not changed:
        assert record is None
        return
    assert record is not None and record.numel() <= HEADER + after.nbytes, "never larger than the tensor itself"
    change = read_record("x", record)
    assert (change.base, change.version) == (4, 5)
    if change.places is not None:
        assert change.places.tolist() == differing.nonzero().view(-1).tolist()
    made = before.clone()
    change.put_into(made)
    assert same(made, after)


def test_the_bytes_of_a_record_by_hand():
    """Three changed values of 1000: 3 values of 2 bytes; as bytes, the distances 2, 0 and 995 = 3 x 255 + 230."""
    before = torch.zeros(1000, dtype=torch.bfloat16)
    after = before.clone()
    after[[2, 3, 999]] = torch.tensor([1.0, -0.0, 3.0], dtype=torch.bfloat16)
    record, changed = make_record("x", before, after, 1, 2)
    assert changed == 3 and record is not None, "-0.0 is another value than 0.0"
    assert record[HEADER:].tolist() == [0x80, 0x3F, 0x00, 0x80, 0x40, 0x40, 2, 0, 255, 255, 255, 230]
    change = read_record("x", record)
    assert change.places is not None and change.places.tolist() == [2, 3, 999]


def test_distances_have_two_bytes_where_that_is_less():
    before = torch.zeros(200_001, dtype=torch.bfloat16)
    after = before.clone()
    after[[100, 70_000, 200_000]] = 1.0
    record, _ = make_record("x", before, after, 1, 2)
    # 100; 69899 = 65535 + 4364; 129999 = 65535 + 64464
    assert record is not None and record.numel() == HEADER + 3 * 2 + 5 * 2
    packed = record[HEADER + 6 :].clone().view(torch.int16).to(torch.int64) & 0xFFFF
    assert packed.tolist() == [100, 65535, 4364, 65535, 64464]
    assert read_record("x", record).places.tolist() == [100, 70_000, 200_000]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("dtype, per_change", [(torch.bfloat16, 3), (torch.float8_e4m3fn, 2), (torch.float32, 5)])
def test_a_tensor_is_sent_whole_exactly_when_its_changes_are_larger(dtype, per_change):
    """Every other value of the first n: distances of one byte, all 1 except the first."""
    num = 600
    largest = -(-num * dtype.itemsize // per_change) - 1  # n changes take fewer bytes than the tensor
    before = torch.zeros(num).to(dtype)
    for count in (largest, largest + 1):
        after = before.clone()
        as_bytes(after).view(num, -1)[torch.arange(0, num)[:count]] = 0x38
        record, changed = make_record("x", before, after, 1, 2)
        assert record is not None and changed == count
        is_whole = read_record("x", record).places is None
        assert is_whole == (count > largest)
        assert record.numel() == HEADER + (num * dtype.itemsize if is_whole else count * per_change)


def test_a_tensor_that_is_not_known_is_sent_whole():
    after = torch.randn(3, 5)
    record, changed = make_record("x", None, after, 1, 2)
    assert record is not None and changed == 15
    made = torch.zeros(3, 5)
    read_record("x", record).put_into(made)
    assert same(made, after)


def test_every_damaged_byte_of_a_record_is_found():
    before = torch.zeros(300, dtype=torch.bfloat16)
    after = before.clone()
    after[[5, 250]] = 2.0
    record, _ = make_record("x", before, after, 1, 2)
    assert record is not None
    for place in range(record.numel()):
        damaged = record.clone()
        damaged[place] ^= 0x10
        with pytest.raises(PublishError, match="x: the change is damaged"):
            read_record("x", damaged)
    for short in (record[:50], record[:-1]):
        with pytest.raises(PublishError, match=r"x: a change of 50 bytes|damaged"):
            read_record("x", short)
    with pytest.raises(PublishError, match="y: the change is damaged"):
        read_record("y", record)
    with pytest.raises(PublishError, match="is not one of a tensor of 301"):
        read_record("x", record).put_into(torch.zeros(301, dtype=torch.bfloat16))
    with pytest.raises(PublishError, match="of 4 bytes"):
        read_record("x", record).put_into(torch.zeros(300))


def test_a_sender_keeps_what_it_sent_and_not_the_parameter_itself():
    copy, tensor = SentCopy(), torch.ones(4)
    copy.keep("x", tensor)
    tensor.mul_(2)
    held = copy.get("x", tensor)
    assert held is not None and held.tolist() == [1, 1, 1, 1]
    assert copy.get("x", tensor.to(torch.bfloat16)) is None and copy.get("x", torch.ones(5)) is None
    copy.keep("x", tensor)
    assert copy.get("x", tensor).tolist() == [2, 2, 2, 2]  # pyright: ignore[reportOptionalMemberAccess]
    assert copy.num_bytes == 16


def sent(changes: PublishedChanges, **tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return list(changes.messages(iter(tensors.items())))


def one_sender(full_every: int = 3) -> PublishedChanges:
    return PublishedChanges(full_every, 0, 1, torch.device("cpu"))


def test_one_publish_in_full_every_is_full():
    changes, found = one_sender(3), []
    for version in range(1, 8):
        base = changes.next_base()
        found.append(base)
        changes.begin(base, version)
        sent(changes, x=torch.full((100,), float(version)))
        changes.end()
    assert found == [None, 1, 2, None, 4, 5, None]


def test_after_a_publish_that_failed_the_next_is_full():
    changes = one_sender(10)
    changes.begin(None, 1)
    sent(changes, x=torch.zeros(9))
    changes.end()
    changes.begin(changes.next_base(), 2)
    sent(changes, x=torch.ones(9))
    assert changes.next_base() is None, "2 was not committed, and the copy is no longer 1"


def test_the_messages_of_a_delta_publish():
    changes = one_sender(10)
    changes.begin(None, 1)
    first = sent(changes, x=torch.zeros(100), y=torch.zeros(50), z=torch.zeros(7))
    assert [name for name, _ in first] == [BEGIN, "x", "y", "z", END]
    assert (changes.num_changed, changes.num_values, changes.num_bytes) == (157, 157, 0)
    changes.end()
    changes.begin(1, 2)
    moved = torch.zeros(100)
    moved[7] = 1
    second = sent(changes, x=moved, y=torch.zeros(50), z=torch.ones(7))
    assert [name for name, _ in second] == [BEGIN, CHANGE + "x", CHANGE + "z", END]
    assert (changes.num_changed, changes.num_values) == (8, 157)
    assert changes.num_bytes == sum(tensor.numel() for name, tensor in second if name.startswith(CHANGE))
    begin, end = read_message(second[0][1]), read_message(second[-1][1])
    assert begin["base"] == 1 and begin["version"] == 2 and end == {**begin, "num_tensors": 2}
    again = sent(changes, x=moved, y=torch.zeros(50), z=torch.ones(7))
    assert [name for name, _ in again] == [BEGIN, "x", "y", "z", END], "a second send has everything"
    assert read_message(again[0][1])["base"] is None


def test_a_rank_that_does_not_send_passes_tensors_as_they_are():
    changes = PublishedChanges(3, None, 1, torch.device("cpu"))
    changes.begin(None, 1)
    assert [name for name, _ in sent(changes, x=torch.zeros(2))] == ["x"]


def test_weights_that_fail_their_own_check_are_not_said_to_be_complete():
    """Other ranks take part in every tensor, so the iterator runs to its end all the same."""
    changes, given, got = one_sender(), [], []
    changes.begin(None, 1)

    def tensors():
        for name in "xy":
            given.append(name)
            yield name, torch.zeros(2)
        raise PublishError("what was gathered is not what the ranks hold")

    with pytest.raises(PublishError, match="not what the ranks hold"):
        got.extend(name for name, _ in changes.messages(tensors()))
    assert given == ["x", "y"] and END not in got

    def rest():
        yield from (("x", torch.zeros(2)), ("y", torch.zeros(2)))
        given.append("end")

    stopped = changes.messages(rest())
    next(stopped)
    stopped.close()
    assert given[-1] == "end"
