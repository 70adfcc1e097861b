"""Units of measurement: what a unit is a multiple of, and of which dimension.

Owns the table of units and the reading of one unit expression (`km/h`, `square feet`, `m s^{-2}`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

Dimension = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """A unit: `factor` times the base unit of its dimension, plus `offset` (temperatures)."""

    factor: Fraction
    dimension: Dimension
    offset: Fraction = Fraction(0)


_PREFIXES = {
    "y": -24, "z": -21, "a": -18, "f": -15, "p": -12, "n": -9, "u": -6, "m": -3, "c": -2, "d": -1, "da": 1, "h": 2,
    "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18,
}  # fmt: skip
_PREFIX_NAMES = {
    "pico": -12, "nano": -9, "micro": -6, "milli": -3, "centi": -2, "deci": -1, "deca": 1, "hecto": 2, "kilo": 3,
    "mega": 6, "giga": 9, "tera": 12,
}  # fmt: skip
# symbol, names, factor, dimension: these take the prefixes of the metric system.
_METRIC = (
    ("m", "meter metre", "1", "m"),
    ("g", "gram gramme", "1/1000", "kg"),
    ("s", "second", "1", "s"),
    ("A", "ampere amp", "1", "A"),
    ("K", "kelvin", "1", "K"),
    ("mol", "mole", "1", "mol"),
    ("cd", "candela", "1", "cd"),
    ("L", "liter litre", "1/1000", "m3"),
    ("l", "", "1/1000", "m3"),
    ("Hz", "hertz", "1", "s-1"),
    ("N", "newton", "1", "kg m s-2"),
    ("Pa", "pascal", "1", "kg m-1 s-2"),
    ("J", "joule", "1", "kg m2 s-2"),
    ("W", "watt", "1", "kg m2 s-3"),
    ("C", "coulomb", "1", "A s"),
    ("V", "volt", "1", "kg m2 s-3 A-1"),
    ("F", "farad", "1", "kg-1 m-2 s4 A2"),
    ("ohm", "", "1", "kg m2 s-3 A-2"),
    ("T", "tesla", "1", "kg s-2 A-1"),
    ("Wb", "weber", "1", "kg m2 s-2 A-1"),
    ("H", "henry", "1", "kg m2 s-2 A-2"),
    ("eV", "electronvolt", "1.602176634e-19", "kg m2 s-2"),
    ("cal", "calorie", "4.184", "kg m2 s-2"),
    ("Wh", "", "3600", "kg m2 s-2"),
    ("bit", "", "1", "bit"),
    ("B", "byte", "8", "bit"),
    ("bar", "", "100000", "kg m-1 s-2"),
    ("Bq", "becquerel", "1", "decays s-1"),
    ("t", "tonne", "1000", "kg"),
    ("ar", "", "100", "m2"),
)
# all names, factor, dimension: without prefixes.
_OTHERS = (
    ("min mins minute", "60", "s"),
    ("h hr hrs hour", "3600", "s"),
    ("d day", "86400", "s"),
    ("sec secs", "1", "s"),
    ("week wk wks", "604800", "s"),
    ("fortnight", "1209600", "s"),
    ("month mo", "1", "month"),
    ("year yr yrs", "12", "month"),
    ("decade", "120", "month"),
    ("century centuries", "1200", "month"),
    ("inch inches in ins", "0.0254", "m"),
    ("foot feet ft", "0.3048", "m"),
    ("yard yd yds", "0.9144", "m"),
    ("mile mi", "1609.344", "m"),
    ("lightyear ly", "9460730472580800", "m"),
    ("acre", "4046.8564224", "m2"),
    ("hectare ha", "10000", "m2"),
    ("cc", "1/1000000", "m3"),
    ("gallon gal", "0.003785411784", "m3"),
    ("quart qt", "0.000946352946", "m3"),
    ("pint pt", "0.000473176473", "m3"),
    ("cup", "0.0002365882365", "m3"),
    ("tablespoon tbsp", "0.00001478676478125", "m3"),
    ("teaspoon tsp", "0.00000492892159375", "m3"),
    ("ounce oz", "0.028349523125", "kg"),
    ("pound lb lbs", "0.45359237", "kg"),
    ("stone", "6.35029318", "kg"),
    ("ton", "1", "ton"),
    ("mph", "0.44704", "m s-1"),
    ("kph kmh kmph", "5/18", "m s-1"),
    ("mps", "1", "m s-1"),
    ("knot", "463/900", "m s-1"),
    ("atm atmosphere", "101325", "kg m-1 s-2"),
    ("mmHg", "133.322387415", "kg m-1 s-2"),
    ("degree degrees deg", "1", "degree"),
    ("arcmin arcminute", "1/60", "degree"),
    ("arcsec arcsecond", "1/3600", "degree"),
    ("radian rad", "1", "radian"),
    ("revolution rev", "360", "degree"),
    ("rpm", "1/60", "turns s-1"),
    ("dollar usd bucks", "1", "dollar"),
    ("cent", "0.01", "dollar"),
    ("nickel", "0.05", "dollar"),
    ("dime", "0.1", "dollar"),
    ("euro eur", "1", "euro"),
    ("pence", "0.01", "sterling"),
    ("gbp", "1", "sterling"),
    ("yen jpy", "1", "yen"),
    ("rupee inr rs Rs", "1", "rupee"),
    ("paise", "0.01", "rupee"),
    ("yuan rmb cny", "1", "yuan"),
)
CURRENCIES = {"$": "dollar", "\u20ac": "euro", "\u00a3": "gbp", "\u00a5": "yen", "\u20b9": "rupee"}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}


def _dimension(text: str) -> Dimension:
    found = re.findall(r"([A-Za-z]+)(-?[0-9]*)", text)
    return tuple(sorted((name, int(power or 1)) for name, power in found))


def _table() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for symbol, names, factor, dimension in _METRIC:
        base = Unit(Fraction(factor), _dimension(dimension))
        for prefix, power in [("", 0), *_PREFIXES.items()]:
            units.setdefault(prefix + symbol, Unit(base.factor * Fraction(10) ** power, base.dimension))
        for name in names.split() or ([symbol] if len(symbol) > 2 else []):
            for prefix, power in [("", 0), *_PREFIX_NAMES.items()]:
                units[prefix + name] = Unit(base.factor * Fraction(10) ** power, base.dimension)
                units[prefix + name + "s"] = units[prefix + name]
    for names, factor, dimension in _OTHERS:
        for name in names.split():
            units[name] = Unit(Fraction(factor), _dimension(dimension))
            if len(name) > 2:
                units.setdefault(name + "s", units[name])
    units["hertz"] = units["Hz"]
    units["hour"], units["henries"] = Unit(Fraction(3600), _dimension("s")), units["henry"]
    units["celsius"] = Unit(Fraction(1), (("K", 1),), Fraction(27315, 100))
    units["fahrenheit"] = Unit(Fraction(5, 9), (("K", 1),), Fraction(45967, 180))
    return units


_UNITS = _table()
# Letters alone that may be a unit after a number, where the other answer has a unit.
SYMBOLS = frozenset(name for name in _UNITS if len(name) <= 3)


def unit_named(name: str) -> Unit | None:
    """The unit of one name or symbol. Names may be in capitals; symbols are as they are (mm is not Mm)."""
    found = _UNITS.get(name)
    if found is None and len(name) > 2:
        found = _UNITS.get(name.lower())
    return found


def unit_of(words: list[str]) -> Unit | None:
    """The unit that words and signs are: `["km", "/", "h"]`, `["square", "feet"]`, `["m", "^2"]`; None of others."""
    factor, powers = Fraction(1), dict[str, int]()
    offset = Fraction(0)
    sign, coming = 1, 1
    last: Unit | None = None
    num_units = 0

    def add(unit: Unit, times: int) -> None:
        nonlocal factor
        factor *= unit.factor**times
        for name, power in unit.dimension:
            powers[name] = powers.get(name, 0) + power * times

    last_sign = 1
    for word in words:
        if word in ("/", "per"):
            sign = -1
        elif word in ("*", "of"):
            continue
        elif word.lower() in ("squared", "cubed") and last is not None:
            add(last, last_sign * (_POWERS[word.lower()] - 1))
        elif word.lower() in _POWERS and word.lower() not in ("squared", "cubed"):
            coming = _POWERS[word.lower()]
        elif word.startswith("^"):
            if last is None or not re.fullmatch(r"-?[0-9]", word[1:]):
                return None
            add(last, last_sign * (int(word[1:]) - 1))
        else:
            last = unit_named(word)
            if last is None:
                return None
            last_sign = sign * coming
            add(last, last_sign)
            offset, coming = last.offset, 1
            num_units += 1
            sign = sign if sign == -1 else 1
    if last is None:
        return None
    dimension = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Unit(factor, dimension, offset if num_units == 1 and dimension == (("K", 1),) else Fraction(0))
