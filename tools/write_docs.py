"""Write the pages of docs/ that come from code: `python tools/write_docs.py`.

docs/configuration.md comes from the schema (gspo_mega/config/schema/) and the algorithms
(gspo_mega/config/algorithms.py), docs/metrics.md from the catalogue (gspo_mega/metrics/catalogue.py), and
docs/other_names.md from gspo_mega/config/other_names.py. A test in tests/unit/docs fails when a page differs from what
this script writes.

`--check` writes nothing. Exit code 0: every page is up to date or was written; 1: `--check` found an outdated page.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gspo_mega.config.algorithms import RECIPES, Recipe
from gspo_mega.config.other_names import NAMES
from gspo_mega.config.schema import Config
from gspo_mega.metrics.catalogue import CATALOGUE

DOCS = Path(__file__).resolve().parents[1] / "docs"
_GENERATED = "<!-- Written by tools/write_docs.py. Change {source} and run it again. -->\n"
_NAMES: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}
_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def configuration_page() -> str:
    """docs/configuration.md: one table per section of the schema, with each key's type, default and meaning."""
    parts = [
        "# Configuration\n",
        _GENERATED.format(source="gspo_mega/config/schema/"),
        "A run is one YAML file. This page lists every key. `configs/` holds commented examples, and\n"
        "`configs/schema.json` gives editors completion and checks.\n\n"
        "- An unknown key, a wrong type and a value out of range are errors that name file, line, column and key.\n"
        "- A command line may override keys: `gspo-mega train CONFIG optimizer.lr=1e-5 eval=null`.\n"
        "- Relative paths start in the working directory. An input of the file that is not there is looked for in the\n"
        "  file's folder, then in the folder above; a notice says which one is read. `~/` is the home folder.\n"
        "- Modules of yours are looked for in the file's folder, too, as `run.modules_dir` says.\n"
        "- `gspo-mega plan CONFIG` resolves the file and checks the rules between keys.\n"
        "- When a run continues, its configuration must be the one that it was started with, except for the keys and\n"
        "  sections that are marked *may change*.\n"
        "- **required** means that the key has no default. An optional section may be left out as a whole.\n"
        "- `reward: NAME` is short for `reward: {functions: [{function: NAME}]}`, and `rollout.episode: NAME` for\n"
        "  `rollout.episode: {function: NAME}`.\n",
        _section("The file itself", Config),
        _algorithms(),
    ]
    for path, section in _sections(Config):
        parts.append(_section(f"`{path}`", section))
    return "\n".join(parts)


def metrics_page() -> str:
    """docs/metrics.md: one table per first part of the metrics' names."""
    parts = [
        "# Metrics\n",
        _GENERATED.format(source="gspo_mega/metrics/catalogue.py"),
        "Every step writes one JSON line to `metrics.jsonl` in the run folder, and to the other `metrics.sinks`:\n"
        "TensorBoard by default, Weights & Biases, a class of yours ([watching a run](watching.md)). This page lists\n"
        "every name that can occur. Steps count from 1. The line of step 0 has what was measured before the first\n"
        "one: the held-out sets, where the run has any. A `<placeholder>` in a name stands for letters, digits, `.`,"
        " `_` and `-`.\n\n"
        "The column *reduction* says how the numbers of trajectories, tokens, mini-batches or ranks become the one\n"
        "value of a step. `ratio` divides two sums once. `value` means that there is only one number.\n\n"
        "In the descriptions, d is a token's log-ratio, w a correction weight, A an advantage, J the objective, and s\n"
        "a sequence's importance ratio.\n",
    ]
    groups: dict[str, list[str]] = {}
    for metric in CATALOGUE.values():
        row = f"| `{metric.name}` | {metric.unit} | {metric.reduction} | {_cell(metric.description)} |"
        groups.setdefault(metric.name.split("/")[0], []).append(row)
    for group, rows in groups.items():
        table = "| metric | unit | reduction | meaning |\n|---|---|---|---|\n" + "\n".join(rows)
        parts.append(f"## {group}\n\n{table}\n")
    return "\n".join(parts)


def other_names_page() -> str:
    """docs/other_names.md: one table per library."""
    parts = [
        "# Names in other libraries\n",
        _GENERATED.format(source="gspo_mega/config/other_names.py"),
        "A key, a dotted path or a command-line option of these libraries is refused, and the error names the key\n"
        "here: `override 'actor_rollout_ref.rollout.n=8': ... here it is batch.group_size`. This is the whole table.\n"
        "A name that is the same here is left out, unless its section differs.\n\n"
        "Two numbers are easily taken over wrongly. Batches are counted in **prompts** (`batch.prompts_per_step`),\n"
        "and mini-batches are given by **how many** there are, not by their size.\n",
    ]
    for library, names in NAMES.items():
        rows = "\n".join(f"| `{name}` | {here} |" for name, here in names.items())
        parts.append(f"## {library}\n\n| there | here |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "other_names.md": other_names_page,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="write_docs", description="Write the pages of docs/ that come from code.")
    parser.add_argument("--check", action="store_true", help="write nothing; name the pages that are outdated")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="where the pages are")
    options = parser.parse_args(arguments)
    outdated = False
    for name, render in PAGES.items():
        path, text = options.docs / name, render()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if options.check:
            print(f"{path}: outdated; run: python tools/write_docs.py", file=sys.stderr)
            outdated = True
        else:
            path.write_text(text, encoding="utf-8")
            print(f"{path}: written")
    return 1 if outdated else 0


def _sections(model: type[BaseModel], prefix: str = "") -> typing.Iterator[tuple[str, type[BaseModel]]]:
    """(dotted path, class) of every section below `model`; `[]` marks the entries of a list."""
    for name, field in model.model_fields.items():
        section = _section_class(field.annotation)
        if section is None:
            continue
        is_list = any(typing.get_origin(each) is tuple for each in _alternatives(field.annotation))
        path = f"{prefix}{name}" + ("[]" if is_list else "")
        yield path, section
        yield from _sections(section, path + ".")


def _algorithms() -> str:
    rows = [
        f"| `{recipe.name}` | {_term(recipe)} | {recipe.clip_low:g}, {recipe.clip_high:g} |"
        f" `{recipe.aggregation}` | {_refused(recipe)} | {_cell(recipe.paper)} |"
        for recipe in RECIPES.values()
    ]
    head = "| algorithm | term | clip_low, clip_high | aggregation | refused | paper |\n|---|---|---|---|---|---|\n"
    intro = (
        "What `algorithm` means, with the defaults that it gives to section `objective`."
        " [Objectives](objectives.md) has the equations, and where each was read.\n\n"
    )
    return f"## Algorithms\n\n{intro}{head}" + "\n".join(rows) + "\n"


def _term(recipe: Recipe) -> str:
    if recipe.surrogate == "clip":
        return f"clipped ratio: {recipe.ratio or '`objective.ratio`'}"
    return recipe.surrogate


def _refused(recipe: Recipe) -> str:
    refused = [] if recipe.largest_clip is None else [f"a clip width above {recipe.largest_clip:g}"]
    refused += ["another aggregation"] if recipe.fixes_aggregation else []
    refused += [] if recipe.takes_kl else ["a KL term"]
    refused += [f"another `{f'{section}.' if section else ''}{key}`" for section, key in recipe.fixes]
    return ", ".join(refused) or "nothing"


def _section(title: str, model: type[BaseModel]) -> str:
    doc = " ".join((model.__doc__ or "").split()) if "__doc__" in vars(model) else ""
    rows = [
        f"| `{name}` | {_type(field)} | {_default(field)} | {_meaning(name, field)} |"
        for name, field in model.model_fields.items()
    ]
    table = "| key | type | default | meaning |\n|---|---|---|---|\n" + "\n".join(rows)
    return f"## {title}\n\n" + (f"{doc}\n\n" if doc else "") + table + "\n"


def _meaning(name: str, field: FieldInfo) -> str:
    words = [_cell(field.description)] if field.description else []
    section = _section_class(field.annotation)
    if section is not None and typing.get_origin(field.annotation) is not tuple:
        words.append("A section, see below.")
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("may_change"):
        words.append("May change when a run continues.")
    return " ".join(words)


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {_number(getattr(metadata, key))}"
        for metadata in field.metadata
        for key, sign in _BOUNDS
        if getattr(metadata, key, None) is not None
    ]
    alternatives = [each for each in _alternatives(field.annotation) if each is not type(None)]
    name = " or ".join(_type_name(each) for each in alternatives) + (" " + ", ".join(bounds) if bounds else "")
    return name if len(alternatives) == len(_alternatives(field.annotation)) else f"{name}, or null"


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(each) for each in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "keys with values"
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    return _NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == () or value == {}:
        return "empty"
    if isinstance(value, tuple) and isinstance(value[0], BaseModel):
        return f"`[{', '.join(str(next(iter(dict(entry).values()))) for entry in value)}]`"  # by their first key
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
        return f"`{value}` ({_binary(value)})"
    return f"`{_number(value)}`" if isinstance(value, float) else f"`{value}`"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else format(value, "g")


def _binary(value: int) -> str:
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if value % size == 0:
            return f"{value // size} {unit}"
    raise ValueError(f"{value} is not a multiple of 1024")


def _section_class(annotation: Any) -> type[BaseModel] | None:
    for each in _alternatives(annotation):
        inner = typing.get_args(each)[0] if typing.get_origin(each) in (tuple, typing.Annotated) else each
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table; `<name>` is no tag of HTML."""
    return re.sub(r"<(?=\w)", "&lt;", " ".join(text.split()).replace("|", "\\|"))


if __name__ == "__main__":
    raise SystemExit(main())
