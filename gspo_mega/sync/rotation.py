"""Which of a server's tensors one publish verifies (`publish.verify_all_every`).

`Rotation` divides the tensors into as many parts of about equal bytes as the key says, in the order of the model's
table, so that a part has whole layers where it can. Publishes verify the parts in turns. `skipped` writes the rest as
SGLang's weight checker takes it: as pieces of names, and a tensor whose name has such a piece in it is not hashed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

_LAYER = re.compile(r".*?\.layers\.\d+\.")


class Rotation:
    """The tensors of a server in `num_parts` parts. Each tensor is in at least one of them."""

    def __init__(self, sizes: Mapping[str, int], num_parts: int) -> None:
        """`sizes`: the bytes of each of the server's tensors, by name, in the order of the table."""
        units = _units(sizes)
        total = sum(sizes.values())
        parts: list[list[str]] = [[] for _ in range(num_parts)]
        before = 0
        for unit in units:
            size = sum(sizes[name] for name in unit)
            middle = before + size / 2
            parts[min(num_parts - 1, int(middle * num_parts / max(1, total)))] += unit
            before += size
        # With fewer tensors than parts, or a very large tensor: no publish is left without one to verify.
        self._parts = [
            frozenset(part or units[index * len(units) // num_parts] if units else ())
            for index, part in enumerate(parts)
        ]

    def part(self, turn: int, num_turns: int = 1) -> frozenset[str]:
        """Return the names of the tensors that the publish number `turn` verifies, if each is verified in `num_turns`
        publishes in a row.
        """
        return frozenset().union(*(self._parts[(turn + more) % len(self._parts)] for more in range(num_turns)))


def _units(names: Iterable[str]) -> list[list[str]]:
    """Return the tensors that can only be chosen together: those whose name begins with another one's, such as scales.

    Skipping `x.weight` would also skip `x.weight_scale`, because a piece of its name is enough.
    """
    names = list(names)
    root, units = "", {}
    roots = {name: (root := name if not root or not name.startswith(root) else root) for name in sorted(names)}
    for name in names:
        units.setdefault(roots[name], []).append(name)
    return list(units.values())


def skipped(names: Iterable[str], chosen: Collection[str]) -> list[str]:
    """Return pieces of names that occur in all of `names` that are not chosen, and in none that is: a layer's beginning
    for a whole layer, and otherwise the tensor's whole name.
    """
    kept_layers = {layer[0] for name in chosen if (layer := _LAYER.match(name)) is not None}
    pieces: dict[str, None] = {}
    for name in names:
        if name not in chosen:
            layer = _LAYER.match(name)
            pieces[name if layer is None or layer[0] in kept_layers else layer[0]] = None
    return list(pieces)
