"""A user's filter of groups and order of prompts in a live source: real files, scoring processes and journal. A run that
is stopped at any place and started again draws the same prompts and tells the order the same results.
"""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
from collector_support import SPEC_OF_TOKENIZER, collector_config

from gspo_mega.base.errors import HookError
from gspo_mega.checkpoint.load import TrainState
from gspo_mega.config.schema import Config
from gspo_mega.data.journal.journal import Journal
from gspo_mega.data.quickstart import write_tokenizer
from gspo_mega.train.reusable_records import made_by
from gspo_mega.train.rollouts import Rollouts
from gspo_mega.train.sources import LiveSource, journalled_source

NUM_ROWS, PROMPTS, GROUP = 24, 3, 4

HOOKS = '''
def keep(group, *, least):
    """Whether the mean length is even, which has nothing to do with rewards."""
    assert len(group.responses) == 4 and group.metadata["level"] in (0, 1) and group.answer == "x"
    return sum(one.num_tokens for one in group.responses) % 2 == least

def score(*, prompt, response, answer, metadata):
    return float(len(response) % 3)

class Order:
    """The next row depends on everything that was observed."""

    def __init__(self, rows, *, seed, stride=5):
        self.rows, self.total, self.number = rows, 0, seed
        self.stride = stride

    def next(self):
        self.number = (self.number * self.stride + self.total + 1) % len(self.rows)
        return self.number

    def observe(self, results):
        for result in results:
            assert self.rows[int(result.prompt_id.rpartition(":")[2])].prompt_id == result.prompt_id
            self.total += sum(one.num_tokens for one in result.responses) + int(sum(result.rewards))

    def state(self):
        return {"total": self.total, "number": self.number}

    def restore(self, state):
        self.total, self.number = state["total"], state["number"]
'''


@pytest.fixture
def config(fakes, tmp_path, monkeypatch):
    fakes("server-0")
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    (tmp_path / "own_hooks.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [{"prompt": f"{k}+{k}", "answer": "x", "level": k % 2} for k in range(NUM_ROWS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**rollout):
        plain = collector_config(prompts_per_step=PROMPTS, group_size=GROUP, **rollout).model_dump()
        sections = {
            "model": {"path": str(tmp_path / "model")},
            "data": {
                "path": "train.jsonl",
                "max_prompt_tokens": 8,
                "chat_template": False,
                "source": {"function": "own_hooks:Order"},
            },
            "reward": plain["reward"] | {"functions": ({"function": "own_hooks:score"},)},
            "eval": None,
        }
        return Config.model_validate({**plain, **sections})

    return make


class Live:
    """A started run; `steps(n)` takes batches, and `state` is its last checkpoint's."""

    def __init__(self, config, attempt, said=None):
        self.config = config
        self.rollouts = Rollouts(config, SPEC_OF_TOKENIZER, attempt)
        self.rollouts.pool.wait_ready(1, 30.0)
        journal = Journal(attempt.run_folder.journal_dir)
        say = (said if said is not None else []).append
        self.source = journalled_source(config, journal, LiveSource(self.rollouts, made_by(config)), say)
        self.source.restore(TrainState())

    def __enter__(self):
        self.rollouts.__enter__()
        return self

    def __exit__(self, *error):
        self.rollouts.__exit__(*error)
        self.source.close()

    def take(self, step):
        batch = self.source.take(step, 0, lambda: None)
        return batch, [group.prompt.prompt_id for group in batch.groups]

    def checkpoint(self, step):
        state = TrainState(step=step)
        self.source.save_position(state)
        return SimpleNamespace(**json.loads(json.dumps({"prompts": state.prompts, "history": state.history})))


def test_the_order_and_the_filter_decide_and_are_counted(config, attempt):
    chosen = config(group_filter={"function": "own_hooks:keep", "options": {"least": 0}}, max_oversampling=4.0)
    with Live(chosen, attempt) as live:
        sampled = 0
        for step in range(4):
            batch, _ = live.take(step)
            lengths = [sum(e.num_sampled_tokens for e in group.episodes) for group in batch.groups]
            kept = [length % 2 == 0 for length in lengths]
            assert all(kept) or batch.counts["num_groups_missing"] == PROMPTS
            sampled += int(batch.counts["num_prompts_sampled"])
        state = live.source.state_dict()["chosen"]
    assert state["num_drawn"] == sampled > 4 * PROMPTS  # some groups were dropped and replaced


@pytest.mark.parametrize("stopped_after", [0, 1, 2])
def test_a_continued_run_draws_the_prompts_that_the_state_of_its_checkpoint_leads_to(config, attempt, stopped_after):
    """The same rewards give the same order: what is recorded is used again, and the order goes on from its state."""
    with Live(config(), attempt) as live:
        taken, states = [], [live.checkpoint(0)]
        for step in range(3):
            taken.append(live.take(step)[1])
            states.append(live.checkpoint(step + 1))
    said: list[str] = []
    with Live(config(), attempt, said) as live:
        state = states[stopped_after]
        live.source.restore(TrainState(step=stopped_after, prompts=state.prompts, history=state.history))
        again = [live.take(step)[1] for step in range(stopped_after, 3)]
        assert live.checkpoint(3) == states[3]
    assert again == taken[stopped_after:]
    assert sum("are not sampled again" in line for line in said) == 3 - stopped_after


def test_a_step_that_was_stopped_in_the_middle_asks_for_the_same_prompts(config, attempt):
    with Live(config(), attempt) as live:
        first = live.take(0)[1]
        state = live.checkpoint(1)
        reference = live.rollouts.prompts
        assert [reference.next().prompt_id for _ in range(PROMPTS)] != first
        reference.load_state_dict(state.prompts)
        due = [prompt.prompt_id for prompt in live.source._source.due(1, range(PROMPTS)).values()]
        assert live.take(1)[1] == due  # `due` is what a restart asks the journal for


def test_another_source_of_the_function_is_noticed_and_its_records_are_not_used(config, attempt, tmp_path):
    with Live(config(), attempt) as live:
        live.take(0)
        start = live.checkpoint(0)
    (tmp_path / "own_hooks.py").write_text(HOOKS + "\n# repaired\n")
    said: list[str] = []
    with Live(config(), attempt, said) as live:
        live.take(0)
    assert any("another function chose their prompts: the source of data.source is not the same" in s for s in said)
    assert start.prompts["chosen"]["state"] is not None


BAD = {
    "next": ("def next(self): return len(self.rows)", "from next() 24; the number of a row was expected, from 0 to 23"),
    "state": ("def state(self): return {1j}", "from state() something that JSON cannot hold"),
    "missing": ("observe = None", "Order without observe; an object with the methods next, observe, state, restore"),
    "raises": ("def next(self): raise KeyError('level')", "own_hooks:Order: next() failed: KeyError: 'level'"),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_an_object_must_not_do_ends_the_run_with_its_name(config, attempt, tmp_path, fault):
    text, said = BAD[fault]
    name = f"own_hooks_{fault}"
    (tmp_path / f"{name}.py").write_text(HOOKS + f"\n    {text}\n")
    changed = config().model_dump()
    changed["data"]["source"]["function"] = f"{name}:Order"
    with pytest.raises(HookError) as caught, Live(Config.model_validate(changed), attempt) as live:
        live.take(0)
    assert said.replace("own_hooks:", f"{name}:") in str(caught.value)


def test_a_filter_that_answers_neither_yes_nor_no_ends_the_batch(config, attempt, tmp_path):
    (tmp_path / "vague.py").write_text("def keep(group): return 'perhaps'\n")
    said = "rollout.group_filter: vague:keep .*returned 'perhaps' for the group of"
    with Live(config(group_filter={"function": "vague:keep"}), attempt) as live, pytest.raises(HookError, match=said):
        live.take(0)


def test_a_row_that_is_too_long_is_passed_over_and_another_is_asked_for(config, attempt, tmp_path):
    rows = [{"prompt": "9" * (30 if k % 2 else 3), "answer": "x", "level": 0} for k in range(NUM_ROWS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Live(config(), attempt) as live:
        drawn = [live.rollouts.prompts.next().prompt_id for _ in range(10)]
    assert all(int(name.rpartition(":")[2]) % 2 == 0 for name in drawn)
    assert len(list(itertools.groupby(drawn))) > 1
