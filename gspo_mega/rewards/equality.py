"""Decide whether two objects of SymPy are the same mathematical object.

Numbers are compared exactly, or to a precision that follows their size: nothing is rounded to a fixed number of
decimals, so that 1/2^88 is not 1/2^87. Expressions with symbols are compared at several points. `math-verify` reads
LaTeX into these objects; its own comparison rounds absolutely and is not used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

_SIGNIFICANT = 6  # digits of a decimal that stands for another number
_PLACES = 6  # decimals to which numbers of ordinary size have to agree
_DIGITS = 20  # to which a difference is computed once it is known not to be 0
_MOST_DIGITS = 3000  # used at most to tell a difference from 0
_MOST_ELEMENTS = 200
# Where expressions with symbols are compared: rational numbers in no simple relation to each other, per point.
_SCALES = (Fraction(1), Fraction(7, 19), Fraction(-13, 17), Fraction(29, 11), Fraction(-31, 12))
_MIRRORED = {
    sympy.Gt: (sympy.Gt, 1),
    sympy.Ge: (sympy.Ge, 1),
    sympy.Lt: (sympy.Gt, -1),
    sympy.Le: (sympy.Ge, -1),
    sympy.Ne: (sympy.Ne, 0),
}


def same(gold: Any, given: Any) -> bool:
    """Return whether a response's object equals a row's. For relations, the row's form counts: 5 is also `x = 5`, and
    `y = 2x` is `2x - y = 0`.
    """
    if _is_equation(given) and not _holds(given):
        return False
    if _is_equation(given) and not _is_equation(gold):
        given = _side(given)
    elif _is_equation(gold) and not _is_equation(given) and _names_only(_members(gold)[0]):
        gold = _members(gold)[-1]
    if _is_relation(gold) and _is_relation(given):
        return _same_relations(gold, given)
    if _is_relation(gold) and isinstance(given, sympy.Set):
        gold = _as_set(gold)
    elif _is_relation(given) and isinstance(gold, sympy.Set):
        given = _as_set(given)
    if _is_matrix(gold) or _is_matrix(given):
        return _same_matrices(gold, given)
    if isinstance(gold, sympy.Set | sympy.Tuple) or isinstance(given, sympy.Set | sympy.Tuple):
        return _same_collections(gold, given)
    if not isinstance(gold, sympy.Basic) or not isinstance(given, sympy.Basic):
        return bool(gold == given)
    return _same_scalars(gold, given)


# --- relations -------------------------------------------------------------------------------------------------


def _is_and(one: Any) -> bool:
    return isinstance(one, sympy.And) and all(isinstance(part, Relational) for part in _parts(one))


def _parts(one: Any) -> list[Any]:
    """Return the relations of a chain, in the order in which it was written."""
    return list(getattr(one, "_unsorted_args", one.args))


def _is_relation(one: Any) -> bool:
    return isinstance(one, Relational) or _is_and(one)


def _is_equation(one: Any) -> bool:
    return isinstance(one, sympy.Eq) or (_is_and(one) and all(isinstance(part, sympy.Eq) for part in _parts(one)))


def _members(equation: Any) -> list[Any]:
    """Return the sides of `a = b = c` from left to right."""
    if isinstance(equation, sympy.Eq):
        return [equation.lhs, equation.rhs]
    parts = _parts(equation)
    pairs = [(part.lhs, part.rhs) for part in parts]
    for first in pairs:  # a chain a = b, b = c: the first left side is no right side
        if all(first[0] != other[1] for other in pairs):
            chain, left = [first[0], first[1]], [pair for pair in pairs if pair is not first]
            while left:
                following = next((pair for pair in left if pair[0] == chain[-1]), None)
                if following is None:
                    break
                chain.append(following[1])
                left.remove(following)
            if not left:
                return chain
    return [pairs[0][0], *(right for _, right in pairs)]


def _holds(equation: Any) -> bool:
    """Return False if an equation says that two different numbers are the same, as `4 = 5` does."""
    numbers = [one for one in _members(equation) if isinstance(one, sympy.Expr) and not one.free_symbols]
    numbers = [one for one in numbers if not one.atoms(AppliedUndef)]
    return all(_same_scalars(numbers[0], other) or _rounds(numbers[0], other) for other in numbers[1:])


def _rounds(one: Any, other: Any) -> bool:
    """Return whether a decimal of few digits is the other number, rounded, as in `1/3 = 0.33`."""
    try:
        first, second = complex(sympy.N(one, 15)), complex(sympy.N(other, 15))
    except (TypeError, ValueError, OverflowError):
        return False
    has_decimal = one.has(sympy.Float) or other.has(sympy.Float)
    return has_decimal and abs(first - second) <= 0.01 * max(abs(first), abs(second))


def _side(equation: Any) -> Any:
    """Return the value that an equation states: its last side, or the number in `5 = x`."""
    members = _members(equation)
    last, first = members[-1], members[0]
    if isinstance(last, sympy.Expr) and last.has(sympy.Float):  # in `1/3 = 0.333`, the exact value counts
        exact = [one for one in members if isinstance(one, sympy.Expr) and one.is_number and not one.has(sympy.Float)]
        last = exact[-1] if exact else last
    if isinstance(last, sympy.Symbol) and isinstance(first, sympy.Expr) and not first.free_symbols:
        return first
    return last


def _names_only(one: Any) -> bool:
    """Return whether the left side of an equation is a name for the right one: x, f(x), (x, y), A/S."""
    if isinstance(one, sympy.Symbol):
        return True
    if isinstance(one, sympy.Pow) and one.args[1] == -1:
        return _names_only(one.args[0])
    return bool(getattr(one, "args", ())) and all(_names_only(part) for part in one.args)


def _same_relations(gold: Any, given: Any) -> bool:
    if gold == given:
        return True
    if _is_equation(gold) and _is_equation(given):
        ours, theirs = _members(gold), _members(given)
        if ours[0] == theirs[0] and _names_only(ours[0]):
            return same(ours[-1], theirs[-1])
        if ours[0] == theirs[-1] and _names_only(ours[0]):
            return same(ours[-1], theirs[0])
        if any(_is_graph(one, other) for one, other in ((ours, theirs), (theirs, ours))):
            return same(ours[-1], theirs[-1])
        return _proportional(_difference(ours), _difference(theirs), lambda ratio: ratio != 0)
    ours, theirs = _inequalities(gold), _inequalities(given)
    if len(ours) == len(theirs) and _matched(ours, theirs, _same_inequality):
        return True
    if len(gold.free_symbols) == 1 and gold.free_symbols == given.free_symbols:
        one, other = _as_set(gold), _as_set(given)
        return isinstance(one, sympy.Set) and isinstance(other, sympy.Set) and _same_collections(one, other)
    return False


def _is_graph(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether one equation names the values of a function f(x), and the other one calls them y."""
    if not isinstance(one[0], AppliedUndef) or not isinstance(other[0], sympy.Symbol) or other[0].name != "y":
        return False
    return not any(str(part) == "y" for side in (one[0], one[-1], other[-1]) for part in side.free_symbols)


def _difference(members: Sequence[Any]) -> Any:
    try:
        return members[0] - members[-1]
    except TypeError:
        return None


def _inequalities(relation: Any) -> list[tuple[Any, Any, int]]:
    """Return (kind, difference, sign) of each part, which says that sign times the difference is above 0."""
    found = []
    for part in _parts(relation) if _is_and(relation) else [relation]:
        kind, sign = _MIRRORED.get(type(part), (type(part), 0))
        found.append((kind, _difference([part.lhs, part.rhs]), sign))
    return found


def _same_inequality(one: tuple[Any, Any, int], other: tuple[Any, Any, int]) -> bool:
    if one[0] is not other[0]:
        return False
    wanted = one[2] * other[2]
    return _proportional(one[1], other[1], lambda ratio: ratio != 0 if wanted == 0 else ratio * wanted > 0)


def _proportional(one: Any, other: Any, accepts: Callable[[Any], bool]) -> bool:
    """Return whether one expression is the other times a number that `accepts` takes."""
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    one, other = _evaluated(one), _evaluated(other)
    if one.free_symbols != other.free_symbols or not one.free_symbols:
        return False
    for point in _points(one, other):
        below = _at(other, point)
        if below.is_number and not _is_zero(below):
            ratio = sympy.nsimplify(_at(one, point) / below, rational=False)
            if not ratio.is_real or not accepts(sympy.N(ratio)):
                return False
            return _same_scalars(one, ratio * other)
    return False


def _as_set(relation: Any) -> Any:
    """Return the set of numbers for which a relation in one name holds; the relation itself if SymPy finds none."""
    try:
        parts = _parts(relation) if _is_and(relation) else [relation]
        sets = []
        for part in parts:
            names = {one: sympy.Dummy(real=True) for one in part.atoms(AppliedUndef)}
            sets.append(part.xreplace(names).as_set())
        return sympy.Intersection(*sets)
    except Exception:  # SymPy raises several kinds for what it cannot solve
        return relation


# --- collections -----------------------------------------------------------------------------------------------


def _is_matrix(one: Any) -> bool:
    return isinstance(one, sympy.MatrixBase | sympy.MatrixExpr)


def _same_matrices(gold: Any, given: Any) -> bool:
    ours, theirs = (one.doit() if _is_matrix(one) else one for one in (gold, given))
    if not isinstance(ours, sympy.MatrixBase) or not isinstance(theirs, sympy.MatrixBase):
        if isinstance(ours, sympy.MatrixBase) and ours.shape == (1, 1):
            return same(ours[0, 0], theirs)
        return _is_matrix(ours) and _is_matrix(theirs) and bool(ours == theirs)
    return ours.shape == theirs.shape and all(same(a, b) for a, b in zip(ours.flat(), theirs.flat(), strict=True))


def elements(one: Any) -> list[Any] | None:
    """Return the elements of a list, a finite set or a tuple, in the order in which they were written; None for
    anything else.
    """
    if isinstance(one, sympy.FiniteSet):
        written = list(getattr(one, "_unsorted_args", one.args))
        return written if len(written) == len(one.args) else list(one.args)
    if isinstance(one, sympy.Tuple):
        return list(one)
    return None


def num_written(one: Any) -> int:
    """Return how many elements a list was written with, counting repetitions; 0 if it is no list."""
    return len(getattr(one, "_unsorted_args", one.args)) if isinstance(one, sympy.FiniteSet) else 0


def repeats(one: Any) -> bool:
    """Return whether a list names one of its elements several times."""
    return num_written(one) > len(one.args) if isinstance(one, sympy.FiniteSet) else False


def same_lists(gold: Any, given: Any) -> bool:
    """Return whether two lists have the same elements in any order, each equally often."""
    ours, theirs = (list(getattr(one, "_unsorted_args", getattr(one, "args", ()))) for one in (gold, given))
    return _matched(ours, theirs, same)


def _same_collections(gold: Any, given: Any) -> bool:
    if gold == given:
        return True
    gold, given = _united(gold), _united(given)
    if _are_relations(gold) != _are_relations(given):
        gold, given = (_union(one) if _are_relations(one) else one for one in (gold, given))
    ours, theirs = elements(gold), elements(given)
    if ours is not None and theirs is not None:
        if len(ours) != len(theirs) or len(ours) > _MOST_ELEMENTS:
            return False
        # Between x = 1, y = 2 and 1, 2, the order says which is which.
        named = (_num_names(ours) > 1) != (_num_names(theirs) > 1)
        if isinstance(gold, sympy.Tuple) or named:
            return all(same(a, b) for a, b in zip(ours, theirs, strict=True))
        return _matched(ours, theirs, same)
    if isinstance(gold, sympy.Interval) and isinstance(given, sympy.Interval):
        return (
            gold.left_open == given.left_open
            and gold.right_open == given.right_open
            and same(gold.start, given.start)
            and same(gold.end, given.end)
        )
    # (1, 2) is a pair as well as an open interval.
    if isinstance(gold, sympy.Interval) and theirs is not None:
        ours = [gold.start, gold.end] if gold.is_open else None
    elif isinstance(given, sympy.Interval) and ours is not None:
        theirs = [given.start, given.end] if given.is_open else None
    if (ours is None) != (theirs is None):
        alone, other = (ours, given) if theirs is None else (theirs, gold)
        return alone is not None and len(alone) == 1 and not isinstance(other, sympy.Set) and same(other, alone[0])
    if ours is not None and theirs is not None:
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    if type(gold) is type(given) and gold.args and len(gold.args) == len(given.args):
        if isinstance(gold, sympy.Union | sympy.Intersection):
            if _matched(list(gold.args), list(given.args), same):
                return True
        elif isinstance(gold, sympy.Complement | sympy.ProductSet) and all(
            same(a, b) for a, b in zip(gold.args, given.args, strict=True)
        ):
            return True
    return _no_difference(gold, given)


def _are_relations(one: Any) -> bool:
    return isinstance(one, sympy.FiniteSet) and all(_is_relation(part) and not _is_equation(part) for part in one.args)


def _union(relations: Any) -> Any:
    """Return the numbers for which at least one of several inequalities holds; if they overlap, for which all do."""
    sets = [_as_set(one) for one in relations.args]
    if not all(isinstance(one, sympy.Set) for one in sets):
        return relations
    common = sympy.Intersection(*sets)
    return sympy.Union(*sets) if common is sympy.S.EmptySet else common


def _num_names(elements: list[Any]) -> int:
    """Return for how many different names a list states the value."""
    return len({one.lhs for one in elements if isinstance(one, sympy.Eq) and _names_only(one.lhs)})


def _united(one: Any) -> Any:
    """Return a union or an intersection evaluated by SymPy, which merges finite sets into one."""
    return type(one)(*one.args) if isinstance(one, sympy.Union | sympy.Intersection) else one


def _no_difference(gold: Any, given: Any) -> bool:
    if not isinstance(gold, sympy.Set) or not isinstance(given, sympy.Set):
        return False
    try:
        return gold.symmetric_difference(given).is_empty is True
    except Exception:  # SymPy cannot tell
        return False


def _matched(ours: list[Any], theirs: list[Any], alike: Callable[[Any, Any], bool]) -> bool:
    """Return whether ours and theirs can be paired so that each pair is alike."""
    left = list(theirs)
    for one in ours:
        found = next((place for place, other in enumerate(left) if alike(one, other)), None)
        if found is None:
            return False
        del left[found]
    return not left


# --- numbers and expressions -----------------------------------------------------------------------------------


def _same_scalars(gold: Any, given: Any) -> bool:
    if gold == given:
        return True
    ours, theirs = _percent(gold), _percent(given)
    if (ours is None) != (theirs is None):
        number, other = (ours, given) if ours is not None else (theirs, gold)
        return _same_expressions(number, other) or _same_expressions(number, 100 * _evaluated(other))
    if ours is not None:
        return _same_expressions(ours, theirs)
    return _same_expressions(gold, given)


def _percent(one: Any) -> Any:
    """Return the number before a percent sign, which `math-verify` reads as times an unevaluated 1/100; else None."""
    hundredth = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if isinstance(one, sympy.Mul) and hundredth in one.args:
        return sympy.Mul(*[part for part in one.args if part != hundredth])
    return None


def _same_expressions(gold: Any, given: Any) -> bool:
    if not isinstance(gold, sympy.Expr) or not isinstance(given, sympy.Expr):
        return False
    decimals = _decimal(gold), _decimal(given)
    ours, theirs = _evaluated(gold), _evaluated(given)
    if ours == theirs:
        return True
    if any(one.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) for one in (ours, theirs)):
        return False
    if ours.free_symbols or theirs.free_symbols:
        return _same_functions(ours, theirs)
    if decimals[0] is None and decimals[1] is None:
        return _is_zero(ours - theirs)
    return _same_decimals(ours, theirs, decimals)


def _decimal(one: Any) -> tuple[Fraction, int] | None:
    """Return the value of a decimal and the power of ten of its last digit (of 1.50, which is 3/2: -1), or None."""
    power = 0
    if isinstance(one, sympy.Mul) and len(one.args) == 2:
        for number, ten in (one.args, one.args[::-1]):
            if isinstance(ten, sympy.Pow) and ten.args[0] == 10 and getattr(ten.args[1], "is_Integer", False):
                power, one = int(ten.args[1]), number
                break
            if ten == -1 and isinstance(number, sympy.Float):
                one = -number
                break
    if not isinstance(one, sympy.Float) or not one.is_finite or abs(power) > 5000:
        return None
    mantissa, _, exponent = str(one).lower().partition("e")
    digits = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    _, _, after = digits.partition(".")
    last = int(exponent or 0) + power - len(after)
    return Fraction(digits) * Fraction(10) ** (int(exponent or 0) + power), last


def _same_decimals(ours: Any, theirs: Any, decimals: tuple[Any, Any]) -> bool:
    """Return whether two numbers, of which one is a decimal, agree to the required digits."""
    difference = abs(ours - theirs)
    if difference == 0:
        return True
    size = max((abs(one) for one in (ours, theirs)), key=lambda one: sympy.N(one, 15, maxn=400))
    if ours == 0 or theirs == 0 or not (sympy.N(size).is_real and sympy.N(difference).is_real):
        return False
    places = max(_PLACES, _SIGNIFICANT - 1 - _exponent(size))
    if _at_most(difference, sympy.Rational(1, 2) / 10**places):
        return True
    # A number that no finite decimal equals is written as one that is rounded, or cut, at its last digit.
    for decimal, exact, other in ((decimals[0], theirs, decimals[1]), (decimals[1], ours, decimals[0])):
        if decimal is None or other is not None or _terminates(exact):
            continue
        value, last = decimal
        if value == 0 or _exponent(sympy.Rational(value.numerator, value.denominator)) - last + 1 < _SIGNIFICANT:
            continue
        unit = sympy.Integer(10) ** last
        is_cut = _at_most(abs(sympy.Rational(abs(value.numerator), value.denominator)), abs(exact))
        if _at_most(difference, unit if is_cut else unit / 2):
            return True
    return False


def _exponent(number: Any) -> int:
    """Return the power of ten of a number's first digit."""
    if isinstance(number, sympy.Rational):
        guess = math.floor((abs(number.p).bit_length() - number.q.bit_length()) * math.log10(2)) - 1
        while abs(number) >= sympy.Integer(10) ** (guess + 1):
            guess += 1
        return guess
    return int(sympy.floor(sympy.log(abs(number).evalf(20, maxn=400), 10)))


def _at_most(one: Any, bound: Any) -> bool:
    try:
        return bool(sympy.N(one - bound, 15, maxn=600) <= 0)
    except TypeError:
        return False


def _terminates(number: Any) -> bool:
    """Return whether a number can be written as a terminating decimal."""
    if not isinstance(number, sympy.Rational):
        return False
    bottom = number.q
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1


@functools.lru_cache(maxsize=1024)
def _evaluated(expression: Any) -> Any:
    """Return an expression evaluated by SymPy, with real symbols, decimals as fractions, and `i` as the imaginary unit
    unless it also has `j` or `k`.
    """
    floats = {one: _exact(one) for one in expression.atoms(sympy.Float) if one.is_finite}
    expression = expression.xreplace(floats) if floats else expression
    if expression.has(sympy.UnevaluatedExpr):
        expression = expression.replace(sympy.UnevaluatedExpr, lambda inner: inner)
    names = {one.name for one in expression.free_symbols}
    symbols = {
        one: sympy.I if one.name == "i" and not names & {"j", "k"} else sympy.Symbol(one.name, real=True)
        for one in expression.free_symbols
    }
    expression = expression.xreplace(symbols) if symbols else expression
    try:
        expression = expression.doit()
    except (RecursionError, MemoryError):
        raise
    except Exception:  # SymPy raises several kinds for what it cannot compute
        return expression
    unknown = {one: sympy.Symbol(str(one), real=True) for one in expression.atoms(AppliedUndef)}
    return expression.xreplace(unknown) if unknown else expression


def _exact(number: Any) -> Any:
    found = _decimal(number)
    return number if found is None else sympy.Rational(found[0].numerator, found[0].denominator)


def _is_zero(difference: Any) -> bool:
    """Return whether a number without symbols is 0: computed to as many digits as its parts have, and some more."""
    if difference.is_Rational:
        return difference == 0
    if difference.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    longest = max((max(abs(one.p), one.q).bit_length() for one in difference.atoms(sympy.Rational)), default=1)
    powers = [abs(one.exp) for one in difference.atoms(sympy.Pow) if one.exp.is_Rational and abs(one.exp) < 10**5]
    digits = min(_MOST_DIGITS, 120 + int(longest * 0.7) + 4 * int(max(powers, default=1)))
    try:
        value = difference.evalf(_DIGITS, maxn=digits, strict=True)
    except sympy.core.evalf.PrecisionExhausted:
        return _is_surely_zero(difference) if digits == _MOST_DIGITS else True
    except Exception:  # what cannot be computed as a number
        return _is_surely_zero(difference)
    if value.is_number and not value.atoms(sympy.Float) and value != 0:
        return _is_surely_zero(difference)
    return bool(value == 0)


def _is_surely_zero(difference: Any) -> bool:
    try:
        return sympy.simplify(difference).is_zero is True
    except Exception:  # SymPy cannot tell
        return False


def _points(*expressions: Any) -> list[dict[Any, Any]]:
    """Return points with rational values for all symbols."""
    names = sorted(set().union(*(one.free_symbols for one in expressions)), key=str)
    steps = [Fraction(3 + 2 * place, 5 + 3 * place) + Fraction(1, 97 + 6 * place) for place in range(len(names))]
    points = []
    for number, scale in enumerate(_SCALES):
        values = [step * scale + Fraction(number * place, 23) for place, step in enumerate(steps)]
        points.append({name: sympy.Rational(v.numerator, v.denominator) for name, v in zip(names, values, strict=True)})
    return points


def _whole_points(*expressions: Any) -> list[dict[Any, Any]]:
    """Return points with whole numbers for all symbols."""
    names = sorted(set().union(*(one.free_symbols for one in expressions)), key=str)
    starts = (1, 2, 3, 6, 7, 11)
    return [{name: sympy.Integer(start + 3 * at) for at, name in enumerate(names)} for start in starts]


def _alternates(expression: Any) -> bool:
    """Return whether an expression is meant for whole numbers only: it has (-1)^n."""
    powers = (one.args for one in expression.atoms(sympy.Pow))
    return any(base.is_number and base.is_negative and exponent.free_symbols for base, exponent in powers)


def _same_functions(ours: Any, theirs: Any) -> bool:
    """Return whether two expressions with symbols agree at every sampled point at which both are defined."""
    difference = ours - theirs
    if difference == 0:
        return True
    seen = 0
    outside = []
    for point in _whole_points(ours, theirs) if _alternates(ours) or _alternates(theirs) else _points(ours, theirs):
        if not (_is_inside(ours, point) and _is_inside(theirs, point)):
            outside.append(point)
            continue
        value = _at(difference, point)
        if value.has(sympy.nan, sympy.zoo, sympy.oo):
            continue
        if not value.is_number or not _is_zero(value):
            return False
        seen += 1
    if seen < 2:
        values = [_at(difference, point) for point in outside]
        values = [one for one in values if not one.has(sympy.nan, sympy.zoo, sympy.oo)]
        if len(values) + seen < 2 or not all(one.is_number and _is_zero(one) for one in values):
            return _is_surely_zero(difference) if len(values) + seen < 2 else False
    return True


def _at(expression: Any, point: dict[Any, Any]) -> Any:
    """Return an expression at a point. Names that a sum or an integral binds stay."""
    if expression.has(sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative):
        return expression.subs(point)
    return expression.xreplace(point)


def _is_inside(expression: Any, point: dict[Any, Any]) -> bool:
    """Return whether no root or logarithm in an expression has a negative argument at a point."""
    for one in expression.atoms(sympy.Pow, sympy.log):
        inner = one.args[0]
        if (isinstance(one, sympy.log) or not one.args[1].is_integer) and inner.free_symbols:
            value = _at(inner, point)
            if value.is_number and value.is_negative:
                return False
    return True
