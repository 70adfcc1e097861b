"""What counts as a number in what users' code returns: Python's, NumPy's, tensors'; and what is refused by name."""

import datetime
import decimal
import fractions

import numpy as np
import pytest
import torch

from gspo_mega.agents.protocol import Outcome, outcome_of
from gspo_mega.base.user_functions import describe
from gspo_mega.rewards.user_code import BadResult, number_of, result_of

NUMPY = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "longdouble",
]
TORCH = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
]


def ones():
    yield from (True, 1, 1.0, fractions.Fraction(1, 1))
    for name in NUMPY:
        scalar = np.ones((), dtype=name)
        yield from (scalar[()], scalar, scalar.newbyteorder() if hasattr(scalar, "newbyteorder") else scalar)
    for name in TORCH:
        yield torch.ones((), dtype=torch.float32).to(getattr(torch, name))
    yield torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    "value", list(ones()), ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}"
)
def test_every_kind_of_one_is_1_wherever_it_stands(value):
    assert number_of(value, "x") == 1.0 and type(number_of(value, "x")) is float
    assert result_of({"reward": value, "part": value, "correct": value}) == (1.0, {"part": 1.0}, True)
    outcome = outcome_of(Outcome(value, [value, None], value, {"part": value}))
    assert (outcome.reward, outcome.turn_rewards, outcome.correct, outcome.parts) == (
        1.0,
        [1.0, None],
        True,
        {"part": 1.0},
    )
    assert type(outcome.correct) is bool and outcome_of(value).reward == 1.0


REFUSED = [
    (np.array([1.0]), "ndarray of shape (1,)"),
    (np.array([[True]]), "ndarray of shape (1, 1)"),
    (torch.ones(2), "Tensor of shape (2,)"),
    (np.complex64(1), "complex64"),
    (torch.tensor(1j), "Tensor"),
    (torch.ones((), device="meta"), "Tensor"),
    (1j, "complex"),
    (np.str_("1"), "str_"),
    (np.array("1"), "ndarray"),
    (np.datetime64("2020"), "datetime64"),
    (np.timedelta64(3), "timedelta64"),
    (datetime.timedelta(1), "timedelta"),
    (np.array(None), "ndarray"),
    (np.array(1, dtype=object), "ndarray"),
    (np.ma.masked, "MaskedConstant"),
    (np.void(b"1"), "void"),
    (np.dtype("f4"), "DType"),
    (decimal.Decimal(1), "Decimal"),
    ("1", "str"),
    (None, "NoneType"),
    ([1], "list"),
]


@pytest.mark.parametrize(("value", "kind"), REFUSED, ids=[kind for _, kind in REFUSED])
def test_what_is_no_number_is_refused_by_name(value, kind):
    for place in (lambda: number_of(value, "x"), lambda: result_of({"reward": 1, "correct": value})):
        with pytest.raises(BadResult) as caught:
            place()
        assert caught.value.kind == "wrong_type" and f"{kind}); a number was expected" in str(caught.value)
    if value is not None:
        with pytest.raises(BadResult):
            outcome_of(Outcome(1, correct=value))


@pytest.mark.parametrize(
    "value", [np.float32("nan"), torch.tensor(float("inf")), np.array(-np.inf), np.longdouble("1e4000")]
)
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(BadResult) as caught:
        number_of(value, "x")
    assert caught.value.kind == "not_finite"


def test_a_verdict_is_true_or_false():
    for value in (np.int64(2), np.float32(0.5), torch.tensor(-1)):
        with pytest.raises(BadResult, match="True or False"):
            result_of({"reward": 1, "correct": value})


def test_an_exception_that_cannot_say_what_it_is_has_its_type_and_place():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    try:
        raise Mute
    except Mute as error:
        said = describe(error)
    assert said.startswith("Mute: its message cannot be read (test_returned_values.py:")
