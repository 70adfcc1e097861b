"""Triton's kernels on a CPU: a process in which Triton interprets them, and what its cases report.

Triton decides once per process, when it is imported, whether it compiles kernels or interprets them. A script of this
folder is therefore a process of its own, in which TRITON_INTERPRET is set before anything is imported, and no other
test sees the variable. It runs its cases and prints their outcomes: a case is a function that yields pairs of what a
kernel gave and what is expected of it.

The interpreter executes one program of a grid after another with numpy. It shows which numbers a kernel computes and
in which order it adds blocks; it does not show how a GPU's product adds within a block, contracts a product and a sum,
or approximates an exponential. `mend_interpreter` replaces what Triton 3.9.0's interpreter gets wrong.
"""

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_MARK = "outcomes: "
HERE = Path(__file__).parent


class Outcome(NamedTuple):
    difference: float
    """The largest difference, as a share of the largest expected value; 0 if the bits are equal."""
    count: int
    """The numbers that were compared."""
    error: str
    """Why the case ended, if it did."""


@functools.cache
def outcomes(script: str) -> dict[str, Outcome]:
    """Run a script of this folder: its cases' outcomes by name."""
    done = subprocess.run(
        [sys.executable, HERE / script],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not found:
        raise RuntimeError(f"{script} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return {name: Outcome(*outcome) for name, outcome in json.loads(found[0].removeprefix(_MARK)).items()}


def check(script: str, bounds: dict[str, float], name: str) -> None:
    """Fail if the case ended early, compared nothing, or found a difference above its bound."""
    outcome = outcomes(script)[name]
    assert not outcome.error, outcome.error
    assert outcome.count, f"{name} compared nothing"
    assert outcome.difference <= bounds[name], f"{name}: {outcome.difference:.3g} is above {bounds[name]:.3g}"


# What follows runs in the process of a script.

Case = Callable[[], Iterator[tuple[Any, Any]]]
_cases: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in _cases, name
        _cases[name] = function
        return function

    return add


def mend_interpreter() -> None:
    """Round as a GPU's conversions do, and compute with bf16 as with numbers.

    The interpreter cuts a float32 off where it becomes bf16, rounds halves up where it becomes FP8 (and loses the carry
    into the exponent), and multiplies the bits of bf16 as integers. It has no C `round`, which is libdevice's on a GPU.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def convert(data, source, target, _rounding):
        """Round to nearest, ties to even: numpy bits of type `source` to numpy bits of type `target`."""
        bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}" if data.itemsize > 1 else "u1"))
        values = bits.view(kinds[source.scalar]).to(kinds[target.scalar])
        size = values.element_size()
        return values.view(carriers[size]).numpy().view(f"u{size}").reshape(data.shape)

    def widened(operand):
        return (
            operand.data
            if operand.dtype.scalar != tl.bfloat16
            else convert(operand.data, tl.bfloat16, tl.float32, None).view(np.float32)
        )

    integers, product, number = builder.binary_op, builder.create_dot, builder.unary_op

    def binary(self, lhs, rhs, op):
        if lhs.dtype.scalar != tl.bfloat16:
            return integers(self, lhs, rhs, op)
        found = op(widened(lhs), widened(rhs))
        if found.dtype == np.bool_:
            return handle(found, tl.int1)
        return handle(convert(found, tl.float32, tl.bfloat16, None), tl.bfloat16)

    def unary(self, operand, op):
        if operand.dtype.scalar != tl.bfloat16:
            return number(self, operand, op)
        return handle(convert(op(widened(operand)), tl.float32, tl.bfloat16, None), tl.bfloat16)

    def dot(self, a, b, d, *precision):
        wide = [handle(widened(x), tl.float32 if x.dtype.scalar == tl.bfloat16 else x.dtype) for x in (a, b)]
        return product(self, *wide, d, *precision)

    def rounded(x):
        """C's `round`: halves away from zero."""
        whole = np.trunc(x.handle.data)
        away = np.where(np.abs(x.handle.data - whole) >= 0.5, np.sign(x.handle.data), 0)
        return tl.tensor(handle((whole + away).astype(np.float32), tl.float32), x.type)

    interpreter._convert_float = convert
    builder.binary_op, builder.unary_op, builder.create_dot = binary, unary, dot
    tl.extra.cuda.libdevice.round = rounded


def _difference(got: Any, want: Any) -> float:
    import torch

    assert got.shape == want.shape, f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{got.dtype}, not {want.dtype}"
    got, want = got.clone(memory_format=torch.contiguous_format), want.clone(memory_format=torch.contiguous_format)
    if torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (got, want))):
        return 0.0
    got, want = got.float().double(), want.float().double()
    assert bool(torch.isfinite(got).all()), "not finite"
    return float((got - want).abs().max() / want.abs().max())


def report() -> None:
    """Run all cases, or those whose names hold an argument of the script, and print their outcomes."""
    found = {}
    for name, function in _cases.items():
        if len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:]):
            continue
        largest, count = 0.0, 0
        try:
            for got, want in function():
                largest, count = max(largest, _difference(got, want)), count + got.numel()
            found[name] = Outcome(largest, count, "")
        except Exception:
            found[name] = Outcome(largest, count, traceback.format_exc()[-3000:])
    print(_MARK + json.dumps(found))


class Untuned:
    """A kernel with fixed parameters in place of its autotuner, which needs a GPU's clock: it calls the kernel itself,
    the tuner's `.fn`.
    """

    def __init__(self, tuned: Any, **parameters: int) -> None:
        self.plain, self.parameters = getattr(tuned, "fn", tuned), parameters

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        size = grid(self.parameters) if callable(grid) else grid
        return lambda *arguments, **options: self.plain[size](*arguments, **options, **self.parameters)
