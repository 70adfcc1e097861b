"""How many positions of a step are computed if packs share prefixes (`batch.share_prefixes`), before any row exists.

Lengths are not known then, so all prompts and all responses of a step have the planned ones (`derived.mean_tokens`),
and rows have only their prompt in common: what branches of an episode, equal responses or system prompts share with
`full` comes on top. `step_positions` cuts the groups of each mini-batch into packs by the rules of `data/packing.py`,
in plain arithmetic. No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from gspo_mega.config.derived import mean_tokens
from gspo_mega.config.schema import Config
from gspo_mega.models.spec import ModelSpec
from gspo_mega.models.tensors import layer_flops
from gspo_mega.plan.layout import Layout


@dataclass(frozen=True)
class Positions:
    """`tokens`: positions of a step that are computed. `pairs`: how many pairs of a position and one that it attends
    to, itself included, these have in one layer with full attention.
    """

    tokens: int
    pairs: int

    @property
    def as_long_as(self) -> float:
        """The length of a sequence whose tokens attend to as many positions in the mean."""
        return 2 * self.pairs / self.tokens - 1

    def times(self, number: int) -> Positions:
        return Positions(number * self.tokens, number * self.pairs)


@dataclass(frozen=True)
class StepPositions:
    """The positions of a step's rows at planned lengths: of `rows` as they are, as packs have them (`computed`), and
    with every prompt computed once (`least`). `num_repeated`: how many prompts are computed again because their rows
    are in several packs. `num_trained`: the tokens that are trained.
    """

    rows: Positions
    computed: Positions
    least: Positions
    num_repeated: int
    num_trained: int

    @property
    def shared_fraction(self) -> float:
        """What `speed/shared_prefix_fraction` is in a step with these lengths."""
        return 1 - self.computed.tokens / self.rows.tokens

    def fewer_flops(self, spec: ModelSpec) -> tuple[float, float]:
        """How many times fewer FLOPs the layers take in `computed` and in `least` than in `rows`."""
        rows, *others = (layer_flops(spec, one.tokens, one.pairs) for one in (self.rows, self.computed, self.least))
        return rows / others[0], rows / others[1]


def step_positions(config: Config, layout: Layout) -> StepPositions:
    """Return the positions of a step. Rows of a group share the first tokens of `data.max_prompt_tokens // 2`, the
    planned prompt; what comes between the turns of an episode is each row's own.
    """
    batch = config.batch
    before, sampled = mean_tokens(config)
    prompt = max(1, config.data.max_prompt_tokens // 2)
    own = before + sampled - prompt
    num_rows = batch.prompts_per_step * batch.group_size
    rows = _tree(prompt, own, 1).times(num_rows)
    least = _tree(prompt, own, batch.group_size).times(batch.prompts_per_step)
    num_trained = num_rows * sampled
    if batch.share_prefixes == "off":
        return StepPositions(rows, rows, least, 0, num_trained)
    num_pieces = sum(
        number * _num_pieces(num_groups, batch.group_size, prompt, own, batch.micro_batch_tokens, layout)
        for num_groups, number in _mini_batches(batch.prompts_per_step, batch.num_mini_batches).items()
    )
    repeated = num_pieces - batch.prompts_per_step
    again = _tree(prompt, 0, 1).times(repeated)
    computed = Positions(least.tokens + again.tokens, least.pairs + again.pairs)
    return StepPositions(rows, computed, least, repeated, num_trained)


def _tree(prompt: int, own: int, num_rows: int) -> Positions:
    """A prompt and `num_rows` continuations of `own` tokens each."""
    of_prompt, of_row = prompt * (prompt + 1) // 2, own * prompt + own * (own + 1) // 2
    return Positions(prompt + num_rows * own, of_prompt + num_rows * of_row)


def _mini_batches(num_groups: int, num_mini_batches: int) -> Counter[int]:
    """How many mini-batches have how many groups: {groups: mini-batches}."""
    number = min(num_groups, num_mini_batches)
    least, larger = divmod(num_groups, number)
    return Counter({least + 1: larger, least: number - larger})


def _num_pieces(num_groups: int, group_size: int, prompt: int, own: int, budget_tokens: int, layout: Layout) -> int:
    """Return into how many parts the packs of a mini-batch cut its groups, as `packing.plan_tree_packs` does: parts
    that fit into a pack, and of several divisions over ranks the one whose dearest rank is cheapest.
    """
    room = budget_tokens // layout.pack_multiple_tokens * layout.pack_multiple_tokens
    crossover, data = layout.attention_crossover_tokens, layout.data
    most_rows = max(1, (room - prompt) // max(1, own))

    def cost(num_rows: int) -> float:
        size = prompt + own
        return prompt + num_rows * own + (prompt**2 + num_rows * (size**2 - prompt**2)) / crossover if num_rows else 0.0

    def cut(num_parts: int) -> list[int]:
        """The rows of each part of one group."""
        num_parts = min(group_size, max(1, num_parts))
        parts = Counter(min(num_parts - 1, int((row + 0.5) * num_parts / group_size)) for row in range(group_size))
        return [min(most_rows, rows - start) for rows in parts.values() for start in range(0, rows, most_rows)]

    def division(num_parts: int, num_cut: int) -> list[int]:
        """All parts of the mini-batch if `num_cut` of its groups are cut into `num_parts`."""
        return num_cut * cut(num_parts) + (num_groups - num_cut) * cut(1)

    divisions = [division(1, 0)]
    if data > 1:
        mean = num_groups * cost(group_size) / data
        divisions += [division(math.ceil(parts * cost(group_size) / mean - 1e-9), num_groups) for parts in (1, 2)]
        divisions.append(division(data, num_groups % data))

    def dearest_rank(parts: list[int]) -> float:
        ranks = [0.0] * data
        for part in sorted(map(cost, parts), reverse=True):
            ranks[ranks.index(min(ranks))] += part
        return max(ranks)

    return len(min(divisions, key=dearest_rank))
