"""Read one formula of LaTeX as objects of SymPy: numbers, expressions, sets, tuples, intervals, matrices, relations.

`read` rewrites what the package `latex2sympy2_extended` (a part of math-verify) cannot read, such as synonyms, and has
the package read the result. Words and units are read by `quantities.py`.

`latex_of` first turns Unicode's mathematics into LaTeX: `√5` is `\\sqrt{5}`, `x²` is `x^{2}`, `½` is `\\frac{1}{2}`,
`∞` is `\\infty`. Most characters are read from Unicode's own data (names, decompositions, decimal values), so that
whole blocks are covered; the tables below hold what that data does not say.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

from gspo_mega.base.errors import RewardError
from gspo_mega.rewards.numerals import number_alone

# Unicode's signs, by their form in LaTeX.
_SIGNS = {
    "-": "\u2212\u2010\u2011\u2012\u2013\u2014\u2015\u2043\u207b\uff0d\ufe63\ufe58\u2796\u02d7",
    "+": "\u2795\uff0b\ufe62\u2064",
    r"\times ": "\u00d7\u2715\u2716\u2a09\u2a2f\u2a2f\u2a09",
    r"\cdot ": "\u00b7\u22c5\u2219\u2022\u2027\u30fb\u2e31\u25cf\u26ab\u2217\u204e\u2731\uff0a\u2a30",
    r"\div ": "\u00f7\u2797\u2a38",
    "/": "\u2044\u2215\u29f8\uff0f",
    ":": "\u2236\uff1a\ua789\u02d0",
    r"\pm ": "\u00b1",
    r"\mp ": "\u2213",
    r"\le ": "\u2264\u2a7d\u2266\u22dc\u2272",
    r"\ge ": "\u2265\u2a7e\u2267\u2273",
    "<": "\uff1c\ufe64",
    ">": "\uff1e\ufe65",
    "=": "\uff1d\ufe66\ua78a",
    r"\ne ": "\u2260",
    r"\approx ": "\u2248\u2243\u224a\u2245\u2252\u2253",
    r"\equiv ": "\u2261",
    r"\infty ": "\u221e\u267e",
    r"\cup ": "\u222a\u22c3",
    r"\cap ": "\u2229\u22c2",
    r"\emptyset ": "\u2205\u2300\u29b0\u00d8\u00f8",
    r"\in ": "\u2208\u220a",
    r"\notin ": "\u2209",
    r"\ni ": "\u220b\u220d",
    r"\subset ": "\u2282",
    r"\subseteq ": "\u2286",
    r"\supset ": "\u2283",
    r"\supseteq ": "\u2287",
    r"\setminus ": "\u2216\u29f5",
    r"\sum ": "\u2211\u2140",
    r"\prod ": "\u220f",
    r"\int ": "\u222b",
    r"\partial ": "\u2202",
    r"\nabla ": "\u2207",
    r"\Delta ": "\u2206",
    r"\Omega ": "\u2126",
    r"\mu ": "\u00b5",
    r"\forall ": "\u2200",
    r"\exists ": "\u2203",
    r"\land ": "\u2227\u22c0",
    r"\lor ": "\u2228\u22c1",
    r"\neg ": "\u00ac",
    r"\to ": "\u2192\u27f6\u21a6",
    r"\Rightarrow ": "\u21d2\u27f9",
    r"\Leftrightarrow ": "\u21d4\u27fa",
    "|": "\uff5c\u01c0\u2223\u2758\u2502",
    r"\parallel ": "\u2225\u2016",
    r"\perp ": "\u22a5\u27c2",
    r"\angle ": "\u2220\u2221",
    r"\triangle ": "\u25b3\u25b5",
    r"\lfloor ": "\u230a",
    r"\rfloor ": "\u230b",
    r"\lceil ": "\u2308",
    r"\rceil ": "\u2309",
    r"\langle ": "\u27e8\u2329\u3008",
    r"\rangle ": "\u27e9\u232a\u3009",
    r"\ldots ": "\u2026\u22ef\u22ee\u22f1\ufe19",
    r"^{\circ}": "\u00b0\u00ba\u02da",
    r"\circ ": "\u2218",
    r"^{\circ}C": "\u2103",
    r"^{\circ}F": "\u2109",
    "'": "\u2032\u2019\u2018\u02b9\u00b4\uff07",
    "''": "\u2033\u201d\u201c\u02ba\uff02",
    r"\mathbb{R}": "\u211d",
    r"\mathbb{Z}": "\u2124",
    r"\mathbb{Q}": "\u211a",
    r"\mathbb{N}": "\u2115",
    r"\mathbb{C}": "\u2102",
    r"\mathbb{P}": "\u2119",
    r"\ell ": "\u2113",
    r"\hbar ": "\u210f",
    r"\aleph ": "\u2135",
    r"\propto ": "\u221d",
    r"\sim ": "\u223c",
    r"\oplus ": "\u2295",
    r"\otimes ": "\u2297",
    r"\therefore ": "\u2234",
    r"\%": "\uff05\ufe6a\u066a",
    r"\$": "\uff04\ufe69",
    "#": "\uff03\ufe5f",
    ",": "\uff0c\u3001\u060c\ufe50\u2063\u066c",
    ".": "\uff0e\u3002\ufe52\u066b",
    ";": "\uff1b\ufe54",
    "!": "\uff01\ufe57",
    "?": "\uff1f",
    "(": "\uff08\u2768\ufe59\u207d",
    ")": "\uff09\u2769\ufe5a\u207e",
    "[": "\uff3b\u3010\u27e6",
    "]": "\uff3d\u3011\u27e7",
    "{": "\uff5b\ufe5b",
    "}": "\uff5d\ufe5c",
    "_": "\uff3f",
    "^": "\uff3e",
    "\\": "\uff3c\ufe68",
    "i": "\u2148\u2149",
    "e": "\u2147",
    "d": "\u2146\u2145",
    "": "\u2061\u2062\u00ad\u2122\u00ae\u220e\u25a0\u25a1",
}
_SIGN_OF = {character: latex for latex, characters in _SIGNS.items() for character in characters}
_ROOTS = {"\u221a": r"\sqrt", "\u221b": r"\sqrt[3]", "\u221c": r"\sqrt[4]"}
_ROOT = re.compile(r"([\u221a\u221b\u221c])[ \u00a0]*")
_ROOT_OF = re.compile(r"[0-9]+(?:[.,][0-9]+)?|\\[A-Za-z]+ ?(?:\{[^{}]*\})*|[A-Za-z]")
_STACKED = re.compile(r"((?:\^\{[0-9]+\})+)/((?:_\{[0-9]+\})+)")  # superscript, fraction slash, subscript
_MIXED = re.compile(r"(?<=[0-9])\u2064")  # "invisible plus"
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_PLAIN = re.compile(r"[\x00-\x7f]*")


def latex_of(text: str) -> str:
    """Return the text as ASCII LaTeX, as far as Unicode defines what a character means; other characters stay."""
    if _PLAIN.fullmatch(text):
        return text
    text = _MIXED.sub(" ", text)
    if any(root in text for root in _ROOTS):
        text = _with_roots(text)
    written, raised = [], ""
    for character in text:
        kind, latex = _read(character)
        if kind != raised and raised:
            written.append("}")
        if kind and kind != raised:
            written.append("^{" if kind == "<super>" else "_{")
        raised = kind
        if kind == "" and latex.startswith(r"\frac") and written and written[-1][-1:].isalpha():
            written.append(" ")
        written.append(latex)
    if raised:
        written.append("}")
    return _STACKED.sub(_fraction, "".join(written))


@functools.lru_cache(maxsize=4096)
def _read(character: str) -> tuple[str, str]:
    """Return whether a character is raised or lowered (`<super>`, `<sub>` or nothing), and what it is in LaTeX."""
    if character.isascii():
        return "", character
    decomposition = unicodedata.decomposition(character)
    kind, _, rest = decomposition.partition(" ")
    if kind in ("<super>", "<sub>") and character not in "\u00ba\u00aa\u2122\u2120":
        inner = "".join(chr(int(code, 16)) for code in rest.split())
        return kind, "".join(_read(one)[1] for one in inner)
    if (sign := _SIGN_OF.get(character)) is not None:
        return "", sign
    if character in _ROOTS:
        return "", _ROOTS[character]
    if (digit := unicodedata.decimal(character, None)) is not None:
        return "", str(digit)
    if kind == "<fraction>":
        top, _, bottom = "".join(chr(int(code, 16)) for code in rest.split()).partition("\u2044")
        return "", rf"\frac{{{top}}}{{{bottom}}}" if bottom else f"{top}/"
    category = unicodedata.category(character)
    if category == "Zs":
        return "", "\u00a0"
    if category == "Cf":  # marks of direction, joiners, invisible operators
        return "", ""
    if (greek := _greek(character)) is not None:
        return "", greek
    plain = unicodedata.normalize("NFKC", character)
    if plain != character and len(plain) <= 8:  # full-width, bold, italic, double-struck, circled, ligatures
        return "", "".join(_read(one)[1] for one in plain)
    return "", character


def _greek(character: str) -> str | None:
    name = unicodedata.name(character, "")
    found = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (?:FINAL )?([A-Z]+)", name)
    if found is None:
        return None
    letter = {"LAMDA": "lambda", "OMICRON": "o"}.get(found[2], found[2].lower())
    if letter == "o":
        return "o" if found[1] == "SMALL" else "O"
    if found[1] == "SMALL":
        return f"\\{letter} "
    if letter in ("gamma", "delta", "theta", "lambda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega"):
        return f"\\{letter.capitalize()} "
    plain = {"alpha": "A", "beta": "B", "epsilon": "E", "zeta": "Z", "eta": "H", "iota": "I", "kappa": "K"}
    return (plain | {"mu": "M", "nu": "N", "rho": "P", "tau": "T", "chi": "X"}).get(letter)


def _with_roots(text: str) -> str:
    """Return `√5`, `√(x+1)` and `∛x` as LaTeX, with what stands under the root in braces."""
    written, at = [], 0
    for found in _ROOT.finditer(text):
        if found.start() < at:
            continue
        written.append(text[at : found.start()])
        root, at = _ROOTS[found[1]], found.end()
        opening = text[at : at + 1]
        if opening in _CLOSING and (end := _closing(text, at)) is not None:
            inner, at = text[at + 1 : end], end + 1
            inner = _with_roots(inner) if any(one in inner for one in _ROOTS) else inner
        elif (under := _ROOT_OF.match(text, at)) is not None:
            inner, at = under[0], under.end()
            while text[at : at + 1] == "\u0305":
                at += 1
        elif opening in _ROOTS:
            inner, at = _with_roots(text[at:]), len(text)
        else:  # a character of Unicode, such as π
            inner, at = opening, at + 1
        written.append(f"{root}{{{inner}}}")
    return "".join(written) + text[at:]


def _closing(text: str, at: int) -> int | None:
    """Return where the bracket that opens at a position closes, or None."""
    depth = 0
    for place in range(at, min(len(text), at + 600)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    return None


def _fraction(found: re.Match[str]) -> str:
    top, bottom = ("".join(re.findall("[0-9]+", part)) for part in found.groups())
    return rf"\frac{{{top}}}{{{bottom}}}"


_MOST_DEPTH = 8  # of brackets in brackets: reading takes a time that grows fast with it
_MOST_BARS = 12  # |: each may open or close
_MOST_PARTS = 50  # of a list that is read part by part

_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "sixteen": 16,
}


def _matrix(found: re.Match[str]) -> str:
    return rf"\begin{{pmatrix}}{found[1]}\end{{pmatrix}}"


def _in_base(found: re.Match[str]) -> str:
    base = _BASES.get(found[1].lower())
    return found[0] if base is None else f"_{{{base}}}"


# Synonyms, and the one name that is read. Every pattern takes linear time.
_NAMES = (
    (re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?=[\s()\[\]{}|\\/.]|$)"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|rm|bf|it|mathstrut)(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\{,\}|\{\s,\s\}"), ","),
    (re.compile(r"(?<!\\)\\!"), ""),
    (
        re.compile(r"(?<!\\)\\(?:[,;:> ]|(?:q?quad|enspace|thinspace|medspace|thickspace|nobreakspace)(?![A-Za-z]))|~"),
        " ",
    ),
    (re.compile(r"\\(?:text)?color\s*\{[A-Za-z]+\}|\\[hv]?phantom\s*\{[^{}]*\}|\\#\s*(?=[A-Z])"), ""),
    (re.compile(r"\\underline\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\colon(?![A-Za-z])"), ":"),
    (re.compile(r"\\Pr(?![A-Za-z])"), "P"),
    (re.compile(r"\\frac\s*(\\(?:pi|alpha|beta|gamma|theta|lambda|mu|sigma|phi|omega))\s*([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\\(?:pi|alpha|beta|gamma|theta|lambda|mu|sigma|phi|omega))\s*(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"(\\\\)\s*\[\s*[0-9.]+\s*(?:pt|em|ex|mm|cm)\s*\]"), r"\1"),
    (re.compile(r"\\sqrt\s*(\[[^\[\]]*\])\s*([0-9A-Za-z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\(?:vec|hat|overrightarrow)\s*(?:\{\s*\\?([ijk])(?:math)?\s*\}|\s([ijk])(?![A-Za-z]))"), r" \1\2"),
    (re.compile(r"[(\[]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[)\]]", re.DOTALL), _matrix),
    (re.compile(r"\(([0-9A-F]+)\)\s*_(?=\s*\{?[0-9\\])"), r"\1_"),
    (re.compile(r"(?<=[0-9A-F])_\s*\{\s*\\text\s*\{\s*(\w+)\s*\}\s*\}"), _in_base),
    (re.compile(r"\\(?:lvert|rvert|vert)(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:lVert|rVert|Vert|parallel)(?![A-Za-z])"), r"\\|"),
    (re.compile(r"\\(?:lparen)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rparen)(?![A-Za-z])"), ")"),
    (re.compile(r"\\(?:lbrack)(?![A-Za-z])"), "["),
    (re.compile(r"\\(?:rbrack)(?![A-Za-z])"), "]"),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\(?:leq|leqslant|leqq)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant|geqq)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\(?:lt)(?![A-Za-z])"), "<"),
    (re.compile(r"\\(?:gt)(?![A-Za-z])"), ">"),
    (re.compile(r"\\(?:neq)(?![A-Za-z])|!=|\\not\s*="), r"\\ne "),
    (re.compile(r"<="), r"\\le "),
    (re.compile(r">="), r"\\ge "),
    (re.compile(r"\\(?:cdotp|ast|bullet|centerdot)(?![A-Za-z])"), r"\\cdot "),
    (re.compile(r"\\(?:degree)(?![A-Za-z])"), r"^{\\circ}"),
    (re.compile(r"\\(?:varnothing)(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(?:backslash|smallsetminus)(?![A-Za-z])"), r"\\setminus "),
    (re.compile(r"\\log_(?:e(?![A-Za-z])|\{e\})"), r"\\ln"),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (re.compile(r"\\lb(?![A-Za-z])"), r"\\log_{2}"),
    (re.compile(r"\\(?:tg)(?![A-Za-z])"), r"\\tan "),
    (re.compile(r"\\(?:ctg|cotg)(?![A-Za-z])"), r"\\cot "),
    (re.compile(r"\\(?:arctg)(?![A-Za-z])"), r"\\arctan "),
    (re.compile(r"\\(?:epsilon|varepsilon)(?![A-Za-z])"), r"\\epsilon "),
    (re.compile(r"\\(?:varphi)(?![A-Za-z])"), r"\\phi "),
    (re.compile(r"\\(?:vartheta)(?![A-Za-z])"), r"\\theta "),
    (re.compile(r"\\(?:varrho)(?![A-Za-z])"), r"\\rho "),
    (re.compile(r"\\(?:varpi)(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\(?:mathrm|operatorname\*?|mathop|text|mathit|rm)\s*\{\s*([A-Za-z]{2,7})\s*\}"), r"\\OP\1 "),
    (
        re.compile(
            r"\\OP(sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|log|exp|gcd|lcm|det|lg|(?:max|min)"
            r"(?=\s*[({]))(?![A-Za-z])"
        ),
        r"\\\1 ",
    ),
    (re.compile(r"\\OP(?:pi)(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\\text\s*\{\s*[Ii]nfinity\s*\}"), r"\\infty "),
    (re.compile(r"\\OP([A-Za-z]+) ?"), r"\\text{\1}"),
    (re.compile(r"\\(?:mathit|mathbf|boldsymbol|bm|mathnormal)\s*\{\s*([A-Za-z])\s*\}"), r" \1"),
    (re.compile(r"\\(?:mathrm|text|mathbf|mathit|boldsymbol|bm)\s*\{\s*([-+]?[0-9.,/]+)\s*\}"), r"\1"),
    (re.compile(r"\\(?:boxed|fbox|mbox|ensuremath|displaylines)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"(?<![\\A-Za-z])(?:pi)(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<![\\A-Za-z])(?:infinity|infty|inf|oo)(?![A-Za-z])"), r"\\infty "),
    (
        re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp)(?![A-Za-z])"),
        r"\\\1 ",
    ),
    (re.compile(r"\\lg(?![A-Za-z])"), r"\\log_{10}"),
    (
        re.compile(r"(?:\\text\s*\{\s*\(\s*mod\s*\}|\(\s*\\text\s*\{\s*mod\s*\}|\(\s*mod(?![a-z]))\s*([^()]{1,40})\)"),
        r"\\pmod{\1}",
    ),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\^\s*(-\s*[0-9]+)"), r"^{\1}"),
    (re.compile(r"\\frac\s*([0-9A-Za-z])\s+([0-9A-Za-z])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:top|intercal)(?![A-Za-z])"), "T"),
    (re.compile(r"\\infin(?![A-Za-z])"), r"\\infty "),
    (re.compile(r"\\(?:dots|cdots|dotsc|dotsb|dotsm|vdots|ddots|hdots)(?![A-Za-z])|\.\.\.+"), r"\\ldots "),
    (re.compile(r"(?<=[0-9])\u00a0(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile("\u00a0"), " "),
)
# A letter in upright type is a name, once it is known to be no unit.
_UPRIGHT = re.compile(r"\\(?:mathrm|operatorname\*?|mathsf|text(?:rm|it|bf)?|mbox)\s*\{\s*([A-Za-z])\s*\}")
_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*\{?[0-9]\}?\s*)?)([({]?)\s*([0-9.]+)\s*\^\s*\{?\s*\\circ\s*\}?"
)
_SCIENTIFIC = re.compile(
    r"(?:(?<=[(\[{,=<>]\s)|(?<=[(\[{,=<>]))([-+]?[0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]{1,4})(?=\s*(?:[)\]},]|\\}|$))"
)
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_FACTORIALS = re.compile(r"!\s*!\s*!")  # factorials of factorials
_ELLIPSIS = "D_{dots}"
_FRENCH = re.compile(r"([\[\]])([^\[\](),;]+[,;][^\[\](),;]+)([\[\]])")
# 0.333... and 0.1212..., where what is written repeats: one digit three times, or several of them twice.
_ENDLESS = re.compile(
    r"(?<![0-9.])([0-9]{0,20})\.([0-9]{0,8}?)(?:([0-9])\3{2,20}|([0-9]{2,8}?)\4{1,8})\s*\\ldots(?![A-Za-z])"
)
_BARE_SET = re.compile(r"\{([^{}]*(?:,|\||\\mid)[^{}]*)\}")
_BUILDER = re.compile(
    r"\\\{\s*\(?\s*([A-Za-z]|\\[a-z]+)\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\mid(?![A-Za-z])|\||:|;)(.+)\\\}"
)
_CASES = re.compile(
    r"\\begin\s*\{(?:cases|array|aligned|gathered|align\*?)\}(?:\{[lcr| ]*\})?(.*?)"
    r"\\end\s*\{(?:cases|array|aligned|gathered|align\*?)\}",
    re.DOTALL,
)
_MODULUS = re.compile(
    r"\s*(?:\\pmod\s*\{?\s*([^{}()]+?)\s*\}?|\(\s*(?:\\text\{\s*mod\s*\}|\\bmod|\\mod|mod)\s*\{?([^{}()]+?)\}?\s*\)|\\(?:bmod|mod)\s*\{?\s*([^{}()]+?)\s*\}?)\s*$"
)
_REPEATING_DOTS = re.compile(r"([0-9]*)\.([0-9]*)((?:\\dot\s*\{?\s*[0-9]\s*\}?[0-9]*)+)")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\s*\{?\s*([0-9]+)\s*\}?|\(([0-9]+)\)(?![0-9A-Za-z^]))")
_DOTTED = re.compile(r"\\dot\s*\{?\s*([0-9])\s*\}?")
_LONG_DECIMAL = re.compile(r"(?<![0-9A-Za-z_.{,])([0-9]+)\.([0-9]{13,300})(?![0-9.])")


class Congruence:
    """`a` modulo `b`: the numbers that differ from a by a multiple of b."""

    def __init__(self, residue: Any, modulus: Any) -> None:
        self.residue, self.modulus = residue, modulus


class Rows:
    """The rows of a definition by cases: each a list of what `&` separates."""

    def __init__(self, rows: list[list[Any]]) -> None:
        self.rows = rows


def package() -> Any:
    """Return the package latex2sympy2_extended. Raises RewardError if it is not installed."""
    try:
        import latex2sympy2_extended
        import math_verify  # noqa: F401  the package that users install; it brings the other one
    except ModuleNotFoundError as error:
        raise RewardError(
            "reward 'math': needs the package math-verify: pip install 'math-verify[antlr4_13_2]'"
        ) from error
    logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)
    return latex2sympy2_extended


def plain(latex: str) -> str:
    """Return the same formula with one name for each thing in place of synonyms."""
    text = latex
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    text = _FRENCH.sub(_interval, text.strip())
    text = _ENDLESS.sub(_endless, text)
    text = _REPEATING_DOTS.sub(_dotted, text)
    text = _REPEATING.sub(_repeating, text)
    if (found := _BARE_SET.fullmatch(text.strip())) is not None:
        text = rf"\{{{found[1]}\}}"
    return re.sub(" +", " ", text).strip()


def read(latex: str | Fraction) -> Any:
    """Return the object that a formula stands for, or None if it cannot be read. A decimal stays a `Float`, with its
    digits.
    """
    number = latex if isinstance(latex, Fraction) else number_alone(latex)
    if number is not None and not str(latex).rstrip().endswith("%"):
        return _number(number, isinstance(latex, str) and "." in latex and "frac" not in latex and "/" not in latex)
    text = _UPRIGHT.sub(r" \1", str(latex))
    text = _DEGREES.sub(r"\1\2{\\frac{\3\\pi}{180}}", text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = re.sub(r"\\langle(?![A-Za-z])", "(", re.sub(r"\\rangle(?![A-Za-z])", ")", text))
    if _FACTORIALS.search(text) or _depth(text) > _MOST_DEPTH or text.count("|") > _MOST_BARS:
        return None
    text = text.replace(r"\ldots", _ELLIPSIS)
    if _PLUS_MINUS.search(text):
        return _both(text)
    if (found := _MODULUS.search(text)) is not None:
        return _congruence(text[: found.start()], found[1] or found[2] or found[3])
    if (found := _CASES.search(text)) is not None:
        return _rows(found[1]) if _without(text, found) else None
    if (found := _BUILDER.fullmatch(text)) is not None:
        conditions = found[2].strip()
        inner = re.sub(rf"{re.escape(found[1])}\s*\\in\s*\\mathbb\s*\{{?R\}}?,?", "", conditions).strip(" ,")
        return read(inner) if inner else _parsed(text)
    return _parsed(text)


def _both(text: str) -> Any:
    """Return the set of both values of a formula with plus-minus (which `\\pmod` is not), or None if they cannot be
    read.
    """
    import sympy
    from latex2sympy2_extended.sets import FiniteSet

    read_ones: list[Any] = []
    for upper, lower in (("+", "-"), ("-", "+")):
        one = read(_PLUS_MINUS.sub(lambda found, a=upper, b=lower: a if found[1] == "pm" else b, text))
        if not isinstance(one, sympy.Basic):
            return None
        read_ones += getattr(one, "_unsorted_args", one.args) if isinstance(one, sympy.FiniteSet) else [one]
    return FiniteSet(*read_ones)


def _without(text: str, found: re.Match[str]) -> bool:
    """Return whether nothing but brackets and the name of a function surrounds a definition by cases."""
    around = text[: found.start()] + text[found.end() :]
    return re.fullmatch(r"[\s\\{}.]*(?:[A-Za-z]\s*(?:\([A-Za-z]\))?\s*=)?[\s\\{}.]*", around) is not None


def _number(number: Fraction, is_decimal: bool) -> Any:
    import sympy

    if is_decimal and number.denominator > 1:
        context = Context(prec=900)
        written = context.divide(Decimal(number.numerator), Decimal(number.denominator))
        return sympy.Float(str(written), dps=max(15, len(written.as_tuple().digits)))
    return sympy.Rational(number.numerator, number.denominator)


def _parsed(text: str) -> Any:
    converter = package()
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, normalize_latex
    from math_verify.grader import should_treat_as_complex

    text = _LONG_DECIMAL.sub(lambda found: rf"\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}}", text)
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        text = normalize_latex(text, normal)
        if not text:
            return None
        return converter.latex2sympy(
            text,
            is_real=not should_treat_as_complex(text),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # the package raises several kinds for what it cannot read
        return None


def _congruence(before: str, modulus: str) -> Any:
    residue = read(re.split(r"\\equiv(?![A-Za-z])|=", before)[-1].strip())
    below = read(modulus.strip())
    return None if residue is None or below is None else Congruence(residue, below)


def _rows(inside: str) -> Any:
    lines = [line.strip(" ,;.") for line in re.split(r"\\\\(?:\[[^\]]*\])?", inside)]
    rows = []
    for line in [one for one in lines if one][:_MOST_PARTS]:
        cells = [
            re.sub(r"^(?:if|when|for|where)\s|\\text\s*\{[^{}]*\}", "", cell.strip(" ,;")) for cell in line.split("&")
        ]
        cells = [cell.strip(" ,;") for cell in cells]
        if cells and len(cells) > 1 and re.match(r"(?:=|<|>|\\[lg]e(?![A-Za-z]))", cells[1]):  # aligned at the sign
            cells = ["".join(cells)]
        found = [read(cell) for cell in cells if cell]
        if any(one is None for one in found):
            return None
        rows.append(found)
    return Rows(rows) if rows else None


def _dotted(found: re.Match[str]) -> str:
    """Return `0.1\\dot{2}3\\dot{4}` as a fraction: the digits from the first dot to the last one repeat."""
    digits = _DOTTED.sub(r"\1", found[3])
    return _as_fraction(found[1], found[2], digits) or found[0]


def _interval(found: re.Match[str]) -> str:
    """Return `]a,b[` as (a,b), and `[a,b[` as [a,b)."""
    opening, inside, closing = found.groups()
    if (opening, closing) == ("[", "]"):
        return found[0]
    return f"{'[' if opening == '[' else '('}{inside}{']' if closing == ']' else ')'}"


def _endless(found: re.Match[str]) -> str:
    return _as_fraction(found[1], found[2], found[3] or found[4]) or found[0]


def _repeating(found: re.Match[str]) -> str:
    return _as_fraction(found[1], found[2], found[3] or found[4]) or found[0]


def _as_fraction(whole: str, fixed: str, repeated: str) -> str | None:
    if len(fixed + repeated) > 50:
        return None
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    value = Fraction(int(fixed + repeated) - int(fixed or 0), below) + int(whole or 0)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _depth(text: str) -> int:
    depth = most = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        most = max(most, depth)
    return most
