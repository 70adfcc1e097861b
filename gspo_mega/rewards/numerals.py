"""Read numbers as people and models write them, as exact rationals; and the units of measurement after them.

The notations of one number are

    18   -3   - 3   +3   1,200   1 200   1.5   .5   $1,200.50   -$5   50% (fifty)   1e3   3/4   1 1/2   \\frac{3}{4}

with Unicode's minus signs and dashes for a sign, its thin and no-break spaces between thousands, full-width digits, and
LaTeX's spacing. Numbers joined by an operator (2^10, 3*4, 10-3, 3:45, a decimal comma) are no number, and neither is
one of more than 400 digits; no expression is evaluated. `final_number` finds the final number of a text. Every pattern
takes time linear in its input.

The first part is the table of units, which gives the factor and the dimension of each unit, and the reading of one unit
expression (`km/h`, `square feet`, `m s^{-2}`).
"""

from __future__ import annotations

import re
import unicodedata
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
# Symbols of up to three letters that may be a unit after a number, if the other answer has a unit.
SYMBOLS = frozenset(name for name in _UNITS if len(name) <= 3)


def unit_named(name: str) -> Unit | None:
    """Return the unit of a name or symbol. Case does not matter in a name; in a symbol it does (mm is not Mm)."""
    found = _UNITS.get(name)
    if found is None and len(name) > 2:
        found = _UNITS.get(name.lower())
    return found


def unit_of(words: list[str]) -> Unit | None:
    """Return the unit that words and signs spell: `["km", "/", "h"]`, `["square", "feet"]`, `["m", "^2"]`; None for
    others.
    """
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


MARK = "####"
_BOX = re.compile(r"\\(?:boxed|fbox)\s?\{")
_MOST_DIGITS = 400
_CONTEXT = 40  # characters before a number in which an operator is looked for

# All scripts' digits, and the fractions that are one character.
_DIGITS = [code for code in range(0x80, 0x1FC00) if unicodedata.decimal(chr(code), None) is not None]
_FRACTIONS = [0xBC, 0xBD, 0xBE, *range(0x2150, 0x215F), 0x2189]
_CHARACTERS = str.maketrans(
    {
        **{chr(code): str(unicodedata.decimal(chr(code))) for code in _DIGITS},
        **{chr(code): f" {unicodedata.normalize('NFKC', chr(code)).replace(chr(0x2044), '/')}" for code in _FRACTIONS},
        **dict.fromkeys("\u2212\uff0d\ufe63\u2010\u2011\u2013", "-"),  # minus signs, hyphens, en dash
        **dict.fromkeys(
            "\u00a0\u2006\u2007\u2008\u2009\u200a\u202f", "\u00a0"
        ),  # spaces that do not break, or are thin
        **dict.fromkeys("\u200b\u2060\ufeff", ""),
        "\u066b": ".",
        "\u066c": ",",
        "\uff0b": "+",
        "\uff0e": ".",
        "\uff0c": ",",
        "\uff0f": "/",
        "\u2044": "/",
        "\u2215": "/",
        "\uff05": "%",
        "\uff04": "$",
        "\uff03": "#",
        "\u00b0": "",
    }
)
# LaTeX and Markdown that change how a number looks, not its value.
_LOOKS = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;: ]"), "\u00a0"),
    (re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\q?quad(?![A-Za-z])|\\[()\[\]]"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}(?:\^\{?[0-9]\}?)?"), r" \1 "),
    (re.compile(r"(?<![\w)\]}*])(\*{1,3})([^*\n]+)\1(?![\w(*])"), r" \2 "),
)

_PLAIN = r"(?:(?:{thousands}[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+(?![0-9A-Za-z]))?"
_COMMAS = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:\u00a0[0-9]{3})+(?![0-9])|"
_SPACES = r"[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|"
_QUANTITY = (
    r"(?P<sign>(?<![\w.)\]}])[-+]{sign_space})?(?:[$\u20ac\u00a3\u00a5]\s?)?(?P<inner>(?<=[$\u20ac\u00a3\u00a5])[-+])?"
    r"(?:(?:(?P<whole>[0-9]+)[ \u00a0]?)?\\frac\s?\{\s?(?P<top>{plain})\s?\}\s?\{\s?(?P<bottom>{plain})\s?\}"
    r"|(?P<mixed>[0-9]+)[ \u00a0](?P<over>[0-9]+)/(?P<under>[0-9]+)"
    r"|(?P<value>{plain})(?:[ \u00a0]?/[ \u00a0]?(?P<divisor>{plain}))?)"
)


def _quantity(thousands: str, sign_space: str) -> re.Pattern[str]:
    return re.compile(
        _QUANTITY.replace("{plain}", _PLAIN.replace("{thousands}", thousands)).replace("{sign_space}", sign_space)
    )


# In running text "10 200 gram bags" are two numbers, and "- 5 apples" is an entry of a list.
_IN_TEXT = _quantity(_COMMAS, "")
_ALONE = _quantity(_COMMAS + _SPACES, "[ \u00a0]?")

# What joins a number to something else: it is part of an expression, of a date, or of a number in an unsupported
# notation.
_JOINED_AFTER = re.compile(
    r"[ \u00a0]?(?:[\^!*\u00d7\u00f7\u00b7]|\\(?:times|cdot|div|pm|sqrt|pi|over|frac|%)(?![A-Za-z])|[xX]\s?[0-9]|/["
    r" \u00a0]?[0-9({\\.]|[-+:][ \u00a0]?[$]?[0-9({\\.])"
    r"|,\s?[0-9]|\.[0-9]|['\u2019_][0-9]|[\u00b2\u00b3\u00b9\u2070-\u207e]|[eE][-+]?[0-9]|[xyzn](?![A-Za-z])"
)
_JOINED_BEFORE = re.compile(
    r"(?:(?:[*/\u00d7\u00f7\u00b7^_]|[\^_]\{|\\sqrt\{?|\\(?:times|cdot|div|pm)|[\w)\]}%][ \u00a0]?[-+]|[0-9)\]}%]["
    r" \u00a0]?[xX])[ \u00a0]?|[0-9][.,:'\u2019])[$]?$"
)
_SUBTRACTED_FROM = re.compile(r"[0-9)\]}%][ \u00a0]?$")
# The groups of a match that make its number, each with the value of one that is absent.
_PIECES = (
    ("whole", "0"),
    ("mixed", "0"),
    ("top", "0"),
    ("bottom", "1"),
    ("over", "0"),
    ("under", "1"),
    ("value", "0"),
    ("divisor", "1"),
)
_COMMAND = re.compile(r"\\[A-Za-z]+")


def final_number(text: str) -> Fraction | None:
    """Return the final number of a response, or None.

    It is the first number of the line after the last `####`; without that mark, the number in the last `\\boxed{...}`
    (after its last `=`), if it is the only one; without a box, the last number of the text. None if that is joined to
    something else.
    """
    text = _normalised(text)
    segment = _marked(text)
    if segment is not None:
        found = _ALONE.search(segment)
        return None if found is None else _value(found)
    box = last_box(text)
    if box is not None:
        return _only_number(box)
    found = None
    for found in _IN_TEXT.finditer(text):  # noqa: B007  the last one
        pass
    return None if found is None else _value(found)


def gold_number(answer: str) -> Fraction:
    """Return the number in a data file's answer. Raises ValueError, with what is wrong, if there is not exactly one.

    It stands after the last `####`, or in the last box, or in the whole text if that has neither.
    """
    text = _normalised(answer)
    segment = _marked(text)
    if segment is None:
        segment = last_box(text)
    if segment is None:
        segment = text
    number = _only_number(segment)
    if number is not None:
        return number
    count = sum(1 for _ in _ALONE.finditer(segment))
    if count == 0:
        raise ValueError(f"no number in the answer {answer[-100:]!r}")
    what = "several numbers" if count > 1 else "more than a number"
    raise ValueError(
        f"{what} in the answer {segment.strip()[-100:]!r}; one is expected, in such a notation as 1,200.5 or -3/4 or"
        f" 1e6, behind `{MARK}` in a longer text"
    )


def number_alone(text: str) -> Fraction | None:
    """Return the number in a text that has nothing else but white space and a currency sign, or None."""
    found = _ALONE.fullmatch(_normalised(text).strip())
    return None if found is None else _value(found)


def _normalised(text: str) -> str:
    text = text.translate(_CHARACTERS)
    for pattern, plain in _LOOKS:
        text = pattern.sub(plain, text)
    return text


def _marked(text: str) -> str | None:
    """Return the first line with anything in it after the last mark; None without a mark."""
    _, mark, tail = text.rpartition(MARK)
    return tail.strip().partition("\n")[0] if mark else None


def _only_number(segment: str) -> Fraction | None:
    segment = segment.rpartition("=")[2]
    found = list(_ALONE.finditer(segment))
    if len(found) != 1 or _COMMAND.search(segment[: found[0].start()] + segment[found[0].end() :]):
        return None
    return _value(found[0])


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the number of a match, or None if it is joined to something else, has no value, or is too long."""
    text = found.string
    before, part = text[max(0, found.start() - _CONTEXT) : found.start()], found.groupdict()
    if (
        _JOINED_AFTER.match(text, found.end())
        or _JOINED_BEFORE.search(before)
        or (part["sign"] and _SUBTRACTED_FROM.search(before))
    ):
        return None
    pieces: list[Fraction] = []
    for name, default in _PIECES:
        piece = _rational(part[name] or default)
        if piece is None:
            return None
        pieces.append(piece)
    whole, mixed, top, bottom, over, under, value, divisor = pieces
    if bottom == 0 or under == 0 or divisor == 0:
        return None
    negative = (part["sign"] or "").startswith("-") != (part["inner"] == "-")
    number = whole + mixed + top / bottom + over / under + value / divisor
    return -number if negative else number


def _rational(digits: str) -> Fraction | None:
    digits = re.sub("[, \u00a0]", "", digits)
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > _MOST_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > _MOST_DIGITS:
        return None
    return Fraction(digits if not digits.startswith(".") else "0" + digits)


def last_box(text: str) -> str | None:
    """Return what is inside the last `\\boxed{...}`, up to its closing brace or the end of the text."""
    found = None
    for found in _BOX.finditer(text):  # noqa: B007  the last one
        pass
    if found is None:
        return None
    start = found.end()
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return text[start:]
