"""Answers with words in them: quantities with units, compound ones (5 hours 30 min), times of day, and plain words.

This module reads the words around numbers, so that none of them is dropped unread: a unit, a count of something, a
condition, or a word that changes what is said (`at least`, `not`). The values between the words are LaTeX, which the
caller reads.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from gspo_mega.rewards.numerals import CURRENCIES, SYMBOLS, Unit, unit_named, unit_of

_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|mathsf|mbox|operatorname\*?|textup)\s?"
    r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"
)
_PLAIN_WORD = re.compile(r"(?<![\\A-Za-z\ue000_{^])[A-Za-z]{2,}(?![A-Za-z\ue001])")
_TOKEN = re.compile(
    r"\ue000(?P<word>[^\ue001]*)\ue001|(?P<power>\^\s*\{?\s*-?[0-9]\s*\}?)|(?P<list>[,;])|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
_CLOCK = re.compile(
    r"(?:at )?(?P<hour>[0-9]{1,2})(?::(?P<minute>[0-9]{2}))?(?::(?P<second>[0-9]{2}))? ?(?:o'? ?clock)? ?(?:in the )?"
    r"(?P<half>a ?m|p ?m|am|pm|morning|afternoon|evening|at night|noon|midnight)?"
)
_DEGREES = re.compile(r"((?:(?!\\circ|\\(?:sin|cos|tan|cot|sec|csc)|[,;]).)+?)\^\s*\{?\s*\\circ\s*\}?", re.DOTALL)
_ANGLE = re.compile(
    r"(?P<sign>-?)\s*(?P<degrees>[0-9.]+)\s*\^\s*\{?\s*\\circ\s*\}?\s*(?P<minutes>[0-9.]+)\s*(?:\^\s*\{?\s*\\prime\s*\}?|')\s*(?:(?P<seconds>[0-9.]+)\s*(?:\^\s*\{?\s*\\prime\s*\\prime\s*\}?|''|\"))?"
)
_FEET = re.compile(
    r"(?P<feet>[0-9]+)\s*(?:'|\^\s*\{?\\prime\s*\}?)\s*-?\s*(?P<inches>[0-9.]+(?:\s+[0-9]+/[0-9]+)?)\s*(?:''|\"|\^\s*\{?\\prime\s*\\prime\s*\}?)"
)
_AFTER_NUMBER = re.compile(r"(?<=[0-9}])\s*([hmsdgLlNJWVKC])(?![A-Za-z_^(\ue001])")
_MINUTES = re.compile("(\ue000(?:h|hrs?|hours?)\ue001[^\ue000]*[0-9]\\s*\ue000)m\ue001")
_SYMBOLS = re.compile(r"\s*(?:[0-9.]+\s*[hmsd]\s*){2,}")
_TEMPERATURE = re.compile(
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\ue000degrees?\ue001)\s*(?:\ue000)?([CF]|Celsius|celsius|Fahrenheit|fahrenheit)(?:\ue001)?(?![A-Za-z])"
)


_REMAINDER = re.compile(r"([0-9]+)\s*(?:\\text\s*\{\s*[Rr]\.?\s*\}|[Rr])\s*([0-9]+)")
_PRIME = re.compile(r"(-?[0-9.]+)\s*(?:('')|'|\^\s*\{?\s*\\prime\s*\}?)")
_UNITS_OVER = re.compile(
    r"\\frac\s*\{\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?[0-9]\}?)?)\s*\}"
    r"\s*\{\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?[0-9]\}?)?)\s*\}"
)
_ORDINAL = re.compile(r"([0-9])\s*(?:\^\s*\{?\s*)?(?:\\(?:text|mathrm)\s*\{\s*)?(?:st|nd|rd|th)(?![A-Za-z])\s*\}{0,2}")


def _number_of(found: re.Match[str]) -> str:
    """Return an ordinal's number; a brace that belongs to what is around it stays."""
    return found[1] + "}" * max(0, found[0].count("}") - found[0].count("{"))


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SCALES = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "hundreds": 2, "thousands": 3,
    "millions": 6, "billions": 9,
}  # fmt: skip
_CURRENCY_WORDS = frozenset({"rs", "usd", "eur", "gbp", "inr", "cny", "rmb", "jpy"})
# Months, by all their names: a day without its month is another answer.
_MONTHS = {
    called: month
    for month in ("january", "february", "march", "april", "june", "july", "august", "september", "october", "november",
                  "december")
    for called in (month, month[:3])
} | {"may": "may", "sept": "september"}  # fmt: skip
_CAPITAL_MONTHS = frozenset(called.capitalize() for called in _MONTHS)
_MONTH = re.compile(
    r"(?<![A-Za-z])(?:" + "|".join(sorted(_MONTHS, key=len, reverse=True)) + r")(?![a-z])", re.IGNORECASE
)
# If one of these stands between two values, their order matters.
_ORDERED = frozenset({"remainder", "to", "from", "over", "out", "divided", "minus", "than", "mod", "modulo", "before"})
_POINTS = Unit(Fraction(1), (("percentage points", 1),))
_BOUND = re.compile(
    "\ue000(?:or|and)\ue001\\s*\ue000(?:more|less|fewer|greater|higher|lower|larger|smaller|above|below|up|older|younger)\ue001"
)
_BEFORE_UNIT = ("}\\cdot", "} \\cdot", "\\,", "\\ ", "\\;", "\\:")
_SEPARATORS = {"and", "or"}
# Words that do not change an answer.
_EMPTY = _words("""
    the a an is are was be equals equal answer answers final result value values total about approximately
    approx roughly exactly around precisely so thus therefore hence we get have has it its there of respectively
    also only just i t e old that this which where with for in on at by as units unit
""")
# Words that change an answer: both answers must have them, or neither.
_CHANGES = _words("""
    not no none never than least most between to through from if unless when except without remainder mod modulo
    minus negative plus times twice double triple half halves third thirds quarter quarters divided over out
    neither nor below under above beyond within until every any all some infinite infinitely impossible
    undefined dozen dozens score scores root inverse opposite reciprocal lcm gcd either both fewer greater
    wrong incorrect cannot divisible multiple multiples smaller larger bigger positive
    different distinct unknown maybe perhaps possibly false true
""")
_OPPOSITES = (
    {"north": 0, "south": 1, "east": 2, "west": 3, "northeast": 4, "northwest": 5, "southeast": 6, "southwest": 7},
    {"left": 0, "right": 1, "up": 2, "down": 3, "upward": 2, "downward": 3, "upwards": 2, "downwards": 3},
    {"profit": 0, "gain": 0, "loss": 1},
    {"increase": 0, "increases": 0, "increased": 0, "decrease": 1, "decreases": 1, "decreased": 1, "rise": 0},
    {"more": 0, "less": 1, "fewer": 1},
    {"before": 0, "ago": 0, "after": 1, "later": 1, "earlier": 0},
    {"clockwise": 0, "counterclockwise": 1, "anticlockwise": 1, "counter-clockwise": 1},
    {"ad": 0, "ce": 0, "bc": 1, "bce": 1},
    {"am": 0, "pm": 1},
    {"cw": 0, "ccw": 1},
    {"increasing": 0, "decreasing": 1},
    {"maximum": 0, "minimum": 1},
    {"inside": 0, "outside": 1},
    {"even": 0, "odd": 1},
    {"won": 0, "lost": 1},
    {"heads": 0, "tails": 1},
    {"boys": 0, "girls": 1},
    {"men": 0, "women": 1},
)  # fmt: skip
_SHORT_WORDS = _words("""
    per am pm or and is of to not no if so an at in by yes Yes No
""")
_SHORT_UNITS = _words("""
    in cm mm km kg mg ft yd mi lb oz mL ml kJ hr min sec sq cu per lbs hrs mins secs yds inch kHz MHz GHz Hz kW
    MW kPa Pa dm nm mol kWh eV MeV mph rpm gal cal kcal day mA mV kV kN dL cL ms rad deg atm cc kmh kph rs Rs
    USD yen
""")


@dataclass(frozen=True)
class AnswerPart:
    """A value in LaTeX and what it counts: `unit` if it is known, `words` otherwise."""

    value: str
    unit: Unit | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantities:
    """One or several parts. `is_sum`: they are one quantity, as 5 h 30 min. `changes`: words that change the answer;
    `sides`: for each of `_OPPOSITES`, the side that the words name; `text`: all of the answer, without signs.
    """

    parts: tuple[AnswerPart, ...]
    is_sum: bool = False
    changes: frozenset[str] = frozenset()
    sides: tuple[int | None, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Clock:
    """A time of day, in seconds since midnight; `half`: whether the text says which half of the day."""

    seconds: int
    half: bool


@dataclass(frozen=True)
class Words:
    """A text without numbers."""

    text: str


@dataclass(frozen=True)
class Formula:
    """LaTeX without words."""

    latex: str
    text: str = field(default="", compare=False)


Reading = Quantities | Clock | Words | Formula


def reading_of(latex: str) -> Reading:
    """Read a cleaned text as one of the kinds of answer. Takes time linear in its length."""
    if (clock := _clock(latex)) is not None and clock.half:
        return clock
    if "\\begin" in latex or "\\pmod" in latex:
        return Formula(latex, letters_of(latex))
    if (degrees := _DEGREES.fullmatch(latex.strip())) is not None:
        return Quantities((AnswerPart(degrees[1], unit_named("degree"), ("degree",)),), text=letters_of(latex))
    if (angle := _ANGLE.fullmatch(latex.strip())) is not None:
        return _sum(("degrees", "minutes", "seconds"), ("degree", "arcmin", "arcsec"), angle, angle["sign"])
    if (length := _FEET.fullmatch(latex.strip())) is not None:
        return _sum(("feet", "inches"), ("foot", "inch"), length, "")
    if (remainder := _REMAINDER.fullmatch(latex.strip())) is not None:
        latex = rf"{remainder[1]}\text{{ remainder }}{remainder[2]}"
    if (prime := _PRIME.fullmatch(latex.strip())) is not None:
        return Quantities(
            (AnswerPart(prime[1], unit_named("inch" if prime[2] else "foot"), ("foot",)),), text=letters_of(latex)
        )
    latex = _UNITS_OVER.sub(r"\1/\2", latex)
    if _MONTH.search(latex) or _ORDINAL.fullmatch(re.sub("^[0-9]+(?=[0-9])", "", latex.strip())):
        latex = _ORDINAL.sub(_number_of, latex)
    marked = _PLAIN_WORD.sub(_marked_word, _TEXT.sub(_marked_text, latex))
    marked = _TEMPERATURE.sub(lambda found: f"\ue000{'celsius' if found[1][0] in 'Cc' else 'fahrenheit'}\ue001", marked)
    if "\ue000" in marked or _SYMBOLS.fullmatch(marked):
        marked = _AFTER_NUMBER.sub(lambda found: f"\ue000{found[1]}\ue001", marked)
        marked = _MINUTES.sub(lambda found: f"{found[1]}min\ue001", marked)
    marked = re.sub("\ue001\\s*\\\\cdot\\s*\ue000", "\ue001*\ue000", marked)
    currency = re.search(r"\\?([$\u20ac\u00a3\u00a5\u20b9])\s*(?=[-+]?[0-9.])", marked)
    if "\ue000" not in marked and currency is None:
        return Formula(latex, letters_of(latex))
    return _quantities(marked, latex) or Words(letters_of(latex))


def letters_of(text: str) -> str:
    """Return the letters and digits of a text, in lower case, without LaTeX's commands for fonts."""
    inner = _TEXT.sub(lambda found: f" {found[1]} ", text)
    return "".join(character for character in inner.casefold() if character.isalnum() or character in "\\-+/^=<>.")


def clock_of(latex: str) -> Clock | None:
    """Return the time of day that a text states, even if it does not say which half of the day."""
    return _clock(latex)


def lenient(latex: str) -> Quantities | None:
    """Read a formula as a value with a unit's symbol after it: `2 m`, `5km/h`, `3 cm^2`; None for others."""
    found = re.fullmatch(
        r"(.*?[0-9})])\s*([A-Za-z]{1,3}(?:\s*\^\s*\{?-?[0-9]\}?)?(?:\s*/\s*[A-Za-z]{1,3}(?:\s*\^\s*\{?-?[0-9]\}?)?)?)\s*",
        latex,
        re.DOTALL,
    )
    if found is None:
        return None
    words = [re.sub(r"[\s{}]", "", one) for one in re.findall(r"[A-Za-z]{1,3}|/|\^\s*\{?-?[0-9]\}?", found[2])]
    if any(one[0].isalpha() and one not in SYMBOLS for one in words) or (unit := unit_of(words)) is None:
        return None
    return Quantities((AnswerPart(found[1].strip(), unit),), text=letters_of(latex))


def _clock(latex: str) -> Clock | None:
    if len(latex) > 80:
        return None
    text = _TEXT.sub(lambda found: f" {found[1]} ", latex).lower().replace("\\", " ")
    text = " ".join(re.sub(r"\.(?![0-9])", " ", text).replace("{", "").replace("}", "").split())
    text = re.sub(r"\b([ap]) m\b", r"\1m", re.sub(r"(?<=[0-9])(?=[ap]\s?m\b)", " ", text))
    if text in ("noon", "midnight"):
        return Clock(43200 if text == "noon" else 0, True)
    found = _CLOCK.fullmatch(text)
    if found is None or (found["minute"] is None and found["half"] is None):
        return None
    hour, minute, second = int(found["hour"]), int(found["minute"] or 0), int(found["second"] or 0)
    half = {
        "a": "am",
        "p": "pm",
        "morning": "am",
        "afternoon": "pm",
        "evening": "pm",
        "at night": "pm",
        "noon": "pm",
        "midnight": "am",
    }
    said = found["half"]
    side = None if said is None else half.get(said, half.get(said[0]))
    if hour > 24 or minute > 59 or second > 59:
        return None
    if side is not None and hour <= 12:
        hour = hour % 12 + (12 if side == "pm" else 0)
    return Clock(hour % 24 * 3600 + minute * 60 + second, side is not None)


def same_clock(one: Clock, other: Clock) -> bool:
    """Return whether two times are the same; one that leaves the half of the day out fits both."""
    if one.half == other.half:
        return one.seconds == other.seconds
    loose = one if not one.half else other
    if loose.seconds >= 13 * 3600 or loose.seconds < 3600:  # in 24 hours
        return one.seconds == other.seconds
    return one.seconds % 43200 == other.seconds % 43200


def _sum(groups: tuple[str, ...], units: tuple[str, ...], found: re.Match[str], sign: str) -> Quantities:
    parts = [
        AnswerPart(sign + found[group], unit_named(unit))
        for group, unit in zip(groups, units, strict=True)
        if found[group]
    ]
    return Quantities(tuple(parts), is_sum=len(parts) > 1, text=letters_of(found[0]))


def _marked_text(found: re.Match[str]) -> str:
    """Return the content of \\text{...} with its words between marks; digits and signs stay."""
    inner = found[1]
    before = found.string[: found.start()].rstrip()
    is_after_number = bool(before) and (before[-1].isdigit() or before[-1] in "})" or before.endswith(_BEFORE_UNIT))
    letter = inner.strip()
    if len(letter) == 1 and letter.isalpha():
        if not before and not found.string[found.end() :].strip():
            return f"\ue000{letter}\ue001" if found[0].startswith("\\text") else f" {letter} "
        is_unit = is_after_number and letter not in "eidxyznk" and not found[0].startswith(("\\mathbf", "\\mathit"))
        return f"\ue000{letter}\ue001" if is_unit else f" {letter} "
    return re.sub(
        r"(?<![\\A-Za-z])[A-Za-z\u00b5][A-Za-z'\u00b5-]*",
        lambda word: f"\ue000{word[0]}\ue001",
        inner.replace("$", " "),
    )


def _marked_word(found: re.Match[str]) -> str:
    """Return what stands outside of \\text{...}, between marks if it is a word and no product of names."""
    word = found[0]
    after_number = re.search(r"[0-9})]\s*$", found.string[max(0, found.start() - 20) : found.start()]) is not None
    if word in _SHORT_WORDS and (word != "in" or after_number):
        return f"\ue000{word}\ue001"
    if word in _CAPITAL_MONTHS:
        return f"\ue000{word}\ue001"
    if after_number and (word in _SHORT_UNITS or unit_named(word) is not None):
        return f"\ue000{word}\ue001"
    if len(word) >= 4 and re.search("[aeiouyAEIOUY]", word) and "".join(sorted(word)) != word:
        return f"\ue000{word}\ue001"
    if len(word) == 3 and word.lower() in _EMPTY | _CHANGES | _SEPARATORS | {
        "ten",
        "six",
        "two",
        "one",
        "day",
        "cat",
        "dog",
        "red",
        "men",
        "car",
        "box",
        "pie",
        "mod",
    }:
        return f"\ue000{word}\ue001"
    return word


def _quantities(marked: str, latex: str) -> Quantities | Formula | None:
    """Return the values between the words, each with the words that belong to it; None if there is no value."""
    parts: list[AnswerPart] = []
    changes: set[str] = set()
    value, words, before = "", list[str](), list[str]()
    is_list = False
    depth = 0

    def close() -> None:
        nonlocal value, words, before
        text = value.strip().strip(",;").strip()
        text = re.sub(r"^(?:=|:|\.(?=\s))\s*", "", text)
        currency = re.match(r"([-+]?)\\?([$\u20ac\u00a3\u00a5\u20b9])\s*([-+]?[0-9.].*)", text, re.DOTALL)
        kept = [word for word in words if word.lower() not in _EMPTY or word in ("/", "*")]
        if words == ["in"]:
            kept = ["inch"]
        if currency is not None:
            text = currency[1] + currency[3]
            kept = [CURRENCIES[currency[2]], *kept]
        is_points = re.search(r"percent(?:age)? points?$", " ".join(kept).lower()) is not None
        if is_points:
            kept = []
        is_power = {"squared", "cubed"} if len(kept) == 1 else set[str]()
        if (power := re.search(r"(?:^| )(square|cube) of", " ".join(before).lower())) is not None:
            changes.add(power[1])
        for word in [*kept, *before]:
            if word in is_power:
                changes.add(word)
            if word.lower() in _CHANGES:
                changes.add(word.lower())
            elif word[:1].isupper() and word.lower() in _MONTHS:
                changes.add(_MONTHS[word.lower()])
        kept = [word for word in kept if word.lower() not in _CHANGES]
        for word in list(kept):
            if word.lower() in _SCALES:
                text = rf"({text})\cdot 10^{{{_SCALES[word.lower()]}}}"
                kept.remove(word)
            elif word.lower() in ("percent", "percentage", "pct"):
                text = rf"{text}\%"
                kept.remove(word)
        if text and re.search(r"[0-9A-Za-z\\]", text):
            unit = (
                _POINTS if is_points else unit_of(kept or [word for word in before if word.lower() in _CURRENCY_WORDS])
            )
            if unit is None and len(kept) > 1 and kept[0] != "/":
                unit = next(
                    (found for at in range(len(kept) - 1, 0, -1) if (found := unit_of(kept[:at])) is not None), None
                )
            names = tuple(
                sorted(
                    _stem(word) for word in (*before, *kept) if word.isalpha() and word.lower() not in _EMPTY | _CHANGES
                )
            )
            parts.append(AnswerPart(text, unit, names))
            before = []
        else:
            before.extend(kept)
        value, words = "", []

    for token in _TOKEN.finditer(marked):
        if token["word"] is not None:
            word = token["word"]
            if depth > 0:
                return None  # words inside of brackets: a sentence, not a value
            if value.rstrip().endswith((",", ";")) and not words and word.lower() not in _SEPARATORS:
                close()
                before.append(word)
            elif word.lower() in _SEPARATORS:
                close()
                is_list = is_list or word.lower() == "or"
                if word.lower() == "or":
                    changes.discard("or")
            elif value.strip(" ,;=:") or words:
                words.append(word)
            else:
                before.append(word)
                value = ""
                if word.lower() in _CHANGES:
                    changes.add(word.lower())
        elif token["power"] is not None and words:
            words.append(re.sub(r"[\s{}]", "", token["power"]))
        elif token["other"] is not None and token["other"] in "/*" and words:
            words.append(token["other"])
        elif token["list"] is not None and depth == 0 and words:
            close()
        elif (token["space"] is not None and words) or (
            words and token["other"] is not None and token["other"] in ".()"
        ):
            continue
        else:
            if words and token["other"] is not None:
                if words[-1] in ("/", "*"):
                    return None
                close()
            piece = token[0]
            depth += (piece in ("(", "[", "{")) - (piece in (")", "]", "}"))
            value += piece
    close()
    if before and parts:
        changes.update(word.lower() for word in before if word.lower() in _CHANGES)
    if not parts:
        return None
    if _BOUND.search(marked):
        changes.add("or more")
    if not changes and not any(part.unit or part.words for part in parts):
        return Formula(", ".join(part.value for part in parts), letters_of(latex))
    sides = tuple(_side(marked, group) for group in _OPPOSITES)
    if parts[0].unit == unit_named("degree"):  # 12 degrees 30 minutes
        angles = {unit_named("minute"): unit_named("arcmin"), unit_named("second"): unit_named("arcsec")}
        parts[1:] = [replace(part, unit=angles.get(part.unit, part.unit)) for part in parts[1:]]
    known = [part.unit for part in parts]
    is_sum = len(parts) > 1 and not is_list and all(unit is not None for unit in known)
    if is_sum:
        units = [unit for unit in known if unit is not None]
        is_sum = len({unit.dimension for unit in units}) == 1 and all(
            one.factor > two.factor for one, two in itertools.pairwise(units)
        )
    return Quantities(tuple(parts), is_sum, frozenset(changes), sides, letters_of(latex))


def _side(marked: str, group: dict[str, int]) -> int | None:
    said = {group[word.lower()] for word in re.findall("\ue000([^\ue001]*)\ue001", marked) if word.lower() in group}
    return said.pop() if len(said) == 1 else None


def _stem(word: str) -> str:
    """Return a word in lower case, without the ending of a plural."""
    low = word.lower()
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("shes", "sh"), ("ches", "ch"), ("xes", "x"), ("s", "")):
        if low.endswith(ending) and len(low) > len(ending) + 2 and not low.endswith("ss"):
            return low[: -len(ending)] + instead
    return low


def same_quantities(
    gold: Quantities, given: Quantities, alike: Callable[[Any, Any], bool], value: Callable[[str], Any]
) -> bool:
    """Return whether two answers with words say the same. `value(latex)` reads a value, or gives None; `alike` compares
    two.
    """
    if gold.changes != given.changes:
        return False
    if any(one is not None and two is not None and one != two for one, two in zip(gold.sides, given.sides)):
        return False
    if gold.is_sum or given.is_sum:
        return _same_sums(gold, given, alike, value)
    if len(gold.parts) != len(given.parts):
        return False
    if len(gold.parts) == 1:
        return _same_parts(gold.parts[0], given.parts[0], alike, value)
    if gold.changes & _ORDERED:
        return all(_same_parts(a, b, alike, value) for a, b in zip(gold.parts, given.parts, strict=True))
    ours, theirs = (sorted(one.parts, key=lambda part: part.words) for one in (gold, given))
    names = [[part.words for part in one] for one in (ours, theirs)]
    if names[0] == names[1] and len(set(names[0])) == len(ours):
        return all(_same_parts(a, b, alike, value) for a, b in zip(ours, theirs, strict=True))
    if len({part.words for part in gold.parts}) == 1 and len({part.words for part in given.parts}) == 1:
        left = list(given.parts)  # one kind of thing: a list in any order
        for one in gold.parts:
            found = next((other for other in left if _same_parts(one, other, alike, value)), None)
            if found is None:
                return False
            left.remove(found)
        return True
    return all(_same_parts(a, b, alike, value) for a, b in zip(gold.parts, given.parts, strict=True))


def _same_parts(
    gold: AnswerPart, given: AnswerPart, alike: Callable[[Any, Any], bool], value: Callable[[str], Any]
) -> bool:
    ours, theirs = value(gold.value), value(given.value)
    if ours is None or theirs is None:
        return False
    one, two = gold.unit, given.unit
    if _POINTS in (one, two) and any(part.value.rstrip().endswith("%") for part in (gold, given)):
        return False
    if one is None or two is None or one == two:
        return alike(ours, theirs)
    if one.dimension != two.dimension:
        return _same_angles(gold, given, ours, theirs, alike)
    return alike(_in_base(ours, one), _in_base(theirs, two))


def _same_angles(
    gold: AnswerPart, given: AnswerPart, ours: Any, theirs: Any, alike: Callable[[Any, Any], bool]
) -> bool:
    import sympy

    values = {}
    for part, number in ((gold, ours), (given, theirs)):
        assert part.unit is not None
        values[part.unit.dimension] = _in_base(number, part.unit)
    degrees, radians = values.get((("degree", 1),)), values.get((("radian", 1),))
    return degrees is not None and radians is not None and alike(degrees, radians * 180 / sympy.pi)


def _same_sums(
    gold: Quantities, given: Quantities, alike: Callable[[Any, Any], bool], value: Callable[[str], Any]
) -> bool:
    totals = []
    for one in (gold, given):
        values = [value(part.value) for part in one.parts]
        if any(number is None for number in values):
            return False
        if all(part.unit is not None for part in one.parts):
            units = [part.unit for part in one.parts if part.unit is not None]
            if len({unit.dimension for unit in units}) != 1 or (len(units) > 1 and not one.is_sum):
                return False
            # A sign before the first part applies to the whole sum.
            is_negative = one.parts[0].value.lstrip().startswith("-")
            bases = [_in_base(number, unit) for number, unit in zip(values, units, strict=True)]
            rest = sum(bases[1:], start=0)
            totals.append((bases[0] - rest if is_negative else bases[0] + rest, units))
        elif len(values) == 1:
            totals.append((values[0], None))
        else:
            return False
    (ours, one), (theirs, two) = totals
    if one is not None and two is not None:
        return one[0].dimension == two[0].dimension and alike(ours, theirs)
    units = one or two or []
    whole, number = (ours, theirs) if two is None else (theirs, ours)
    return any(alike(whole, _in_base(number, unit)) for unit in units)


def _in_base(number: Any, unit: Unit) -> Any:
    """Convert a number from a unit to the base unit of its dimension, exactly; a decimal stays one if the unit is a
    base unit.
    """
    import sympy

    if isinstance(number, sympy.Eq):
        number = number.rhs
    factor = sympy.Rational(unit.factor.numerator, unit.factor.denominator)
    offset = sympy.Rational(unit.offset.numerator, unit.offset.denominator)
    if factor == 1 and offset == 0:
        return number
    if isinstance(number, sympy.Float):
        found = Fraction(str(number))
        number = sympy.Rational(found.numerator, found.denominator)
    try:
        return number * factor + offset
    except TypeError:
        return number
