"""Reads Unicode's mathematics as LaTeX: `√5` is `\\sqrt{5}`, `x²` is `x^{2}`, `½` is `\\frac{1}{2}`, `∞` is `\\infty`.

Most characters are read from Unicode's own data (names, decompositions, decimal values), so that a whole block is read
and not a few of its characters. The tables below hold what that data does not say.
"""

from __future__ import annotations

import functools
import re
import unicodedata

# Signs by what LaTeX calls them.
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
    """The same text in ASCII as far as Unicode has a meaning for it; what has none stays."""
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
    """Whether a character is raised or lowered (`<super>`, `<sub>` or nothing), and what it is in LaTeX."""
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
    """`√5`, `√(x+1)` and `∛x` with what stands under the root in braces."""
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
    """Where the bracket that opens at a position closes, or None."""
    depth = 0
    for place in range(at, min(len(text), at + 600)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    return None


def _fraction(found: re.Match[str]) -> str:
    top, bottom = ("".join(re.findall("[0-9]+", part)) for part in found.groups())
    return rf"\frac{{{top}}}{{{bottom}}}"
