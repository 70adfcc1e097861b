"""The built-in reward `math`: is the final answer of a response the same mathematical object as the row's?

`final_answer` finds the answer in a response, and `cleaned` prepares its LaTeX; every search takes time linear in the
text. `math` then compares answers in order as texts, times, words, quantities and formulas, and refuses what would take
too long to compute with. `quantities.py` and `latex.py` read answers, `equality.py` compares them. There are no
deadlines here: the scoring pool's deadline ends a comparison that takes too long, together with its process.
"""

from __future__ import annotations

import functools
import logging
import math as maths
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gspo_mega.rewards import latex as latex_reading
from gspo_mega.rewards import quantities
from gspo_mega.rewards.latex import Congruence, Rows, latex_of, plain
from gspo_mega.rewards.numerals import MARK, final_number, last_box, number_alone
from gspo_mega.rewards.quantities import AnswerPart, Clock, Formula, Quantities, Words

_ANSWER = re.compile(r"\b(?i:answer)\b[ ]?(?i:is[ ]?:?|:)[ *]*")
_FIRST = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_LINE = 4000  # characters of one line that are looked at
# Where a stated answer ends: at the end of its sentence, or before a reason.
_END = re.compile(r"[.;](?=\s|$)|,?\s(?:because|since|as|so|which|where|when)\s")
_MOST_CLEANED = 100_000
_MATHS_SIGNS = re.compile(r"(?<!\\)\$|(?<!\\)\\[()\[\]]|^\s*\*\*|\*\*(?=\s*$|[.,;:]|\s+[A-Za-z]{2})")
_LEADING = re.compile(r"(?:=|\\(?:approx|therefore)(?![A-Za-z]))\s*")
# Bold type; `2**3` is a power.
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*([^*]+)\*\*(?![\w({\\*])")


def final_answer(response: str) -> str | Fraction | None:
    """Return the final answer of a response: LaTeX, a number, or None.

    It is in the last `\\boxed{...}`; else after the last `####`; else in the last `<answer>` tags; else after the
    last `answer is` or `Answer:`; else it is the last formula of the last line; else the last number.
    """
    for found in (last_box(response), _marked(response), _tagged(response), _said(response)):
        if found is not None:
            return found
    *_, last = response.rstrip().rsplit("\n", 1)
    formulas = [next(filter(None, groups)) for groups in _FIRST.findall(last[-_LINE:])]
    return formulas[-1] if formulas else final_number(response)


def gold_answer(text: str) -> str:
    """Return the answer in the text of a row: in its last box, after its last `####`, or the whole of it."""
    for found in (last_box(text), _marked(text)):
        if found is not None:
            return found
    return text


def cleaned(latex: str) -> str:
    """Return the LaTeX in ASCII, with one name for each thing and without math-mode delimiters."""
    text = latex_of(latex[:_MOST_CLEANED])
    text = plain(_MATHS_SIGNS.sub("", _BOLD.sub(r"\1", text.strip())).strip())
    text = text[leading.end() :] if (leading := _LEADING.match(text)) is not None else text
    while True:
        shorter = text.rstrip(".,;: ").removesuffix("\\").strip()
        if shorter == text:
            return text
        text = shorter


def _marked(text: str) -> str | None:
    _, mark, tail = text.rpartition(MARK)
    return tail.strip().partition("\n")[0] if mark else None


def _tagged(text: str) -> str | None:
    _, tag, tail = text.rpartition("<answer>")
    return tail.partition("</answer>")[0] if tag else None


def _said(text: str) -> str | None:
    found = None
    for found in _ANSWER.finditer(text):  # noqa: B007  the last one
        pass
    if found is None:
        return None
    line = text[found.end() :].lstrip().partition("\n")[0][:_LINE]
    formula = _FIRST.match(line)
    if formula is not None:
        end = _END.search(line, formula.end())
        # `$5$ or $6$` is one answer; of `$5$ apples` only the formula is.
        more = line[formula.end() : end.start() if end else len(line)]
        return line[: end.start() if end else len(line)] if "$" in more else next(filter(None, formula.groups()))
    end = _END.search(line)
    return line[: end.start()] if end else line


_LOGGER = logging.getLogger(__name__)
_MOST_CHARACTERS = 600  # of one answer: a longer one is no answer, and reading it may take minutes
_MOST_BITS = 1e5  # of a number that is evaluated
_MOST_DEGREE = 10_000  # of a symbol
_MOST_SUM_DEGREE = 60  # of anything else with a symbol in it
_MOST_TERMS = 10_000  # of a sum or a product
_MOST_SUM_BITS = 1e7  # of all its terms together
_MOST_WORDS = 3  # outside of \text{...}: more are prose
_BASE = re.compile(r"[0-9A-Z]+_\{?([0-9]+)\}?")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s?\{([^{}]*)\}")
_SPACE = re.compile(r"(?<=[0-9A-Za-z])\s+(?=[0-9A-Za-z])")
_SYNONYMS = {
    "\\emptyset": "nosolution", "nosolutions": "nosolution", "thereisnosolution": "nosolution",
    "therearenosolutions": "nosolution", "nosolutionexists": "nosolution", "nosolutionsexist": "nosolution",
    "norealsolutions": "norealsolution", "doesnotexist": "dne", "limitdoesnotexist": "dne",
}  # fmt: skip
_PRIMED = re.compile(r"(?<![\\A-Za-z])[A-Za-z]\s*('+|\^\s*\{?(?:\s*\\prime)+)")
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
_TUPLE = re.compile(r"\s*\([^()=<>]*,[^()=<>]*\)\s*")
# A name that stands for every whole number, at the end of an answer: `k\pi, k \in \mathbb{Z}`.
_IN_SET = re.compile(
    r"[,;(]?\s*(?:(?:where|for|with|and)\s+)?(?:(?:any|all|every|some|each)\s+)?([A-Za-z])\s*\\in\s*\\mathbb\s*\{?\s*([ZN])"
    r"\s*\}?(?:[\^_]\s*\{?[^{}]{0,6}\}?)?\s*\)?\s*$"
)
_IS_INTEGER = re.compile(
    r"[,;(]?\s*(?:(?:where|for|with|and)\s+)?(?:(?:any|all|every|some|each)\s+)?(?:(?:integers?|integral)\s+([A-Za-z])|"
    r"([A-Za-z])\s+(?:is|are)?\s*(?:an?|any)?\s*(?:arbitrary\s+)?integers?)\s*\)?\s*$"
)
# Products of matrices: an inverse or a transpose of one capital next to another, or AB - BA.
_MATRICES = re.compile(
    r"[A-Z]\s*\^\s*\{?\s*(?:-\s*1|T|\\top|\\intercal|\\dagger|\\mathrm\{T\}|\\text\{T\})\s*\}?\s*\(?[A-Z]"
    r"|[A-Z]\s*\)?\s*[A-Z]\s*\^\s*\{?\s*(?:-\s*1|T|\\top|\\intercal|\\dagger|\\mathrm\{T\}|\\text\{T\})"
)
_COMMUTATOR = re.compile(r"([A-Z])\s*([A-Z])\s*-\s*\2\s*\1")
_TRANSPOSE = re.compile(r"\^\s*\{?\s*(?:T|\\top|\\intercal|\\dagger)\s*\}?")


@dataclass(frozen=True)
class _Value:
    """What a formula stands for. `every`: the name that ranges over whole numbers, if the formula has one; `of`: their
    set, Z or N.
    """

    it: Any
    every: str | None = None
    of: str = "Z"


def check_math() -> None:
    """Load math-verify before the first scoring has a deadline. Raises RewardError if it is not installed."""
    latex_reading.package()


def math(*, prompt: str, response: str, answer: Any, metadata: dict[str, Any]) -> float:
    """Return 1 if the response's final answer (see `final_answer`) equals the row's, else 0.

    Raises ValueError if the row's answer cannot be read. The data check refuses such a row before a run.
    """
    text = _text_of(answer)
    _gold(text)
    given = final_answer(response)
    if given is None:
        return 0.0
    if isinstance(given, str):
        if len(given) > _MOST_CHARACTERS:
            return 0.0
        given = cleaned(given)
        if not given:
            return 0.0
        if _same_text(given, text):
            return 1.0
        if _base(given) not in (_base(text), None):
            return 0.0
        if len(given) > _MOST_CHARACTERS:
            return 0.0
    try:
        return float(_same(text, given))
    except (RecursionError, MemoryError):
        return 0.0
    except Exception:  # SymPy raises several kinds for what it cannot compute
        _LOGGER.debug("a comparison failed", exc_info=True)
        return 0.0


def problem_of_math_answer(answer: Any) -> str | None:
    """Return why `math` cannot compare anything with an answer of a data file, or None."""
    try:
        text = _text_of(answer)
        if number_alone(text) is None:
            _gold(text)
    except ValueError as error:
        return str(error)
    return None


def _text_of(answer: Any) -> str:
    """Return the answer of a row as cleaned LaTeX. Raises ValueError if there is none, if there are several, or if it
    is too long.
    """
    if isinstance(answer, list) and len(answer) == 1:  # as some collections have it
        answer = answer[0]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the answer {str(answer)[:60]!r} is neither a text nor a number")
    text = cleaned(gold_answer(str(answer)[-100_000:]))
    if not text:
        raise ValueError("the answer is empty")
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"the answer has {len(text)} characters; at most {_MOST_CHARACTERS} are read")
    return text


@functools.lru_cache(maxsize=512)
def _gold(text: str) -> None:
    """Raise ValueError if a row's answer cannot be read or computed with."""
    main = _condition(text)[0]
    if len(_WORD.findall(_TEXT.sub("", main))) > _MOST_WORDS:
        raise ValueError(
            f"the answer {text[:100]!r} is prose; LaTeX is expected, alone, in \\boxed{{...}} or behind ####, with"
            r" words in \text{...}"
        )
    reading = _reading(text)
    if isinstance(reading, Clock | Words):
        return
    latexes = [part.value for part in reading.parts] if isinstance(reading, Quantities) else [reading.latex]
    for latex in latexes:
        value = _value(latex)
        if value is None:
            raise ValueError(f"the answer {text[:100]!r} cannot be read as LaTeX")
        if _is_beyond(value.it):
            raise ValueError(f"the answer {text[:100]!r} is too large to be computed out")


def _same(gold: str, given: str | Fraction) -> bool:
    ours = _reading(gold)
    theirs = _reading(given) if isinstance(given, str) else Formula(str(given), str(given))
    if (ratio := _ratio(gold)) is not None and not isinstance(theirs, Clock):
        return ratio == _ratio(str(given))
    if isinstance(ours, Clock) or isinstance(theirs, Clock):
        return _same_times(gold, str(given), ours, theirs)
    if isinstance(ours, Words) or isinstance(theirs, Words):
        one, two = (_SYNONYMS.get(text, text) for text in (ours.text, theirs.text))
        return bool(one) and one == two
    if isinstance(ours, Quantities) or isinstance(theirs, Quantities):
        return _same_amounts(ours, theirs)
    if re.fullmatch("[A-E]", ours.latex) and theirs.latex == ours.latex.lower():
        return True  # a choice
    one, two = _value(ours.latex), _value(given if isinstance(given, Fraction) else theirs.latex)
    if one is None or two is None or _is_beyond(two.it) or _is_beyond(one.it):
        return False
    if isinstance(given, str) and not _same_signs(gold, given):
        return False
    if isinstance(given, str) and not _same_brackets(ours.latex, theirs.latex, one.it, two.it):
        return False
    if _speaks_of_matrices(ours.latex, theirs.latex):
        return _without_signs(ours.latex) == _without_signs(theirs.latex)
    return _alike(one, two)


def _ratio(text: str) -> list[Fraction] | None:
    """Return the terms of a ratio of three or more numbers, divided by the first one; None of anything else."""
    terms = [number_alone(term) for term in text.split(":")] if text.count(":") > 1 else []
    if not terms or None in terms or not terms[0]:
        return None
    return [term / terms[0] for term in terms if term is not None]


def _same_signs(gold: str, given: str) -> bool:
    """Return whether two formulas have as many primes after the letters of their last sides (f' is not f), and do not
    join inequalities by `and` on one side and by `or` on the other.
    """
    ours, theirs = (
        [one.count("'") + one.count("prime") for one in _PRIMED.findall(text.rpartition("=")[2])]
        for text in (gold, given)
    )
    if sorted(ours) != sorted(theirs):
        return False
    joined = [
        {word for word in ("and", "or") if re.search(rf"(?<![A-Za-z]){word}(?![A-Za-z])", text)}
        for text in (gold, given)
    ]
    return not all(joined) or joined[0] == joined[1] or not _INEQUALITY.search(gold)


def _same_brackets(gold: str, given: str, ours: Any, theirs: Any) -> bool:
    """Return whether the brackets of two answers agree: a set in braces is no tuple in parentheses, and, if neither has
    braces, what one lists several times the other lists as often: 1, 1, 2 is not 1, 2.
    """
    braces = [text.lstrip().startswith("\\{") for text in (gold, given)]
    if any(sign in text for sign in ("|", ":", "\\mid") for text in (gold, given)):
        return True
    if (braces[0] and _TUPLE.fullmatch(given)) or (braces[1] and _TUPLE.fullmatch(gold)):
        return False
    if "\\{" in gold or "\\{" in given or "\\pm" in gold + given or "\\mp" in gold + given:
        return True
    one, two = _equality().num_written(ours), _equality().num_written(theirs)
    if one == two == 0 or not (_equality().repeats(ours) or _equality().repeats(theirs)):
        return True
    return max(one, 1) == max(two, 1) and _equality().same_lists(ours, theirs)


def _equality() -> Any:
    """Return the module that compares; it imports SymPy, which commands and other rewards do without."""
    from gspo_mega.rewards import equality

    return equality


def _reading(text: str) -> quantities.Reading:
    return quantities.reading_of(text) if _condition(text)[1] is None else Formula(text, quantities.letters_of(text))


def _same_times(gold: str, given: str, ours: Any, theirs: Any) -> bool:
    one = ours if isinstance(ours, Clock) else quantities.clock_of(gold)
    two = theirs if isinstance(theirs, Clock) else quantities.clock_of(given)
    if one is not None and two is not None:
        return quantities.same_clock(one, two)
    clock, text = (one, given) if one is not None else (two, gold)
    number = number_alone(text)  # `5` for 5 p.m.
    return clock is not None and number is not None and clock.seconds % 43200 == number % 12 * 3600 and number > 0


def _same_amounts(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Formula):
        ours = _amount(ours, theirs)
    if isinstance(theirs, Formula):
        theirs = _amount(theirs, ours)
    return quantities.same_quantities(ours, theirs, _alike_values, _object)


def _amount(formula: Formula, other: Quantities) -> Quantities:
    """Read a formula without words as quantities, like those that it is compared with: a unit's symbol becomes the
    unit, and a list a list of amounts.
    """
    if all(part.unit is not None for part in other.parts):
        read = quantities.lenient(formula.latex)
        if read is not None:
            return read
    if len(other.parts) > 1 and not other.is_sum:
        pieces = _split(formula.latex)
        if len(pieces) > 1:
            return Quantities(tuple(AnswerPart(piece) for piece in pieces), text=formula.text)
    return Quantities((AnswerPart(formula.latex),), text=formula.text)


def _split(latex: str) -> list[str]:
    """Return the parts of a list, without the brackets around it."""
    text = re.sub(r"^\\?[{(\[]|\\?[})\]]$", "", latex.strip())
    return [piece.strip() for piece in re.split(r",(?![0-9]{3}(?![0-9]))|;", text) if piece.strip()]


def _object(latex: str) -> Any:
    value = _value(latex)
    return None if value is None or _is_beyond(value.it) else value.it


def _alike_values(one: Any, two: Any) -> bool:
    return _alike(_Value(one), _Value(two))


@functools.lru_cache(maxsize=1024)
def _value(latex: str | Fraction) -> _Value | None:
    """Return what a formula stands for; None if it cannot be read."""
    if isinstance(latex, Fraction):
        return _Value(latex_reading.read(latex))
    main, name, of = _condition(latex)
    found = latex_reading.read(main)
    return None if found is None else _Value(found, name, of)


def _condition(latex: str) -> tuple[str, str | None, str]:
    """Return (the formula without a condition such as `k \\in \\mathbb{Z}`, the name in the condition or None, its set:
    Z or N).
    """
    if "\\in" not in latex and "integ" not in latex:
        return latex, None, "Z"
    text = _TEXT.sub(r" \1 ", latex)
    found = _IN_SET.search(text) or _IS_INTEGER.search(text)
    if found is None or not text[: found.start()].strip(" ,;("):
        return latex, None, "Z"
    groups = [one for one in found.groups() if one]
    return text[: found.start()].rstrip(" ,;("), groups[0], groups[1] if len(groups) > 1 else "Z"


def _alike(gold: _Value, given: _Value) -> bool:
    ours, theirs = gold.it, given.it
    if isinstance(ours, Rows) or isinstance(theirs, Rows):
        return _same_rows(ours, theirs)
    if isinstance(ours, Congruence) or isinstance(theirs, Congruence):
        return _congruent(ours, theirs)
    if gold.every is not None:
        return _same_families(gold, given)
    return _equality().same(ours, theirs)


def _same_rows(ours: Any, theirs: Any) -> bool:
    """Compare two definitions by cases, or a system of equations with a list of them, in any order."""
    lists = [
        one.rows if isinstance(one, Rows) else [[part] for part in _equality().elements(one) or []]
        for one in (ours, theirs)
    ]
    if len(lists[0]) != len(lists[1]) or not lists[0]:
        return False
    left = list(lists[1])
    for row in lists[0]:
        fitting = (
            other
            for other in left
            if len(row) == len(other) and all(_alike_values(a, b) for a, b in zip(row, other, strict=True))
        )
        found = next(fitting, None)
        if found is None:
            return False
        left.remove(found)
    return True


def _congruent(ours: Any, theirs: Any) -> bool:
    """Compare congruences: `1 mod 3` is `4 mod 3`; a plain number is compared with the residue as it stands."""
    if not isinstance(ours, Congruence) or not isinstance(theirs, Congruence):
        one, two = (part.residue if isinstance(part, Congruence) else part for part in (ours, theirs))
        return _equality().same(one, two)
    if not _equality().same(ours.modulus, theirs.modulus):
        return False
    try:
        return bool((ours.residue - theirs.residue) % ours.modulus == 0)
    except TypeError:
        return _equality().same(ours.residue, theirs.residue)


def _same_families(gold: _Value, given: _Value) -> bool:
    """Return whether two families `a + kd` for every whole k, or two lists of them, have the same numbers, whatever k
    is called and wherever it begins.
    """
    import sympy

    if given.every is not None and given.of != gold.of:
        return False
    ours = _equality().elements(gold.it) or [gold.it]
    theirs = _equality().elements(given.it) or [given.it]
    names = (
        [given.every] if given.every else sorted({s.name for one in theirs for s in getattr(one, "free_symbols", ())})
    )
    known = {s.name for one in ours for s in getattr(one, "free_symbols", ())}
    name = (
        gold.every
        if given.every is None and gold.every in names
        else next((one for one in names if one not in known or one == given.every), None)
    )
    k = sympy.Symbol("k", integer=True)

    def in_k(one: Any, every: str | None) -> Any:
        one = one.rhs if isinstance(one, sympy.Eq) else one
        return one.xreplace({s: k for s in one.free_symbols if s.name == every}).doit()

    def alike(one: Any, two: Any) -> bool:
        if not isinstance(one, sympy.Expr) or not isinstance(two, sympy.Expr):
            return _equality().same(one, two)
        if _equality().same(one, two):
            return True
        steps = [sympy.expand(part.subs(k, 1) - part.subs(k, 0)) for part in (one, two)]
        linear = all(
            _equality().same(sympy.expand(part.subs(k, 3) - part.subs(k, 0)), 3 * step)
            for part, step in zip((one, two), steps)
        )
        if (
            gold.of != "Z"
            or not linear
            or steps[0] == 0
            or not (_equality().same(*steps) or _equality().same(steps[0], -steps[1]))
        ):
            return False
        return sympy.simplify((one.subs(k, 0) - two.subs(k, 0)) / steps[0]).is_integer is True

    try:
        left = [in_k(one, name) for one in theirs]
        for one in (in_k(one, gold.every) for one in ours):
            found = next((other for other in left if alike(one, other)), None)
            if found is None:
                return False
            left.remove(found)
    except (AttributeError, TypeError):
        return _equality().same(gold.it, given.it)
    return not left


def _speaks_of_matrices(gold: str, given: str) -> bool:
    """Return whether letters are matrices as far as can be told, so that their products do not commute."""
    if _COMMUTATOR.search(gold) or _COMMUTATOR.search(given):
        return True
    if not _MATRICES.search(gold) or not _MATRICES.search(given):
        return bool(_MATRICES.search(gold) or _MATRICES.search(given)) and bool(
            _TRANSPOSE.search(gold) or _TRANSPOSE.search(given)
        )
    return True


def _without_signs(latex: str) -> str:
    text = re.sub(r"\\(?:cdot|times)(?![A-Za-z])|[\s{}*]", "", _TEXT.sub(r"\1", latex))
    return re.sub(r"\\(?:top|intercal)", "T", text)


def _same_text(given: str, gold: str) -> bool:
    """Return whether two texts are the same, apart from white space that separates nothing: 1 1/2 is not 11/2."""
    ours, theirs = ("".join(_SPACE.sub("\x00", one).split()) for one in (given, gold))
    return ours == theirs


def _base(text: str) -> str | None:
    """Return the base that a number in LaTeX names (`101_2`, `2F_{16}`)."""
    found = _BASE.fullmatch(text)
    return None if found is None else found[1]


def _is_beyond(value: Any) -> bool:
    """Return whether computing with something would take more than a moment, because of the size of its numbers or
    powers.
    """
    import sympy

    try:
        return any(isinstance(one, sympy.Basic) and _bits(one) > _MOST_BITS for one in _expressions(value))
    except RecursionError:
        return True


def _expressions(value: Any) -> Iterator[Any]:
    if isinstance(value, Congruence):
        yield from (value.residue, value.modulus)
    elif isinstance(value, Rows):
        yield from (cell for row in value.rows for cell in row)
    elif (flat := getattr(value, "flat", None)) is not None:  # a matrix
        yield from flat()
    else:
        yield value


def _bits(expression: Any) -> float:
    """Return a rough bound on the binary digits of the largest number in an expression."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return float(max(expression.p.bit_length(), expression.q.bit_length()))
    inner = [_bits(one) for one in expression.args]
    most = max(inner, default=8.0)
    if isinstance(expression, sympy.Pow) and len(inner) == 2:
        times = _magnitude(expression.args[1])
        if expression.args[0].free_symbols and times > (_MOST_SUM_DEGREE if expression.args[0].args else _MOST_DEGREE):
            return maths.inf
        return max(most, inner[0] * times)
    if isinstance(expression, sympy.exp):
        return max(most, 1.5 * _magnitude(expression.args[0]))
    if isinstance(expression, sympy.factorial | sympy.gamma):
        times = _magnitude(expression.args[0])
        return maths.inf if times > _MOST_BITS else max(most, times * maths.log2(times + 2))
    if isinstance(expression, sympy.binomial):
        return min(_magnitude(part) for part in expression.args) * most
    if isinstance(expression, sympy.Sum | sympy.Product):
        terms = 1.0
        largest = expression.function
        for name, low, high in (limit for limit in expression.limits if len(limit) == 3):
            terms *= _magnitude(high - low) + 1
            with sympy.evaluate(False):
                largest = largest.xreplace({name: high})
        if terms > _MOST_TERMS or terms * _bits(largest) > _MOST_SUM_BITS:
            return maths.inf
        return most * (terms if isinstance(expression, sympy.Product) else 1)
    if isinstance(expression, sympy.Add | sympy.Mul):
        return sum(inner)
    return most


def _magnitude(expression: Any) -> float:
    """Return a rough bound on the size of a number; 1 for anything with a symbol in it."""
    if expression.free_symbols:
        return 1.0
    if expression.is_Integer and expression.p.bit_length() < 1000:
        return float(abs(expression.p))
    if expression.is_NumberSymbol:
        return float(expression)
    bits = _bits(expression)
    return 2.0**bits if bits < 1000 else maths.inf
