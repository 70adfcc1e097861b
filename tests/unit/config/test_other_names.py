"""Keys as users of other libraries write them are answered with the key that says the same here."""

import re
from pathlib import Path

import pytest

from gspo_mega.base.errors import ConfigError
from gspo_mega.cli.main import main
from gspo_mega.config import load_config
from gspo_mega.config.explain import all_keys
from gspo_mega.config.other_names import NAMES, answer

ROOT = Path(__file__).parents[3]


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, "train")
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rate=1e-6", "in TRL it is `learning_rate`, here it is optimizer.lr"),
        ("batch.num_generations=8", "here it is batch.group_size"),
        ("rollout.n=8", "in verl it is `actor_rollout_ref.rollout.n`, here it is batch.group_size"),
        ("batch.ppo_mini_batch_size=8", "here it is batch.num_mini_batches, the number of mini-batches and not"),
        ("optimizer.beta=0.9", "here it is kl.coefficient; or did you mean 'beta2'?"),
        ("epsilon=0.2", "here it is objective.clip_low and objective.clip_high"),
        ("actor_rollout_ref.rollout.n=8", "in verl it is `actor_rollout_ref.rollout.n`, here it is batch.group_size"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here it is optimizer.lr"),
        ("actor_rollout_ref.model.path=m", "here it is model.path"),
        ("data.train_batch_size=64", "here it is batch.prompts_per_step, in prompts"),
        ("trainer.total_epochs=3", "here it is train.num_steps, in rollout batches"),
        ("critic.optim.lr=1e-5", "here it is critic.optimizer.lr"),
        ("rollout_batch_size=64", "in slime and miles it is `rollout-batch-size`, here it is batch.prompts_per_step"),
        ("grpo.num_prompts_per_step=32", "in NeMo-RL it is `grpo.num_prompts_per_step`, here it is batch.prompts_per"),
        ("policy.generation.top_k=5", "here it is rollout.top_k"),
        ("orchestrator.rollouts_per_example=8", "in prime-rl it is `orchestrator.rollouts_per_example`, here it is"),
    ],
)
def test_a_name_of_another_library_is_answered_with_the_key_here(override, said):
    text = refusal(ROOT / "configs/quickstart.yaml", override)
    assert f"{override.partition('=')[0]}: unknown key; " in text and said in text


def test_a_key_inside_one_that_holds_a_name_is_answered_too(write):
    said = "in verl it is `algorithm.adv_estimator`, here it is algorithm, whose value is one name"
    assert said in refusal(ROOT / "configs/quickstart.yaml", "algorithm.adv_estimator=grpo")
    assert f"algorithm.adv_estimator: unknown key; {said}" in refusal(write("algorithm: {adv_estimator: grpo}\n"))


def test_each_key_of_a_foreign_section_has_its_line_and_its_place(write):
    path = write(text="actor_rollout_ref:\n  rollout:\n    n: 8\n    name: vllm\ntrainer:\n  nnodes: 1\n")
    lines = refusal(path).splitlines()
    assert f"{path}:3:5: actor_rollout_ref.rollout.n: unknown key; {answer(['rollout', 'n'])}" in lines
    assert any(line.startswith(f"{path}:6:3: trainer.nnodes: unknown key; in verl") for line in lines)
    rest = "actor_rollout_ref: unknown section; no key here is known by the names actor_rollout_ref.rollout.name"
    assert f"{path}:1:1: {rest}" in lines
    assert not any("valid: run, model" in line for line in lines)


@pytest.mark.parametrize("words", [["--rollout-batch-size", "64"], ["--rollout-batch-size=64"]])
def test_an_option_of_another_command_line_is_answered(words, capsys):
    with pytest.raises(SystemExit):
        main(["train", "c.yaml", *words, "--dry-run"])
    lines = capsys.readouterr().err.splitlines()
    said = "in slime and miles it is `rollout-batch-size`, here it is batch.prompts_per_step, in the configuration"
    assert lines[0].startswith(f"gspo-mega train: {words[0]} is no option; {said}")
    assert len(lines) == 2, "its value is not another error"


def test_a_last_part_that_is_a_key_here_says_nothing_alone():
    own = frozenset(path[-1] for path in all_keys())
    assert answer(["server", "temperature"], own) is None and answer(["batch", "path"], own) is None
    assert answer(["policy", "generation", "temperature"], own) is not None


def test_every_entry_names_keys_that_exist():
    keys = {".".join(path) for path in all_keys()}
    for names in NAMES.values():
        for name, here in names.items():
            first = re.match(r"[\w.]+", here)
            assert first is not None and first[0] in keys, name
            assert {named for named in re.findall(r"\w+\.\w+", here) if named != "package.module"} <= keys, name


def test_the_page_has_every_name():
    text = (ROOT / "docs/other_names.md").read_text()
    for library, names in NAMES.items():
        section = text.partition(f"\n## {library}\n")[2].partition("\n## ")[0]
        for name, here in names.items():
            assert f"| `{name}` | {here} |" in section, name
