"""The smallest valid configuration, as an object and as a file's text; tests name what they change."""

from __future__ import annotations

from typing import Any

from gspo_mega.config.schema import Config


def make_config(**sections: Any) -> Config:
    """The smallest valid configuration, in fp32. A section is merged into the one below; any other value replaces it."""
    values: dict[str, Any] = dict(
        run=dict(name="test"),
        model=dict(path="unused"),
        precision="fp32",
        batch=dict(prompts_per_step=4, group_size=4, micro_batch_tokens=512),
        optimizer=dict(lr=1e-3),
        data=dict(path="unused.jsonl", max_prompt_tokens=64),
        reward=dict(functions=(dict(function="exact_match"),)),
        rollout=dict(max_new_tokens=64),
    )
    for name, section in sections.items():
        merge = isinstance(section, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **section} if merge else section
    return Config.model_validate(values)


def smallest_yaml(prompts_per_step: int = 4, model: str = "m", data: str = "train.jsonl", more: str = "") -> str:
    """A YAML file with the keys that have no default, and `more` behind them."""
    return f"""\
run: {{name: test}}
model: {{path: {model}}}
batch: {{prompts_per_step: {prompts_per_step}, group_size: 4, micro_batch_tokens: 256}}
optimizer: {{lr: 1e-6}}
data: {{path: {data}, max_prompt_tokens: 16}}
reward: gsm8k
rollout: {{max_new_tokens: 32}}
{more}"""
