"""A file of the journal that is other than it was written is an error with its place, wherever that is; a torn end is
none. What is intact before and after the damage is shown, and nothing else.
"""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import zlib

import pytest
from report_runs import make_run
from test_journal import make_group, same, write

from gspo_mega.base.errors import JournalError
from gspo_mega.cli.main import main
from gspo_mega.data.journal.episode_log import FileBegin
from gspo_mega.data.journal.frames import _FRAME, MAGIC, JournalDamage
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.journal.steps import read_file
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.train.reusable_records import RecordRequirements, ReusableRecords

GROUPS = [make_group(0), make_group(1)]


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "run" / "journal")
    write(made, GROUPS, finish=True)
    return made


def frames_of(data):
    """(start, end) of each frame."""
    place, found = len(MAGIC), []
    while place < len(data):
        length, _ = _FRAME.unpack_from(data, place)
        found.append((place, place + _FRAME.size + length))
        place = found[-1][1]
    return found


def check_shown(journal, *, most_damages=1):
    """What is shown past the damage is as it was written, and is all but what the damage can have cost."""
    record = read_file(journal.file(4), past_damage=True)
    assert 1 <= len(record.damages) <= most_damages
    assert all(a.end <= b.offset for a, b in zip(record.damages, record.damages[1:], strict=False))
    whole = {e.episode_id: e for group in GROUPS for e in group.episodes}
    shown = {e.episode_id: e for group in record.groups.values() for e in group.episodes}
    for name, episode in shown.items():
        assert episode.rows() and [n.token_ids for n in episode.turns] == [n.token_ids for n in whole[name].turns]
        assert episode.reward == whole[name].reward
    return record, shown


def test_a_flipped_byte_anywhere_is_an_error_with_its_place(journal):
    """Every byte of the file: one bit in each, another one from byte to byte; in some, all of them."""
    file = journal.file(4)
    whole = file.read_bytes()
    frames = frames_of(whole)
    assert journal.read(4).batch is not None
    for place in range(len(whole)):
        for flip in (1 << place % 8, *([0xFF] if place % 7 == 0 else [])):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            with pytest.raises(JournalError) as told:
                journal.read(4)
            assert str(file) in str(told.value) and told.value.exit_code == 8
            if place < len(MAGIC):
                continue
            number = next(n for n, (start, end) in enumerate(frames, 1) if start <= place < end)
            assert isinstance(told.value, JournalDamage), place
            damage = told.value.damage
            assert (damage.offset, damage.frame) == (frames[number - 1][0], number)
            if flip == 0xFF:
                record, shown = check_shown(journal)
                assert damage.follows == (number < len(frames)) and record.damages[0].end == frames[number - 1][1]
                assert len(shown) + len(record.lost) >= 3


def test_the_end_that_a_crash_leaves_is_no_damage(journal):
    """Cut at every byte of the last two frames."""
    file = journal.file(4)
    whole = file.read_bytes()
    for length in range(frames_of(whole)[-2][0], len(whole)):
        file.write_bytes(whole[:length])
        record = journal.read(4)
        assert record.damages == [] and record.num_torn_bytes == length - max(
            [end for _, end in frames_of(whole) if end <= length]
        )


def test_the_zeros_that_a_power_cut_leaves_are_no_damage(journal, capsys):
    """A file system may keep a file's new length and lose its data: zeros from the end of what was flushed, at a
    frame's end, or from the end of a block that was written back, to the file's end.
    """
    file = journal.file(4)
    whole = file.read_bytes()
    starts = [start for start, _ in frames_of(whole)]
    assert len(whole) > 3 * 512
    for length in [*starts[1:], *range(512, len(whole), 512)]:
        left = whole[:length] + bytes(len(whole) - length)
        file.write_bytes(left)
        record = journal.read(4)
        begin = max(start for start in starts if start <= length)
        assert record.damages == [] and record.batch is None, length
        assert record.num_torn_bytes == len(whole) - begin
        shown = {e.episode_id for group in record.groups.values() for e in group.episodes}
        assert len(shown) == sum(frames_of(whole)[number][1] <= length for number in (2, 3, 5, 6))  # the episodes
    assert main(["inspect", str(journal.folder.parent)]) == 0
    assert "cut short" in capsys.readouterr().out


def test_zeros_that_no_power_cut_leaves_are_damage(journal):
    """From the middle of a block; or with a frame before them that was written whole and is not."""
    file = journal.file(4)
    whole = file.read_bytes()
    frames = frames_of(whole)
    start, end = frames[-2]
    torn = bytearray(whole[:end] + bytes(2000))
    torn[start + 40] ^= 1
    for harmed in (bytes(torn), whole[: len(whole) - 30] + bytes(30)):
        file.write_bytes(harmed)
        with pytest.raises(JournalDamage):
            journal.read(4)


def zeroed(data, at):
    return data[:at] + bytes(min(64, len(data) - at)) + data[at + 64 :]


def cut_out(data, at):
    return data[:at] + data[at + 37 :]


def doubled(data, at):
    return data[: at + 53] + data[at:]


def several(data, at):
    for place in (at, (at * 7 + 300) % (len(data) - 20) + 16):
        data = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
    return data


def garbage_at_the_end(data, at):
    return data + random.Random(at).randbytes(8 + at % 100)


def a_frame_of_another_file_at_the_end(data, at):
    payload = b'\x10\0\0\0{"kind": "x"}   '
    return data + _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


@pytest.mark.parametrize(
    "harm", [zeroed, cut_out, doubled, several, garbage_at_the_end, a_frame_of_another_file_at_the_end]
)
def test_no_kind_of_damage_passes_for_a_crash_or_changes_what_is_read(journal, harm):
    file = journal.file(4)
    whole = file.read_bytes()
    places = range(len(MAGIC), len(whole) - 60, 41)
    for at in places:
        harmed = harm(whole, at)
        if harmed == whole:  # zeros that were zeros
            continue
        file.write_bytes(harmed)
        with pytest.raises(JournalError, match=f"{file}: damaged at byte|{file}: a record has not the form"):
            journal.read(4)
        if harm is not a_frame_of_another_file_at_the_end:
            check_shown(journal, most_damages=3)


def test_inspect_shows_what_is_intact_and_ends_with_8(journal, capsys):
    file = journal.file(4)
    whole = bytearray(file.read_bytes())
    start, end = frames_of(whole)[2]  # the second episode of the first group
    whole[(start + end) // 2] ^= 1
    file.write_bytes(whole)
    run = str(journal.folder.parent)
    place = f"damaged at byte {start}, in frame 3: its checksum does not hold; intact records follow at byte {end}"
    assert main(["inspect", run]) == 8
    overview = capsys.readouterr().out
    assert place in overview and "trajectories      3" in overview and "cut short" not in overview
    assert main(["inspect", run, "--step", "5"]) == 8
    text = capsys.readouterr().out
    assert text.splitlines()[:2] == ["step 5, sampled from weight version 4; the intact part", place]
    assert text.count("--- step000004") == 3
    assert main(["inspect", run, "--step", "5", "--json"]) == 8
    assert json.loads(capsys.readouterr().out)["damages"] == [place]


def test_intact_episodes_of_a_damaged_prompt_are_named(journal, capsys):
    whole = bytearray(journal.file(4).read_bytes())
    start, end = frames_of(whole)[1]
    whole[(start + end) // 2] ^= 1
    journal.file(4).write_bytes(whole)
    assert main(["inspect", str(journal.folder.parent), "--step", "5"]) == 8
    text = capsys.readouterr().out
    assert "intact, but their prompts or tools are lost: step000004-g00000-s001, step000004-g00000-s000" in text


@pytest.mark.parametrize("first", [True, False], ids=["the file's name", "the first record"])
def test_a_damaged_beginning_costs_the_beginning_only(journal, capsys, first):
    whole = bytearray(journal.file(4).read_bytes())
    whole[3 if first else 30] ^= 1
    journal.file(4).write_bytes(whole)
    with pytest.raises(JournalError):
        journal.read(4)
    record = read_file(journal.file(4), past_damage=True)
    assert [same(record.groups[n], GROUPS[n]) for n in (0, 1)] == [True, True]


def test_a_run_that_goes_on_says_what_to_do_and_moves_nothing(journal):
    whole = bytearray(journal.file(4).read_bytes())
    whole[-20] ^= 1
    journal.file(4).write_bytes(whole)
    records = ReusableRecords(journal, RecordRequirements(2, Freshness(0), False), print)
    with pytest.raises(JournalDamage) as told:
        records.of_step(FileBegin(4, 4, {}), lambda step, numbers: {})
    for words in ("damaged at byte", "nothing intact follows", "inspect RUN", "Restore the file from a copy; or move"):
        assert words in str(told.value)
    assert journal.file(4).read_bytes() == whole and told.value.exit_code == 8


def test_a_replay_of_a_damaged_record_is_refused_before_anything_starts(tmp_path, capsys):
    recorded = make_run(tmp_path / "recorded")
    file = Journal(recorded / "journal").file(1)
    whole = bytearray(file.read_bytes())
    whole[len(whole) // 2] ^= 1
    file.write_bytes(whole)
    shape = "configs/models/quickstart_moe.json"
    words = [f"run.dir={tmp_path}", f"model.path={shape}", f"train.from_rollouts={recorded}", "train.num_steps=2"]
    assert main(["train", "configs/quickstart.yaml", *words]) == 8
    assert f"{file}: damaged at byte" in capsys.readouterr().err and not (tmp_path / "quickstart").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
def test_what_is_no_file_is_neither_waited_for_nor_read_without_end(journal, kind):
    file = journal.file(4)
    file.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "endless": lambda path: os.symlink("/dev/zero", path)}[kind](file)
    command = [sys.executable, "-m", "gspo_mega", "inspect", str(journal.folder.parent)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 8 and f"{file}: cannot be read: is a" in ended.stderr


FORGED = (None, "x", -1, 1.5, [], {}, True, 10**30, [[]], "\x1b[31m")


def test_records_of_another_form_whose_checksums_hold_are_errors(journal, tmp_path, capsys):
    """Each key of each kind of record left out, and with values of other types: an error with the file's name, or
    shown, and never a failure of the reader.
    """
    other = make_run(tmp_path / "other")
    shutil.copy(other / "config.resolved.yaml", journal.folder.parent)
    file = journal.file(4)
    whole = file.read_bytes()
    kinds = {}
    for start, end in frames_of(whole):
        payload = whole[start + _FRAME.size : end]
        num = int.from_bytes(payload[:4], "little")
        kinds.setdefault(
            json.loads(payload[4 : 4 + num])["kind"], (start, end, payload[4 : 4 + num], payload[4 + num :])
        )
    assert len(kinds) >= 4
    words = itertools.cycle([[], ["--step", "5"], ["--step", "5", "--json"]])
    for start, end, text, arrays in kinds.values():
        values = json.loads(text)
        for key in values:
            rest = {name: value for name, value in values.items() if name != key}
            for forged in (rest, *(rest | {key: value} for value in FORGED)):
                said = json.dumps(forged).encode()
                payload = len(said).to_bytes(4, "little") + said + arrays
                frame = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
                file.write_bytes(whole[:start] + frame + whole[end:])
                code = main(["inspect", str(journal.folder.parent), *next(words)])
                output = capsys.readouterr()
                assert code in (0, 8), (key, forged, output.err)
                assert code == 0 or str(file) in output.err or "damage" in output.out
