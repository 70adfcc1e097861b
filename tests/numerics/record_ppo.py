"""Record what OpenRLHF's and torchrl's own code of PPO computes, for `test_ppo_oracle.py`.

    pip download --no-deps openrlhf==0.11.2 torchrl==0.14.1 && unzip -d UNPACKED each of them
    python tests/numerics/record_ppo.py UNPACKED tests/numerics/data/ppo_recorded.json

Neither the product nor its tests need them, and neither is installed: whole functions are taken from their files as they
stand, without the modules around them, which would want a cluster. OpenRLHF: advantages and returns
(`get_advantages_and_returns`), `masked_normalize`, `ValueLoss` and its gradient. torchrl: advantages of a trajectory that
is cut off and bootstrapped, which OpenRLHF has none of (`generalized_advantage_estimate`).

All masks end a row. OpenRLHF sets values of masked tokens inside a row to 0 and discounts over them, where this project
skips what an environment said; there they differ on purpose.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import torch

COLUMNS, ROWS = 12, 6
GAE = ((1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0))
LOSSES = ((None, True), (0.2, True), (0.2, False), (0.05, True))


def taken(file: Path, *names: str) -> dict[str, Any]:
    """Functions and classes of a file by name, without their decorators, in a namespace of torch and each other."""
    found = {node.name: node for node in ast.walk(ast.parse(file.read_text())) if getattr(node, "name", "") in names}
    for node in found.values():
        node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module([*future, *found.values()], []))
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec(compile(module, str(file), "exec"), space)
    return space


def only(folder: Path, pattern: str) -> Path:
    (file,) = folder.rglob(pattern)
    return file


def record(unpacked: Path) -> dict[str, Any]:
    maker = taken(only(unpacked, "ppo_utils/experience_maker.py"), "get_advantages_and_returns")
    utils = taken(only(unpacked, "openrlhf/models/utils.py"), "masked_mean", "masked_normalize")
    losses = taken(only(unpacked, "openrlhf/models/loss.py"), "aggregate_loss", "ValueLoss")
    losses["masked_mean"] = utils["masked_mean"]
    torchrl = taken(only(unpacked, "objectives/value/functional.py"), "generalized_advantage_estimate")
    torch.set_default_dtype(torch.float64)  # torchrl multiplies gamma and lambda by tensors of integers
    generator = torch.Generator().manual_seed(0)

    def random(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)

    cases = []
    for discount, trace in GAE:
        for clip, by_token in LOSSES:
            lengths = torch.randint(1, COLUMNS + 1, (ROWS,), generator=generator)
            mask = (torch.arange(COLUMNS) < lengths[:, None]).double()
            old, rewards = random(), random(0.1) + random() * (torch.arange(COLUMNS) == lengths[:, None] - 1)
            advantages, returns = maker["get_advantages_and_returns"](None, old, rewards, mask, discount, trace)
            flat = advantages[mask > 0][None]
            white = utils["masked_normalize"](flat, torch.ones_like(flat), dim=1)[0]
            values = (old + random(0.2)).requires_grad_()
            loss = losses["ValueLoss"](clip, by_token)(values, old, returns, mask)
            loss.backward()
            behind, cut = random()[:, 0], []
            for row, length in enumerate(lengths.tolist()):
                state = old[row, :length, None]
                done = torch.arange(length)[:, None] == length - 1
                following = torch.cat([state[1:], behind[row][None, None]])
                own = rewards[row, :length, None]
                arguments = (discount, trace, state, following, own, done, torch.zeros_like(done))
                cut += torchrl["generalized_advantage_estimate"](*arguments)[0][:, 0].tolist()
            assert values.grad is not None
            active = mask > 0
            cases.append(
                dict(discount=discount, trace=trace, clip=clip, by_token=by_token, lengths=lengths.tolist())
                | dict(loss=loss.item(), behind=behind.tolist(), cut_off_advantages=cut, white=white.tolist())
                | {
                    name: tensor.detach()[active].tolist()
                    for name, tensor in dict(
                        rewards=rewards,
                        old_values=old,
                        values=values,
                        advantages=advantages,
                        returns=returns,
                        gradient=values.grad,
                    ).items()
                }
            )
    versions = sorted(folder.name.removesuffix(".dist-info") for folder in unpacked.rglob("*.dist-info"))
    return {"recorded_with": versions, "cases": cases}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
