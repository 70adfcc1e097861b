"""One configuration of up to four ranks for which the plan and the engine have to agree, and what the plan says."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.config import load_config, render_config
from gspo_mega.config.schema import Config
from gspo_mega.plan import plan_run

PROMPT_TOKENS, RESPONSE_TOKENS = 6, 18
DEEPSEEK = "DeepseekV3ForCausalLM"


@dataclass
class Case:
    """`model`: a config.json. `values`: a configuration's sections. `change`: what was done to a valid one, empty for
    one left as it was. `reference`: another shape's config.json for the KL term's reference, or None for the policy's
    own.
    """

    number: int
    ranks: int
    model: dict[str, Any]
    values: dict[str, dict[str, Any]]
    change: str = ""
    reference: dict[str, Any] | None = None

    def config(self, model_path: Path, reference_path: Path | None) -> Config:
        sections: dict[str, Any] = {name: dict(section) for name, section in self.values.items()}
        scalars = sections.pop("top", {})
        if reference_path is not None:
            sections.setdefault("kl", {})["reference_path"] = str(reference_path)
        return Config.model_validate_json(
            json.dumps(
                dict(
                    run=dict(name="verdict"),
                    model=dict(path=str(model_path)),
                    # On recorded rollouts: it is the ranks that are judged, not what a server could hold.
                    train=dict(num_steps=1, from_rollouts="unused"),
                    data=dict(path="unused.jsonl", max_prompt_tokens=PROMPT_TOKENS),
                    reward=dict(functions=[dict(function="exact_match")]),
                    cluster=dict(ranks_per_node=self.ranks),
                    **scalars,
                    **sections,
                )
            )
        )

    @property
    def described(self) -> str:
        shape = {
            key: value
            for key, value in self.model.items()
            if key.startswith(
                ("n_", "num_", "hidden_size", "intermediate", "moe_", "vocab", "tie_", "head_dim", "q_", "v_", "first_")
            )
        }
        return (
            f"case {self.number} ({self.change or 'as generated'}): {self.ranks} ranks,"
            f" {self.model['architectures'][0]} {shape}, {self.values}"
        )


def plan_says(config: Config, folder: Path) -> str | None:
    """Why the plan refuses the configuration, None where it does not. Every line of a refusal names file and line."""
    file = folder / "verdict.yaml"
    file.write_text(render_config(config))
    try:
        plan_run(load_config(file, (), "train"), "cpu")
    except GspoMegaError as error:
        for line in str(error).splitlines():
            assert re.match(rf"{re.escape(str(file))}:\d+:\d+: [a-z_.0-9]+: ", line), f"no place in the refusal: {line}"
        return str(error)
    return None
