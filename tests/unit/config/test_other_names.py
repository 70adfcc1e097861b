"""Keys as users of TRL and verl write them are answered with the key that says the same here."""

import re
from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import load_config
from gspo_mega.config.explain import OTHER_NAMES, all_keys

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rate=1e-6", "in TRL it is `learning_rate`, here it is optimizer.lr"),
        ("batch.num_generations=8", "here it is batch.group_size"),
        ("rollout.n=8", "in verl it is `n`, here it is batch.group_size"),
        ("batch.ppo_mini_batch_size=8", "here it is batch.num_mini_batches, the number of mini-batches and not"),
        ("optimizer.beta=0.9", "here it is kl.coefficient; or did you mean 'beta2'?"),
        ("epsilon=0.2", "here it is objective.clip_low and objective.clip_high"),
    ],
)
def test_a_name_of_another_library_is_answered_with_the_key_here(override, said):
    with pytest.raises(ConfigError) as caught:
        load_config(ROOT / "configs/quickstart.yaml", [override], "train")
    assert f"{override.partition('=')[0]}: unknown key; " in str(caught.value) and said in str(caught.value)


def test_every_entry_names_keys_that_exist():
    keys = {".".join(path) for path in all_keys()}
    for whose, here in OTHER_NAMES.values():
        assert set(whose.split(" and ")) <= {"TRL", "verl"}
        named = re.findall(r"\w+\.\w+", here)
        assert named and set(named) <= keys


def test_the_page_has_every_name():
    text = (ROOT / "docs/first_real_run.md").read_text()
    section = text.partition("## Names from TRL and verl")[2]
    for name, (_, here) in OTHER_NAMES.items():
        rows = [line for line in section.splitlines() if f"`{name}`" in line]
        assert len(rows) == 1, name
        assert all(f"`{key}`" in rows[0] for key in re.findall(r"\w+\.\w+", here)), name
