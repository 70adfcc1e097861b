"""Store the reference on disk, and compare the numbers of other cases with it.

The tolerances are those of fp32 rounding, because a layout only changes the order of sums; other precisions have their
own. Optimizer steps are compared with the reference's, and their norms with the gradients that they are computed from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch

from gspo_mega.base.run_folder import atomic_write_json, read_json
from gspo_mega.config.precision import is_sharp_fp8
from gspo_mega.config.schema import CertifyCase, Config, Precision
from gspo_mega.verify.certify.batch import Draws
from gspo_mega.verify.certify.cases import CRITIC_KINDS
from gspo_mega.verify.certify.measure import Edges, Numbers, Tensors, num_route_flips
from gspo_mega.verify.certify.steps import CaseSteps

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Found = Iterator[tuple[float, str]]
# How many numbers of a tensor may be zero by chance, because their terms cancel to the last bit.
_ZEROS, _ZEROS_SHARE = 3, 1e-6
# The kinds of difference that rounding causes; the others count what must not occur.
_ROUNDED_KINDS = ("log_prob", "loss", "gradient", "weights", "norm", "steps")
_CLIP_EPS = 1e-6  # Megatron adds it to the norm before dividing by it


def norm_differences(got: CaseSteps, clip: float) -> Found:
    """Yield (relative difference, place) of each step's norm, by kind of parameter, from that of whole tensors, and of
    the clipped gradient's norm from what clipping to `clip` must leave; a `clip` of 0 does not clip.
    """
    for step, (norm, counted, whole) in enumerate(zip(got.norms, got.counted, got.whole, strict=False), 1):
        total = sum(whole.values())
        for kind, squares in whole.items():
            # Half the relative difference of squares is that of their roots.
            yield _relative(abs(counted[kind] - squares) / 2, squares), f"step {step}: {kind}, counted in the norm"
        left = norm if clip <= 0 else norm * min(1.0, clip / (norm + _CLIP_EPS))
        yield _relative(abs(math.sqrt(total) - left), left), f"step {step}: the gradient after clipping"


def differences_of_norm(got: CaseSteps, want: CaseSteps) -> Found:
    """Yield (relative difference, place) of the norm of each step from the reference's."""
    for step, (norm, wanted) in enumerate(zip(got.norms, want.norms, strict=False), 1):
        yield _relative(abs(norm - wanted), wanted), f"step {step}: the norm"


def differences_of_steps(got: CaseSteps, want: CaseSteps) -> Found:
    """Yield (relative difference, place) of each step's clipped gradient, in the tensor where it is largest; of its
    routers' counts and losses; and of Adam's moments, if both took equally many steps.
    """
    if got.names != want.names:
        yield math.inf, "the names of the tensors"
        return
    sketches = [(f"step {n}: clipped gradient of", *pair) for n, pair in enumerate(zip(got.sketches, want.sketches), 1)]
    if len(got.norms) == len(want.norms):
        sketches += [
            (f"after the steps: {name} of", *pair)
            for name, *pair in zip(("first moments", "second moments"), got.moments, want.moments)
        ]
    for text, ours, theirs in sketches:
        error = np.sqrt(np.square(ours[:, 2:] - theirs[:, 2:]).mean(axis=1))
        size = np.sqrt(theirs[:, 0])
        relative = np.where(size > 0, error / np.where(size > 0, size, 1.0), np.sqrt(ours[:, 0]))
        worst = int(np.argmax(np.where(np.isnan(relative), np.inf, relative)))
        yield float(relative[worst]), f"{text} {got.names[worst]}"
    for step, (ours, theirs) in enumerate(zip(got.routing, want.routing, strict=False), 1):
        for key in sorted(ours.keys() | theirs.keys()):
            value, wanted = ours.get(key, math.nan), theirs.get(key, math.nan)
            yield _relative(abs(value - wanted), abs(wanted)), f"step {step}: routing/{key}"


def differences_of_state(got: CaseSteps, want: CaseSteps, counts_zeros: bool) -> Iterator[str]:
    """Yield what must be equal and is not: skipped steps, optimizer settings of parameters, buffers, copies on several
    ranks, and with `counts_zeros` the number of zeros in a gradient.
    """
    for step, (ours, theirs) in enumerate(zip(got.skipped, want.skipped, strict=False), 1):
        if ours != theirs:
            yield f"step {step} is {'skipped' if ours else 'not skipped'}"
    for step, (ours, theirs) in enumerate(zip(got.settings, want.settings, strict=False), 1):
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                yield f"step {step}: lr, weight decay, betas, eps of {name}: {ours.get(name)} for {theirs.get(name)}"
    if counts_zeros and got.names == want.names:
        for step, (ours, theirs) in enumerate(zip(got.sketches, want.sketches), 1):
            by_chance = _ZEROS + _ZEROS_SHARE * np.array(want.sizes)
            for place in np.flatnonzero(np.abs(ours[:, 1] - theirs[:, 1]) > by_chance):
                yield (
                    f"step {step}: {ours[place, 1]:.0f} zeros in the gradient of {got.names[place]}, for"
                    f" {theirs[place, 1]:.0f}"
                )
    for name in sorted(got.buffers.keys() | want.buffers.keys()):
        if got.buffers.get(name) != want.buffers.get(name):
            yield f"buffer {name}"
    for name in got.copies:
        yield f"{name} is not the same on all ranks that hold it"


def _relative(error: float, scale: float) -> float:
    return error / scale if scale > 0 else error


Kind = TypeVar("Kind")


class Weights(Protocol):
    """Whole tensors by name, as a checkpoint folder provides them."""

    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Tolerance:
    """How far a case may differ from the reference. `log_prob`: nats per token, absolute. `loss`: relative to
    mean |s_i A_i|. `gradient`: relative L2 of each tensor. `weights`: relative L2 of the whole update. `reached`: the
    share of tokens whose log-prob differs by more than fp32's tolerance; None if it is not compared. For optimizer
    steps (`steps.py`): `norm`, relative; `steps`, relative L2 of each tensor, relative for routers' sums; `state`, the
    number of things that must be equal and are not. `carried`, of a case that continues another: the number of saved
    things that were read otherwise, to the bit (`continued.py`).
    """

    log_prob: float
    loss: float
    gradient: float
    weights: float
    reached: float | None = None
    norm: float = 1e-5
    steps: float = 3e-5  # later gradients are taken at weights that differ, and squares differ by twice as much
    state: float = 0.0
    carried: float = 0.0


def _fp8(log_prob: float, loss: float, gradient: float, weights: float, reached: float | None = None) -> Tolerance:
    """Return the tolerance of an FP8 recipe. A norm is off by no more than its parts; a square, as in Adam's second
    moment, by twice that.
    """
    return Tolerance(log_prob, loss, gradient, weights, reached, norm=gradient, steps=max(2 * gradient, weights))


TOLERANCES = {
    "fp32": Tolerance(log_prob=1e-5, loss=1e-5, gradient=1e-5, weights=1e-4),
    # 8 bits: each product is rounded by up to 2^-8, and exported weights by about the size of the update.
    "bf16": Tolerance(log_prob=1e-1, loss=1e-3, gradient=1e-1, weights=5e-1, norm=5e-2, steps=3e-1),
    # Derived in RESULTS.md for the certified models; not yet measured on a GPU.
    "fp8": _fp8(log_prob=5e-1, loss=1e-2, gradient=3e-1, weights=8e-1),
}
# If a whole tensor has one scale, another packing changes it, and then every number is rounded differently.
_SCALE_PER_TENSOR = _fp8(log_prob=1.0, loss=1e-2, gradient=9e-1, weights=8e-1)
# With the reference's scales, and fp32 between the products, most tokens have no number that rounds differently. e5m2,
# the format of gradients with one scale per tensor, has coarser steps.
_BLOCKS = _fp8(log_prob=5e-1, loss=5e-3, gradient=2.3e-1, weights=5.4e-1, reached=0.5)
_SHARP = {
    "blockwise": _BLOCKS,
    "mxfp8": _BLOCKS,
    "delayed": _fp8(log_prob=5e-1, loss=5e-3, gradient=3.2e-1, weights=6.4e-1, reached=0.5),
    # Scales are powers of two, and equal the reference's except for the smallest numbers.
    "tensorwise": _fp8(log_prob=5e-1, loss=5e-3, gradient=3.9e-1, weights=7.0e-1, reached=0.75),
}


def tolerance_of(config: Config, case: CertifyCase) -> Tolerance:
    """Return how far a case of this precision and FP8 recipe may differ."""
    if config.precision == "fp8" and case.continued_from is not None:
        # It begins at weights that differ from the reference's, so every number is rounded differently.
        return _SCALE_PER_TENSOR
    if is_sharp_fp8(config.precision, config.certify) and config.fp8.recipe not in case.other_scales:
        return _SHARP[config.fp8.recipe]
    if config.precision == "fp8" and config.fp8.recipe in ("tensorwise", "delayed"):
        return _SCALE_PER_TENSOR
    found = TOLERANCES[config.precision]
    if config.lora is not None and config.precision == "fp32":
        # An adapter's B starts at zero, so it consists of updates only, and the gradient of its A is a multiple of B:
        # later gradients may differ by as much as updates may.
        found = replace(found, steps=found.weights)
    if case.continued_from is not None and config.precision == "fp32":
        # It begins at weights that differ from the reference's by what updates may differ, and gradients follow them.
        return replace(found, gradient=found.steps, steps=found.weights)
    return found


@dataclass
class CaseDifference:
    """The largest difference of one kind, and its place."""

    value: float = 0.0
    place: str = ""

    def note(self, value: float, place: str) -> None:
        # NaN counts as larger than everything, also than what comes after it.
        if not (value <= self.value or math.isnan(self.value)):
            self.value, self.place = value, place


class Reference:
    """A reference's folder: numbers.json, and one float32 .npy per tensor of the gradient and the trained weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def recorded_file(self) -> Path:
        """Old log-probs of the recorded batch, [sum R] float32."""
        return self.folder / "recorded.npy"

    @property
    def draws_file(self) -> Path:
        """How often each prompt and response was drawn again."""
        return self.folder / "draws.json"

    def rounding_file(self, precision: Precision) -> Path:
        """Return the file of what moving every weight to its neighbour changed; absent if no case of this precision
        was `rounded`.
        """
        return self.folder / f"rounding.{precision}.json"

    def draws(self) -> Draws:
        """Return the draws of the recorded batch. Raises FileNotFoundError if the reference left none."""
        values: dict[str, Any] | None = read_json(self.draws_file)
        if values is None:
            raise FileNotFoundError(f"{self.draws_file}: the reference's draws are missing; certify its case again")
        return Draws(**values)

    @property
    def recorded_on_edges_file(self) -> Path:
        """Old log-probs that put every sequence on a clip edge, with tied routers, [sum R] float32."""
        return self.folder / "recorded_on_edges.npy"

    @property
    def continued(self) -> Reference:
        """The same reference after its first `num_steps` steps, for cases that continue others: a batch recorded then,
        and everything that followed.
        """
        return self.beside("continued")

    def beside(self, name: str) -> Reference:
        """Return the folder of another model of the same reference, such as its critic."""
        return Reference(self.folder / name)

    def save(self, name: str, numbers: DataclassInstance) -> None:
        """Write JSON, and arrays as .npy files beside it, as `load` reads them."""
        values = asdict(numbers)
        for key, value in values.items():
            if isinstance(value, np.ndarray):
                np.save(self.folder / f"{name}.{key}.npy", value)
                values[key] = None
        atomic_write_json(self.folder / f"{name}.json", values)

    def load(self, name: str, kind: type[Kind]) -> Kind:
        """Return what `save` wrote under this name. Raises FileNotFoundError if it wrote nothing."""
        file = self.folder / f"{name}.json"
        values: dict[str, Any] | None = read_json(file)
        if values is None:
            raise FileNotFoundError(f"{file}: the reference's numbers are missing; certify its case again")
        for key in values:
            array = self.folder / f"{name}.{key}.npy"
            if array.exists():
                values[key] = np.load(array)
        return kind(**values)

    def save_tensors(self, kind: str, tensors: Tensors) -> None:
        (self.folder / kind).mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors:
            np.save(self.folder / kind / f"{name}.npy", tensor.cpu().numpy())

    def weights(self, kind: str) -> Weights:
        """Return the tensors of `kind` that `save_tensors` wrote."""
        return _SavedWeights(self, kind)

    def tensor(self, kind: str, name: str) -> np.ndarray:
        """Return the whole tensor `name` of `kind` ("gradient", "weights", ...), in its saved shape and dtype."""
        return np.load(self.folder / kind / f"{name}.npy", mmap_mode="r")


@dataclass(frozen=True)
class _SavedWeights:
    reference: Reference
    kind: str

    def read(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(self.reference.tensor(self.kind, name)))


class CaseComparison:
    """The differences of one case from the reference, filled in as its numbers arrive."""

    def __init__(self, reference: Reference, edges: tuple[float, float], counts_reached: bool = False) -> None:
        """`edges`: the clip range of log s_i. `counts_reached`: also compare the share of tokens that differ."""
        self.reference, self.edges, self.counts_reached = reference, edges, counts_reached
        self.gradient = CaseDifference()
        self.weights: CaseDifference | None = None
        self.of_steps: dict[str, CaseDifference] = {}
        self._error = self._update = 0.0

    def take_gradient(self, tensors: Tensors) -> None:
        """Note the relative L2 difference of each tensor; the absolute one if the reference's gradient is zero."""
        for name, tensor in tensors:
            want = self.reference.tensor("gradient", name)
            self.gradient.note(_relative(_norm(tensor.cpu().numpy() - want), _norm(want)), name)

    def take_weights(self, tensors: Tensors, start: Weights, moved: Weights | None = None) -> None:
        """Note the relative L2 difference of the whole update. Adam divides by |gradient|, so a single tensor with tiny
        gradients would show only their rounding. `moved`: the weights that the case started from, if not `start`.
        """
        worst = CaseDifference()
        for name, tensor in tensors:
            want, first = self.reference.tensor("weights", name), start.read(name).to(torch.float32).numpy()
            update = _norm(want - first)
            got = tensor.cpu().numpy()
            if moved is not None:  # this case started from there
                got = got - (moved.read(name).numpy() - first)
            error = _norm(got - want)
            self._error += error**2
            self._update += update**2
            worst.note(_relative(error, update), name)
        self.weights = CaseDifference(_relative(self._error**0.5, self._update**0.5), worst.place)

    def take_steps(self, steps: CaseSteps, config: Config) -> None:
        """Compare the optimizer steps of a case of `config` with the reference's."""
        want = self.reference.load("steps", CaseSteps)
        norm, of_steps, state = CaseDifference(), CaseDifference(), CaseDifference()
        for value, place in (*norm_differences(steps, config.optimizer.clip_grad), *differences_of_norm(steps, want)):
            norm.note(value, place)
        for value, place in differences_of_steps(steps, want):
            of_steps.note(value, place)
        found = [*differences_of_state(steps, want, counts_zeros=config.precision == "fp32")]
        if found:
            state.note(float(len(found)), found[0])
        self.of_steps = {"norm": norm, "steps": of_steps, "state": state}

    def result(self, numbers: Numbers, trajectory_ids: Iterable[str], lengths: Iterable[int]) -> dict[str, Any]:
        """Return {"log_prob" | "loss" | "gradient" | "weights" | "norm" | "steps" | "state" | "reached": {value,
        place}, "num_clip_flips", "num_route_flips"}. "weights" is None if none were taken; the kinds of steps are
        absent if no steps were taken, "reached" if it is not compared.
        """
        want = self.reference.load("numbers", Numbers)
        log_prob, loss = CaseDifference(), CaseDifference()
        start = 0
        for trajectory_id, length in zip(trajectory_ids, lengths, strict=True):
            rows = slice(start, start + length)
            start += length
            log_prob.note(float(np.abs(numbers.log_probs[rows] - want.log_probs[rows]).max(initial=0.0)), trajectory_id)
        mass = want.sums["positive_mass"] + want.sums["negative_mass"]
        loss.note(abs(numbers.sums["objective"] - want.sums["objective"]) / mass, "objective")
        differences = dict(log_prob=log_prob, loss=loss, gradient=self.gradient, weights=self.weights, **self.of_steps)
        if self.counts_reached:
            differences["reached"] = CaseDifference(
                _share_reached(numbers.log_probs, want.log_probs), "share of tokens"
            )
        return {
            name: asdict(difference) if difference is not None else None for name, difference in differences.items()
        } | {
            "num_clip_flips": num_clip_flips(numbers.log_s, want.log_s, self.edges),
            "num_route_flips": num_route_flips(numbers.routes, want.routes),
        }

    def flips_on_edges(self, edges: Edges) -> dict[str, int]:
        """Count what rounding decides differently than in the reference: {"num_clip_flips", "num_route_flips"}."""
        want = self.reference.load("edges", Edges)
        return {
            "num_clip_flips": num_clip_flips(edges.log_s, want.log_s, self.edges),
            "num_route_flips": num_route_flips(edges.routes, want.routes),
        }


def widened(tolerance: Tolerance, rounding: dict[str, Any] | None, factor: float) -> Tolerance:
    """Return the tolerance, widened to `factor` times what rounding every weight changed where that is more.
    `rounding`: a `CaseComparison.result`; None if it was not measured.
    """
    if rounding is None:
        return tolerance
    limits = {kind: limit for kind, limit in asdict(tolerance).items() if kind in _ROUNDED_KINDS}
    return replace(
        tolerance,
        **{kind: max(limit, factor * rounding[kind]["value"]) for kind, limit in limits.items() if rounding.get(kind)},
    )


def outside(result: dict[str, Any], tolerance: Tolerance, exact: Iterable[str] = ()) -> list[str]:
    """Return the kinds of difference above the tolerance, NaN included. `exact`: kinds that tolerate no difference."""
    limits = {kind: limit for kind, limit in asdict(tolerance).items() if limit is not None}
    limits |= {kind: limits[like] for kind, like in CRITIC_KINDS.items() if kind in result} | dict.fromkeys(exact, 0.0)
    found = {kind: result.get(kind) for kind in limits}
    return [kind for kind, one in found.items() if one is not None and not one["value"] <= limits[kind]]


def num_clip_flips(log_s: np.ndarray, want: np.ndarray, edges: tuple[float, float]) -> int:
    """Count the sequences that are inside the clip range in one case and outside in the other. `log_s`, `want`: log s_i
    of all sequences, [S] nats, global; `edges`: the range of log s_i.
    """
    outside_here, outside_there = ((values < edges[0]) | (values > edges[1]) for values in (log_s, want))
    return int((outside_here != outside_there).sum())


def _share_reached(got: np.ndarray, want: np.ndarray) -> float:
    """Return the share of active tokens (log-prob not 0) that differ by more than fp32's rounding, or are NaN."""
    near = np.abs(got - want)[want != 0] <= TOLERANCES["fp32"].log_prob
    return float(1.0 - near.mean()) if near.size else 0.0


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(values, np.float64)))
