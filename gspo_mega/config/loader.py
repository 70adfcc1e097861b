"""From a run's YAML file and overrides to a checked `Config`, and from a `Config` back to text.

`load_config` is the only way in. It reads the file (`strict_yaml.py`), expands shorthands such as `reward: name`,
applies the overrides, checks the schema, and then the rules between keys (`validate.py`). Each stage reports everything
that is wrong at once, one line per problem, with the position in the file. Overrides and positions come next.
`render_config` at the end writes a configuration with every value, and `render_json_schema` writes the schema for
editors. This module imports neither torch nor numpy, so that it runs on a login node.

Last come the files and folders that a configuration reads, whose keys the schema marks (`schema/section.py`).
`find_inputs` makes a file usable from any working directory: a relative path that is not there is looked for next to
the YAML file. In the same folder, `run.modules_dir`, users' modules are looked for last. `resolve_hub_ids` replaces ids
of the Hugging Face hub by their folders in this machine's cache. A path that exists is never taken for an id. An id
that is not in the cache stays as it is, and whoever reads it says so. The resolved configuration has the folder, whose
name is the commit. A run is continued with that folder only, so an id whose branch has moved in the cache is refused
then, as any other path is.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gspo_mega.base.errors import ConfigError, FolderError
from gspo_mega.base.hub import find_model, find_rows, is_hub_id
from gspo_mega.base.near_paths import did_you_mean
from gspo_mega.base.untrusted import NoRegularFileError, read_bytes
from gspo_mega.base.user_functions import file_only_in
from gspo_mega.config.explain import explain_errors, known_elsewhere
from gspo_mega.config.schema import Config, Metrics
from gspo_mega.config.schema.section import Section, input_kind
from gspo_mega.config.strict_yaml import KeyPath, YamlPosition, implicit_resolvers, parse
from gspo_mega.config.validate import validate_config
from gspo_mega.config.validate_learning import resolve_defaults

# The largest file that is read.
_MOST_BYTES = 16 * 1024**2
_SINKS = ("metrics", "sinks")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration, and where each of its values came from.

    `text`: the file as read. `notices`: what a user should know before the run; it is shown at the run's start and end.
    `origins`: of every key that was given, its position in the file or the text of its override.
    """

    config: Config
    path: Path
    text: str
    notices: tuple[str, ...]
    origins: dict[KeyPath, YamlPosition | str]

    def where(self, key: str) -> str:
        """Return `file:line:column` or `override 'x=y'` of a dotted key, or of the section around it if the key was not
        given.
        """
        return _where(self.path, self.origins, tuple(key.split(".")))


def load_config(path: str | Path, overrides: Sequence[str] = (), command: str | None = None) -> LoadedConfig:
    """Read a file, apply overrides, validate, and return the configuration.

    `overrides`: `key.sub=value` each. `command` (`train`, `sft`, `eval`, `certify`, `budget`) decides which sections
    are required. Raises ConfigError with a line `file:line:column: key: what is wrong; what is valid` for every
    problem.
    """
    path = Path(path)
    text = _read(path)
    document = parse(text)
    parsed, override_problems = parse_overrides(overrides)
    tree = document.value
    origins: dict[KeyPath, YamlPosition | str] = dict(document.positions)
    problems = [
        (_order(problem.position), f"{_at(path, problem.position)}: {_key(problem.path)}{problem.text}")
        for problem in document.problems
    ]
    config: Config | None = None
    if isinstance(tree, dict):
        _expand_shorthands(tree, origins)
        for override in parsed:
            key_path, line = apply_override(tree, override)
            if key_path is None:
                override_problems.append(str(line))
                continue
            _claim(origins, key_path, f"override {override.text!r}")
            _expand_shorthands(tree, origins)
        config, invalid = _validate_schema(tree, path, origins)
        explained = {problem.path for problem in document.problems}
        explained |= {()} if document.problems else set()  # the document as a whole may not fit for the same reason
        problems += [(order, line) for order, location, line in invalid if location not in explained]
    elif not problems:
        found = (
            "the file is empty"
            if tree is None
            else f"the top level is {'a list' if isinstance(tree, list) else repr(tree)}"
        )
        problems.append(((1, 1), f"{path}:1:1: {found}; it must be keys with values: run, model, batch, data, ..."))
    lines = [line for _, line in sorted(problems)] + override_problems
    if lines:
        raise ConfigError("\n".join(lines))

    assert config is not None
    violations, notices = validate_config(config, command)
    if violations:
        raise ConfigError(
            "\n".join(f"{_where(path, origins, tuple(v.key.split('.')))}: {v.key}: {v.text}" for v in violations)
        )
    config, found = find_inputs(config, path, lambda key: isinstance(_nearest_origin(origins, key), YamlPosition))
    config, read = find_modules(config, path.parent)
    found += read
    config, missing = resolve_hub_ids(resolve_defaults(config), command)
    if missing:
        raise ConfigError(
            "\n".join(f"{_where(path, origins, tuple(key.split('.')))}: {key}: {t}" for key, t in missing)
        )
    return LoadedConfig(config, path, text, (*notices, *found), origins)


def _read(path: Path) -> str:
    """Return the file's text. Raises ConfigError with the path if it cannot be read as UTF-8."""
    try:
        return read_bytes(path, _MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        near = did_you_mean(path)
        if not near and path.parent.is_dir():
            here = sorted(p.name for p in path.parent.glob("[!.]*") if p.suffix in (".yaml", ".yml"))
            near = f"; in {path.parent}: {', '.join(here)}" if here else ""
        raise ConfigError(f"{path}: no such file{near}") from None
    except NoRegularFileError as error:
        if error.errno == errno.EISDIR:
            raise ConfigError(f"{path}: a folder; name the YAML file in it") from None
        raise ConfigError(f"{path}: {error.strerror}; name a YAML file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _expand_shorthands(tree: dict[str, Any], origins: dict[KeyPath, YamlPosition | str]) -> None:
    """Expand shorthands in place: `reward: name` stands for one function of that name, `rollout.episode: name` for an
    episode without options, `metrics.sinks: [name]` for a sink without options, and the name of a function in place of
    the section `advantage` or `objective` for its key `function`.
    """
    if isinstance(tree.get("reward"), str):
        tree["reward"] = {"functions": [{"function": tree["reward"]}]}
        for inner in (("functions",), ("functions", 0), ("functions", 0, "function")):
            origins[("reward", *inner)] = origins[("reward",)]
    for section in ("advantage", "objective"):
        if isinstance(tree.get(section), str):
            tree[section] = {"function": tree[section]}
            origins[(section, "function")] = origins[(section,)]
    rollout = tree.get("rollout")
    if isinstance(rollout, dict) and isinstance(rollout.get("episode"), str):
        rollout["episode"] = {"function": rollout["episode"]}
        origins[("rollout", "episode", "function")] = origins[("rollout", "episode")]
    if isinstance(metrics := tree.get("metrics"), dict):
        _expand_metrics(metrics, origins)


def _expand_metrics(metrics: dict[str, Any], origins: dict[KeyPath, YamlPosition | str]) -> None:
    """Expand `metrics` in place. The name of a sink is short for {sink: NAME}. The older key `tensorboard` puts the
    sink of that name into `sinks` or takes it out.
    """
    sinks = metrics.get("sinks")
    if isinstance(sinks, list):
        for number, name in enumerate(sinks):
            if isinstance(name, str):
                sinks[number] = {"sink": name}
                where = origins.get((*_SINKS, number), origins.get(_SINKS, origins.get(("metrics",), "")))
                origins[(*_SINKS, number)] = origins[(*_SINKS, number, "sink")] = where
    if not isinstance(metrics.get("tensorboard"), bool) or not isinstance(sinks, list | None):
        return
    wanted = metrics.pop("tensorboard")
    if sinks is None:
        sinks = metrics["sinks"] = [{"sink": one.sink} for one in Metrics().sinks]
        origins.setdefault(_SINKS, origins.get(("metrics", "tensorboard"), ""))
    others = [one for one in sinks if not (isinstance(one, dict) and one.get("sink") == "tensorboard")]
    if not wanted:
        sinks[:] = others
    elif len(others) == len(sinks):
        sinks.append({"sink": "tensorboard"})


def _validate_schema(
    tree: dict[str, Any], path: Path, origins: dict[KeyPath, YamlPosition | str]
) -> tuple[Config | None, list[tuple[tuple[int, int], KeyPath, str]]]:
    """Return (configuration, []), or (None, [(order, key, line) of everything that the schema refuses])."""
    try:
        # Pydantic's strict mode takes a list for a tuple and a whole number for a float only when it reads JSON.
        return Config.model_validate_json(json.dumps(tree), strict=True), []
    except ValidationError as error:
        invalid = []
        for location, text in explain_errors(error.errors()):
            line = f"{_where(path, origins, location)}: {_key(location)}{text}"
            invalid.append((_order(_nearest_origin(origins, location)), location, line))
        return None, invalid


@dataclass(frozen=True)
class Override:
    """`text`: `key.sub=value` as it was given. `path`: the key's parts. `value`: as YAML reads it."""

    text: str
    path: tuple[str, ...]
    value: Any


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Read overrides by the same YAML rules as files. Returns (overrides, a line for each text that cannot be read)."""
    overrides, problems = [], []
    for text in texts:
        key, separator, written = text.partition("=")
        path = tuple(key.strip().split("."))
        if not separator:
            problems.append(f"override {text!r}: no `=` in it; write key=value, for example train.num_steps=10")
        elif not all(path):
            problems.append(f"override {text!r}: the key {key!r} has an empty part; write section.key=value")
        else:
            document = parse(written)
            problems += [f"override {text!r}: {key}: {problem.text}" for problem in document.problems]
            if not document.problems:
                overrides.append(Override(text, path, document.value))
    return overrides, problems


def apply_override(tree: dict[str, Any], override: Override) -> tuple[KeyPath | None, str | None]:
    """Change `tree` in place. Returns (path as in the tree, None), or (None, problem line).

    Sections that are absent or empty (null) are made. `data.sources.0.path` addresses an entry of a list, which must
    exist. The schema checks afterwards that the key exists and the value fits.
    """
    node: Any = tree
    path: list[str | int] = []
    for index, part in enumerate(override.path):
        last = index == len(override.path) - 1
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                entries = f"entries 0 to {len(node) - 1}" if node else "no entries"
                return None, f"override {override.text!r}: {_dotted(path)} is a list with {entries}, not {part!r}"
            path.append(int(part))
            if last:
                node[int(part)] = override.value
            elif node[int(part)] is None:
                node[int(part)] = {}
            node = node[int(part)]
        elif isinstance(node, dict):
            path.append(part)
            if last:
                node[part] = override.value
            elif node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            elsewhere = known_elsewhere(override.path)
            return None, (
                f"override {override.text!r}: {_dotted(path)} is {node!r}, a value without keys inside{elsewhere}"
            )
    return tuple(path), None


def _dotted(path: Sequence[str | int]) -> str:
    return ".".join(map(str, path))


def _claim(origins: dict[KeyPath, YamlPosition | str], key_path: KeyPath, origin: str) -> None:
    """Record `origin` for `key_path`, for everything inside it, and for each section around it that did not exist."""
    for inside in [known for known in origins if known[: len(key_path)] == key_path]:
        del origins[inside]
    origins[key_path] = origin
    for length in range(1, len(key_path)):
        origins.setdefault(key_path[:length], origin)


def _nearest_origin(origins: dict[KeyPath, YamlPosition | str], location: KeyPath) -> YamlPosition | str | None:
    """Return the origin of a key, or of the innermost section around it that has one."""
    location = tuple(int(part) if isinstance(part, str) and part.isdecimal() else part for part in location)
    for length in range(len(location), 0, -1):
        if location[:length] in origins:
            return origins[location[:length]]
    return None


def _where(path: Path, origins: dict[KeyPath, YamlPosition | str], location: KeyPath) -> str:
    origin = _nearest_origin(origins, location)
    return origin if isinstance(origin, str) else _at(path, origin)


def _order(origin: YamlPosition | str | None) -> tuple[int, int]:
    """Return the sort key of a problem: by position in the file; absent sections and overrides come last."""
    return (origin.line, origin.column) if isinstance(origin, YamlPosition) else (2**31, 0)


def _at(path: Path, position: YamlPosition | None) -> str:
    return f"{path}:{position.line}:{position.column}" if position is not None else str(path)


def _key(location: KeyPath) -> str:
    return ".".join(map(str, location)) + ": " if location else ""


def render_config(config: Config) -> str:
    """Return YAML text with every value written out, in the schema's order: `config.resolved.yaml`.

    `load_config` of it gives an equal Config. Other YAML readers see the same values, because text that any of them
    would take for something else is quoted.
    """
    values = config.model_dump(mode="json")
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=10_000
    )


def _union_of_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the resolvers of YAML 1.2, so that `1e-06` may stand as a number, and then those of YAML 1.1, so that the
    text `no` is quoted.
    """
    table = {first: list(entries) for first, entries in implicit_resolvers().items()}
    for first, entries in yaml.resolver.Resolver.yaml_implicit_resolvers.items():
        table.setdefault(first, []).extend(entries)
    return table


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _union_of_resolvers()

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    # Only double quotes escape line breaks (there are five in Unicode); other styles fold them.
    style = '"' if any(character in value for character in "\n\r\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)


def render_json_schema() -> str:
    """Return the JSON Schema (draft 2020-12) of a run's file, shorthands included, for completion and checks in
    editors. The text ends with a newline.
    """
    schema = Config.model_json_schema()
    for properties, key, description in (
        (schema["properties"], "reward", "A built-in verifier's name, or package.module:function."),
        (schema["$defs"]["Rollout"]["properties"], "episode", "A built-in episode, or package.module:function."),
        (schema["properties"], "advantage", "Your own advantages: package.module:function."),
        (schema["properties"], "objective", "Your own term: package.module:function."),
    ):
        properties[key] = {"anyOf": [{"type": "string", "description": description}, properties[key]]}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "gspo_mega run"}
    return json.dumps(schema, indent=2) + "\n"


Key = tuple[str | int, ...]


def find_inputs(config: Config, file: Path, is_in_file: Callable[[Key], bool]) -> tuple[Config, list[str]]:
    """Return the configuration with the paths of its inputs, and a notice of each that is not in the working directory.

    A relative path starts in the working directory. If nothing is there and the value is in the YAML `file` itself
    (`is_in_file` of its key), it starts in the file's folder, or else in the folder above, where shipped configurations
    have their shapes. A path that is in none of them stays as it is. `~/` is the home folder, also in `run.dir`.
    """
    notices = []
    for key, text, _ in [*_named(config), (("run", "dir"), config.run.dir, "output")]:
        if text.startswith("~/"):
            config = _with(config, key, str(Path(text).expanduser()))
        elif key != ("run", "dir") and not Path(text).is_absolute() and not Path(text).exists() and is_in_file(key):
            folder = file.absolute().parent
            found = next((p for p in (folder / text, folder.parent / text) if p.exists()), None)
            if found is not None:
                config = _with(config, key, str(found))
                notices.append(f"{'.'.join(map(str, key))}: {text} is not in {Path.cwd()}; {found} is read")
    return config, notices


def find_modules(config: Config, folder: Path) -> tuple[Config, list[str]]:
    """Return the configuration with `run.modules_dir`, by default `folder`, and a notice of each function of the user
    whose module only that folder has.
    """
    notices = []
    config = _with(config, ("run", "modules_dir"), os.path.abspath(config.run.modules_dir or folder))
    for key, text in _texts(config.model_dump()):
        if _FUNCTION.fullmatch(text) and (file := file_only_in(str(config.run.modules_dir), text)) is not None:
            notices.append(f"{'.'.join(map(str, key))}: {file} is read (run.modules_dir)")
    return config, notices


def _texts(value: Any, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Every text inside a value, options of the user's functions included, with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list | tuple):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, (*key, name))


def resolve_hub_ids(config: Config, command: str | None) -> tuple[Config, list[tuple[str, str]]]:
    """The configuration with folders in place of ids, and (dotted key, problem) of each that cannot be had.

    `command`: None only plans, and downloads no weights.
    """
    problems: list[tuple[str, str]] = []
    for key, text, kind in _named(config):
        value = text.rstrip("/")
        if kind == "local" or not _may_be_id(value):
            continue
        try:
            if kind == "model":
                # A revision is one of this model, and of no other that the configuration names.
                revision = config.model.revision if key == ("model", "path") else None
                found = find_model(value, revision, needs_weights=command is not None)
            else:
                found = find_rows(value, config.data.revision)
        except FolderError as error:
            problems.append((".".join(map(str, key)), str(error)))
            continue
        if found is not None:
            config = _with(config, key, str(found))
    return config, problems


def _may_be_id(value: str) -> bool:
    return is_hub_id("/".join(value.split("/")[:2])) and not Path(value).exists()


def _named(section: Section, key: Key = ()) -> Iterator[tuple[Key, str, str]]:
    """(key, value, kind) of every key that names an input and has a value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        kind = input_kind(field)
        if kind is not None and isinstance(value, str):
            yield (*key, name), value, kind
        elif isinstance(value, Section):
            yield from _named(value, (*key, name))
        elif isinstance(value, tuple):
            for place, one in enumerate(value):
                if isinstance(one, Section):
                    yield from _named(one, (*key, name, place))


def _with(section: Any, key: Key, value: str) -> Any:
    """`section`, or a tuple of sections, with another value of a key inside."""
    if not key:
        return value
    if isinstance(key[0], int):
        return tuple(_with(one, key[1:], value) if place == key[0] else one for place, one in enumerate(section))
    return section.model_copy(update={key[0]: _with(getattr(section, key[0]), key[1:], value)})
