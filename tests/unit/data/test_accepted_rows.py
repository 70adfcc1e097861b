"""Every row that a data file may hold goes through the journal and comes back as it was; every other is named with its
line.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_row
from gspo_mega.base.errors import DataError
from gspo_mega.config import load_config
from gspo_mega.config.schema import Data
from gspo_mega.data.chat import PromptEncoder
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.prompts import PromptSource
from gspo_mega.data.stream import PromptStream
from gspo_mega.rewards.functions import problem_of_answer

# Any characters, half surrogate pairs among them, as Python's own writer escapes them.
texts = st.text(st.characters(exclude_categories=()), max_size=6)
numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([10**400, -0.0, 5e-324, 1.7976931348623157e308, 2**63, 2**64])
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@given(
    st.text(st.characters(exclude_categories=()), min_size=1, max_size=6),
    values,
    st.dictionaries(texts, values, max_size=3),
)
@example("a", float("nan"), {})
@example("\ud800", None, {})
@example("a", None, {"x": [{"y": float("inf")}]})
@example("a", None, {"\udfff": 1})
@example("a", nested(40), {"x": nested(70)})
@example("a", nested(200), {})
@settings(max_examples=60, deadline=None)
def test_an_accepted_row_survives_the_journal_and_a_refused_one_is_named(tokenizer, prompt, answer, more):
    row = {**more, "prompt": prompt, "answer": answer}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.jsonl")
        path.write_bytes(
            json.dumps({"prompt": "fine", "answer": 1}).encode() + b"\n" + json.dumps(row).encode() + b"\n"
        )
        data = Data(max_prompt_tokens=64, chat_template=False)
        try:
            source = PromptSource("train", path, data, PromptEncoder(tokenizer, chat_template=False))
        except DataError as error:
            assert str(error).startswith(f"{path}:2: "), error
            return
        found = source.item(1)
        group = Group.from_rows(
            0, found, [one_turn_row("step0-g0-s0", 0, found, [1], [1], [-0.5], [0], "stop", reward=1.0)]
        )
        journal = Journal(Path(folder, "journal"))
        with journal.begin(0, 0, 1, {}) as writer:
            writer.add(group.episodes[0])
            writer.finish(RolloutBatch(0, [group]), {})
        (read,) = journal.read(0).batch.groups
        assert read.prompt == found and repr(read.prompt) == repr(found)  # repr tells -0.0 from 0.0


def test_a_run_continues_on_its_repaired_file_when_it_is_told_so_and_only_then(tokenizer, write_jsonl):
    rows = [{"prompt": f"{k}+{k}=", "answer": 2 * k} for k in range(8)]

    def stream(rows, accept_changed=()):
        data = Data(max_prompt_tokens=64, chat_template=False)
        source = PromptSource("train", write_jsonl(rows), data, PromptEncoder(tokenizer, chat_template=False))
        return PromptStream([source], [1.0], seed=1, shuffle=True, accept_changed=accept_changed)

    before = stream(rows)
    drawn = [before.next() for _ in range(3)]
    state = json.loads(json.dumps(before.state_dict()))
    order = [before.next().prompt_id for _ in range(5)]

    repaired = [{**row, "answer": -1} if f"train:{k}" == order[0] else row for k, row in enumerate(rows)]
    with pytest.raises(DataError, match="If that is a repair, continue with 'data.accept_changed=") as caught:
        stream(repaired).load_state_dict(state)
    (setting,) = re.findall(r"'(data\.accept_changed=.*)'", str(caught.value))
    accepted = load_config("configs/quickstart.yaml", [setting]).config.data.accept_changed
    after = stream(repaired, accepted)
    after.load_state_dict(state)
    found = [after.next() for _ in range(5)]
    assert [prompt.prompt_id for prompt in found] == order and found[0].answer == -1 and len(drawn) == 3
    after.load_state_dict(after.state_dict())

    with pytest.raises(DataError, match="their content is not"):
        stream([{**row, "answer": 7} for row in rows], accepted).load_state_dict(state)
    with pytest.raises(DataError, match="had 8 rows and has 7 now"):
        stream(repaired[:7], accepted).load_state_dict(state)


def test_rows_with_unreadable_answers_are_refused_or_left_out_and_a_continued_run_leaves_out_the_same(
    tokenizer, write_jsonl
):
    rows = [{"prompt": f"{k}+{k}=", "answer": "no number" if k in (2, 5) else str(2 * k)} for k in range(8)]
    path = write_jsonl(rows)

    def source(choice, check=gsm8k_check):
        data = Data(max_prompt_tokens=64, chat_template=False, unreadable_answers=choice)
        return PromptSource("train", path, data, PromptEncoder(tokenizer, chat_template=False), check)

    def stream(one):
        return PromptStream([one], [1.0], seed=1, shuffle=True)

    with pytest.raises(
        DataError, match=r":3: no number in the answer.*\(data.unreadable_answers: drop leaves such"
    ) as caught:
        source("refuse")
    assert str(caught.value).endswith("(so 2 of 8 lines: 3, 6)")
    kept = source("drop")
    assert (kept.num_unreadable, kept.num_overlong, kept.num_examined, len(list(kept.items()))) == (2, 0, 6, 6)
    assert kept.item(2) is None and kept.item(5) is None and kept.item(3) is not None
    line = kept.unreadable_line()
    assert "2 of 8 rows have answers that cannot be read and are left out (data.unreadable_answers: drop)" in line
    assert f"{path}:3: no number" in line and f"{path}:6: no number" in line
    before = stream(kept)
    drawn = [before.next().prompt_id for _ in range(4)]
    state = json.loads(json.dumps(before.state_dict()))
    assert state["sources"]["train"]["num_unreadable"] == 2
    rest = [before.next().prompt_id for _ in range(8)]
    after = stream(source("drop"))
    after.load_state_dict(state)
    assert [after.next().prompt_id for _ in range(8)] == rest
    assert {"train:2", "train:5"}.isdisjoint(drawn + rest) and len(set(drawn + rest)) == 6

    other = stream(source("drop", lambda row: "no" if row["answer"] == "0" else gsm8k_check(row)))
    with pytest.raises(DataError, match="other rows are left out for their answers .* 2 were, 3 are"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="none of its 8 rows can be used: 8 have answers that cannot be read"):
        source("drop", lambda row: "unreadable")


def gsm8k_check(row):
    return problem_of_answer(row["answer"], ["gsm8k"])
