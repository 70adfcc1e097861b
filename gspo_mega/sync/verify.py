"""Verification: does every server hold what the trainer holds?

SGLang reports success for unknown names and changes nothing, so its answer proves nothing. Only the server's tensors
after the update do.

The first part maps a checkpoint's tensors to SGLang's fused parameters, and computes the checksums that the server's
`/weights_checker` must report after an update. It is made for SGLang 0.5.23. The names are valid for any
tensor-parallel size, the checksums for size 1. The second part compares the servers' reports with these checksums
(`verify: tensors`) or with each other (`verify: replicas`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from gspo_mega.algorithm.rounding import OnLoad, served_experts, served_linear
from gspo_mega.checkpoint.hf_export import tensor_bytes
from gspo_mega.models.block_fp8 import is_linear, is_quantized, scale_name
from gspo_mega.models.delta_net import has_norm_around_zero
from gspo_mega.models.families import FAMILIES, TEXT_PART
from gspo_mega.models.spec import BlockFp8, ModelSpec
from gspo_mega.models.tensors import TensorEntry, checkpoint_tensors, hf_tensors, stackings
from gspo_mega.sync.servers import Fleet, ServerControl

# SGLang pads the rows of its embedding and head to this, with zeros.
_VOCABULARY_MULTIPLE = 64
# Latent attention's down-projections of queries, and of keys and values. SGLang has one matrix if the model has both.
_DOWN_PROJECTIONS = (".q_a_proj", ".kv_a_proj_with_mqa")
# Stacks of experts (`models/tensors.py`), and SGLang's names for them. SGLang keeps matrices [rows, columns], so those
# of stacks that have them transposed the other way round.
_STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)(|_bias)$")
_STACKS = {"gate_up_proj": "w13", "down_proj": "w2"}
# SGLang's names for the projections of a gated delta net, by the roles of the tensors in them.
_DELTA_PARTS = {
    **dict.fromkeys(("delta_qkvz", "delta_qkv", "delta_z"), "in_proj_qkvz"),
    **dict.fromkeys(("delta_ba", "delta_b", "delta_a"), "in_proj_ba"),
}
# On a CPU, SGLang reports the first 8 bytes of the SHA-256.
_DIGITS = 16


def server_tensor_name(spec: ModelSpec, entry: TensorEntry) -> str:
    """Return the name of the SGLang parameter that contains the tensor."""
    name = f"model.{entry.name.removeprefix(TEXT_PART)}" if entry.name.startswith(TEXT_PART) else entry.name
    if (stack := _STACK.search(name)) is not None:
        return f"{name[: stack.start()]}.experts.{_STACKS[stack[1]]}_weight{stack[2]}"
    owner, _, kind = name.rpartition(".")  # model.layers.0.self_attn.q_proj, weight
    if FAMILIES[spec.family].delta_net:
        # Its attention is a part of the layer itself there, and the projections of a delta net are two.
        owner = owner.replace(".self_attn.", ".")
        if entry.role in _DELTA_PARTS:
            return f"{owner.rpartition('.')[0]}.{_DELTA_PARTS[entry.role]}.{kind}"
    if entry.expert is not None:
        return f"{owner.partition('.experts.')[0]}.experts.{'w2' if entry.role == 'whole' else 'w13'}_{kind}"
    if entry.role in ("q", "k", "v"):
        return f"{owner.rpartition('.')[0]}.qkv_proj.{kind}"
    if entry.role in ("gate", "up"):
        return f"{owner.rpartition('.')[0]}.gate_up_proj.{kind}"
    if spec.latent is not None and spec.latent.query_rank is not None and owner.endswith(_DOWN_PROJECTIONS):
        return f"{owner.rpartition('.')[0]}.fused_qkv_a_proj_with_mqa.{kind}"
    return f"{owner}.{kind}"


def plus_one_name(spec: ModelSpec, entry: TensorEntry) -> str | None:
    """Return the name of what SGLang makes of the weight of a norm that multiplies by 1 + weight; None of others."""
    if not has_norm_around_zero(spec, entry):
        return None
    return f"{server_tensor_name(spec, entry).removesuffix('weight')}gemma_weight"


def server_tensor_names(spec: ModelSpec, stored: BlockFp8 | None = None, reports_scales: bool = True) -> dict[str, str]:
    """Return a mapping from every tensor that is sent to the SGLang parameter that contains it.

    `stored` says how quantised tensors are sent. `reports_scales` is false for SGLang on a GPU, whose checksum of a
    quantised parameter covers its weights and scales together, under the name of the weights.
    """
    names = {}
    for entry in checkpoint_tensors(spec):
        names[entry.name] = server_tensor_name(spec, entry)
        if is_quantized(stored, entry):
            names[scale_name(entry.name)] = scale_name(names[entry.name]) if reports_scales else names[entry.name]
    return names


@dataclass(frozen=True)
class ServerTensors:
    """The tensors of a server.

    `names` maps every tensor that is sent to the server's tensor that contains it. `own_scales` maps what the server
    makes itself of a tensor, to that tensor: scales, when it quantises what it loads, and 1 + the weight of a norm.
    """

    names: Mapping[str, str]
    own_scales: Mapping[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> set[str]:
        """The names of all tensors that a server must report."""
        return {*self.names.values(), *self.own_scales}


def server_tensors(
    spec: ModelSpec, stored: BlockFp8 | None = None, on_load: OnLoad | None = None, reports_scales: bool = True
) -> ServerTensors:
    """Return the tensors of a server that receives quantised tensors in layout `stored`, or quantises them
    `on_load`.
    """
    names = server_tensor_names(spec, stored, reports_scales)
    quantised = {names[entry.name] for entry in checkpoint_tensors(spec) if on_load and is_linear(entry)}
    made = {own_scale_name(name): name for name in quantised}
    made |= {one: names[entry.name] for entry in checkpoint_tensors(spec) if (one := plus_one_name(spec, entry))}
    return ServerTensors(names, made)


def own_scale_name(name: str) -> str:
    """Return the name of the scales that a server makes for its parameter `name`."""
    return f"{name}_scale"


def loads_with(name: str, before: str) -> bool:
    """Whether SGLang can load this tensor only in one request with `before`, the tensor before it.

    Down-projections that SGLang fuses, and their scales, must come together: SGLang drops one that comes without the
    other, and still reports success.
    """
    (owner, _, _), (previous, _, _) = name.rpartition("."), before.rpartition(".")
    return (
        owner.endswith(_DOWN_PROJECTIONS)
        and previous.endswith(_DOWN_PROJECTIONS)
        and owner.rpartition(".")[0] == previous.rpartition(".")[0]
    )


class ExpectedChecksums:
    """The checksums that a server of tensor-parallel size 1 on a CPU must report, computed tensor by tensor.

    The order of the table is the order of the rows in every fused parameter ([q; k; v], [gate; up], expert by expert)
    and in its scales. So one running hash per parameter is enough, and no fused tensor is built. Only parameters that a
    server quantises itself (`on_load`) are put together first, as the server does. `names` maps every tensor that is
    sent to the server's.
    """

    def __init__(self, spec: ModelSpec, stored: BlockFp8 | None = None, on_load: OnLoad | None = None) -> None:
        self.names = server_tensor_names(spec, stored)
        self._entries = {entry.name: entry for entry in checkpoint_tensors(spec)}
        self._plus_one = {name: one for name, entry in self._entries.items() if (one := plus_one_name(spec, entry))}
        self._transposed = {
            whole.name
            for whole, parts in stackings(hf_tensors(spec))
            if len(whole.shape) == 3 and parts[0].stack is not None and parts[0].stack.transposed
        }
        self._vocabulary = {name: e.shape for name, e in self._entries.items() if e.sharding == "vocabulary"}
        self._on_load: OnLoad | None = on_load
        self._num_experts = 0 if spec.moe is None else spec.moe.num_experts
        self._missing = Counter(
            self.names[name] for name, entry in self._entries.items() if on_load and is_linear(entry)
        )
        self._parts: dict[str, list[torch.Tensor]] = {}
        self._hashes: dict[str, Any] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the next tensor in the order of the table, a weight before its scales: whole as it is sent, and local."""
        if self.names[name] in self._missing:
            self._add_part(name, tensor)
            return
        running = self._hashes.setdefault(self.names[name], hashlib.sha256())
        entry = self._entries.get(name)  # None for scales
        if name in self._transposed:
            tensor = tensor.transpose(1, 2)
        running.update(tensor_bytes(tensor.float() if entry is not None and entry.served_wide else tensor))
        if (plus_one := self._plus_one.get(name)) is not None:
            self._hashes[plus_one] = hashlib.sha256(tensor_bytes(tensor + 1))
        if (shape := self._vocabulary.get(name)) is not None:
            padding = -shape[0] % _VOCABULARY_MULTIPLE
            running.update(bytes(padding * shape[1] * tensor.element_size()))

    def _add_part(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a part of a parameter that the server quantises. With the last part, quantise it as the server does."""
        assert self._on_load is not None
        fused = self.names[name]
        parts = self._parts.setdefault(fused, [])
        parts.append(tensor.detach().to("cpu", copy=True))
        if len(parts) < self._missing[fused]:
            return
        del self._parts[fused]
        if self._entries[name].expert is None:
            data, scale = served_linear(torch.cat(parts), self._on_load)
        else:
            rows, columns = sum(part.shape[0] for part in parts) // self._num_experts, tensor.shape[1]
            data, scale = served_experts(torch.cat(parts).view(self._num_experts, rows, columns), self._on_load)
        self._hashes[fused] = hashlib.sha256(tensor_bytes(data))
        self._hashes[own_scale_name(fused)] = hashlib.sha256(tensor_bytes(scale))

    def checksums(self) -> dict[str, str]:
        return {name: running.hexdigest()[:_DIGITS] for name, running in self._hashes.items()}


def differences(found: Mapping[str, str], expected: Mapping[str, str], limit: int = 5) -> str | None:
    """Return in words how a server's checksums differ from the expected ones, or None if they are equal.

    No name is exempt, because SGLang itself leaves its rotary caches out of the report.
    """
    parts = []
    for words, names in (
        ("the server lacks", expected.keys() - found.keys()),
        ("the server has besides", found.keys() - expected.keys()),
        ("differ in value", {n for n in expected.keys() & found.keys() if expected[n] != found[n]}),
    ):
        if names:
            more = f" and {len(names) - limit} more" if len(names) > limit else ""
            parts.append(f"{words}: {', '.join(sorted(names)[:limit])}{more}")
    if parts and expected.keys() == found.keys() and all(expected[n] != found[n] for n in expected):
        parts.append(
            "all of them: a server on a GPU, or with another dtype, reports other checksums; set publish.verify:"
            " replicas for such servers"
        )
    return "; ".join(parts) or None


# One mapping from tensor name to checksum for each rank of a server.
Reported = list[dict[str, str]]


@dataclass
class Baseline:
    """The trainer's digests, and the reports of servers by tensor-parallel size: of each tensor from the last publish
    that verified it.
    """

    digests: dict[str, str] = field(default_factory=dict)
    reported: dict[int, Reported] = field(default_factory=dict)


def read_reports(fleet: Fleet, weight_version: int, skip: Sequence[str] = ()) -> dict[str, Reported]:
    """Return every server's checksums by server id. Servers that report another version leave the fleet. `skip`: pieces
    of the names of tensors that need not be reported.
    """
    for server_id, version in fleet.each(lambda s, left: s.weight_version(deadline_seconds=left)).items():
        if version != weight_version:
            fleet.fail(
                _active_server(fleet, server_id),
                f"{server_id}: holds weight_version {version} after version {weight_version} was sent",
            )
    more = {"skip": skip} if skip else {}
    return cast(dict[str, Reported], fleet.each(lambda s, left: s.checksums(deadline_seconds=left, **more)))


def verified_only(reports: dict[str, Reported], tensors: ServerTensors, chosen: Collection[str]) -> dict[str, Reported]:
    """Return `reports` without the server's known tensors that are not in `chosen`. SGLang reports some that it was
    told to skip. Unknown ones stay, because a server must not have any.
    """
    known = tensors.expected
    return {
        server: [{n: value for n, value in rank.items() if n in chosen or n not in known} for rank in reported]
        for server, reported in reports.items()
    }


def check_tensors(fleet: Fleet, reports: dict[str, Reported], expected: dict[str, str]) -> None:
    """Check that every server has exactly the expected tensors and checksums. Servers that differ leave the fleet."""
    for server_id, reported in reports.items():
        found = reported[0] if len(reported) == 1 else {}
        wrong = differences(found, expected)
        if len(reported) != 1:
            wrong = (
                f"it has {len(reported)} ranks, and checksums can be predicted for one only; set publish.verify: auto"
                " or replicas"
            )
        if wrong:
            fleet.fail(
                _active_server(fleet, server_id), f"{server_id}: does not hold the weights that were sent: {wrong}"
            )


def check_replicas(
    fleet: Fleet,
    tensors: ServerTensors,
    reports: dict[str, Reported],
    digests: dict[str, str],
    baseline: Baseline,
    chosen: Collection[str] | None = None,
) -> Baseline:
    """Check that servers agree, and that since each tensor was verified last, exactly those changed that the trainer
    changed.

    This cannot detect that one part of a fused tensor reached no server while the rest did. `transaction.py` proves
    once per server start that updates reach every part.

    A tensor that servers quantise themselves may stay as it was although the trainer's changed, because rounding may
    hide a small change. It must not change if the trainer's did not. `digests` are the trainer's, by the names that are
    sent. `chosen`: the server's tensors that are verified, which are those of the reports; None for all. Servers that
    fail leave the fleet. Returns the new baseline, which is valid if a server is left.
    """
    expected = tensors.expected if chosen is None else set(chosen)
    now = {name: digest for name, digest in digests.items() if tensors.names[name] in expected}
    changed_here = {tensors.names[n] for n, digest in now.items() if baseline.digests.get(n) != digest}
    for server_id, reported in reports.items():
        server = _active_server(fleet, server_id)
        problem = _names_problem(reported, expected)
        before = baseline.reported.get(server.tensor_parallel)
        if problem is None and before is not None:
            problem = _change_problem(reported, before, changed_here, tensors.own_scales)
        if problem:
            fleet.fail(server, f"{server_id}: {problem}")
    _check_agreement(fleet, reports)
    # Reports for a size that no server here has stay valid for tensors that are unchanged.
    stale = changed_here | {scale for scale, name in tensors.own_scales.items() if name in changed_here}
    kept = {
        size: [{n: value for n, value in rank.items() if n not in stale} for rank in ranks]
        for size, ranks in baseline.reported.items()
    }
    for server in fleet.active:
        size, found = server.tensor_parallel, reports[server.server_id]
        kept[size] = [{**then, **rank} for then, rank in zip(kept.get(size, [{} for _ in found]), found, strict=True)]
    return Baseline({**baseline.digests, **now}, kept)


def _names_problem(reported: Reported, expected: set[str]) -> str | None:
    for rank, found in enumerate(reported):
        if found.keys() != expected:
            odd = sorted(found.keys() ^ expected)
            return f"rank {rank} holds other tensors than the model has: {', '.join(odd[:5])}"
    return None


def _change_problem(
    reported: Reported, before: Reported, changed_here: set[str], own_scales: Mapping[str, str]
) -> str | None:
    """Return in words which tensors changed only here or only there, or None.

    A tensor that the trainer changed must change on at least one rank of the server, unless the server rounds it. Any
    other tensor must change on none. A tensor that `before` lacks is new, and nothing is known of it.
    """
    pairs = list(zip(reported, before, strict=True))
    changed_here = {name for name in changed_here if any(name in then for _, then in pairs)}
    changed_there = {
        own_scales.get(name, name) for now, then in pairs for name in now if name in then and now[name] != then[name]
    }
    parts = [
        f"{words}: {', '.join(sorted(found)[:5])}{f' and {len(found) - 5} more' if len(found) > 5 else ''}"
        for words, found in (
            ("changed in the trainer and not there", changed_here - changed_there - set(own_scales.values())),
            ("changed there and not in the trainer", changed_there - changed_here),
        )
        if found
    ]
    return "; ".join(parts) or None


def _check_agreement(fleet: Fleet, reports: dict[str, Reported]) -> None:
    """Check that servers of one tensor-parallel size agree. Those outside the majority fail; without one, all fail."""
    for size in {s.tensor_parallel for s in fleet.active}:
        alike = {
            s.server_id: json.dumps(reports[s.server_id], sort_keys=True)
            for s in fleet.active
            if s.tensor_parallel == size
        }
        (most, count), *others = Counter(alike.values()).most_common(2)
        no_majority = bool(others) and others[0][1] == count
        for server_id, report in alike.items():
            if no_majority:
                fleet.fail(
                    _active_server(fleet, server_id),
                    f"{server_id}: servers hold different weights, and no majority says which are right",
                )
            elif report != most:
                fleet.fail(
                    _active_server(fleet, server_id),
                    f"{server_id}: holds other weights than {count} of {len(alike)} servers",
                )


def _active_server(fleet: Fleet, server_id: str) -> ServerControl:
    return next(s for s in fleet.active if s.server_id == server_id)
