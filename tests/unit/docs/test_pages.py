"""The README and docs/ say what is there: paths, names, links, error texts and generated pages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
_FOLDERS = ("gspo_mega", "docs", "tests", "tools", "launch", "configs", "examples")
# A path of the tree, `::name` of something in it, or a module; anywhere in a page, code blocks included.
_PATH = re.compile(
    rf"(?<![\w./-])((?:{'|'.join(_FOLDERS)})/[\w./*-]*\w|(?:{'|'.join(_FOLDERS)})/)(?:::(\w+(?:\.\w+)*))?"
)
_MODULE = re.compile(r"(?<![\w./-])gspo_mega(?:\.\w+)+")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def names_in(path):
    """Functions, classes and assigned names of a Python file, methods as Class.method."""
    found = set()

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + child.name)
                if isinstance(child, ast.ClassDef):
                    visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.Assign, ast.AnnAssign)):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text()), "")
    return found


def missing_paths(text, root):
    """What a page names and `root` has not."""
    missing = []
    for path, name in _PATH.findall(text):
        if "*" in path:
            if not list(root.glob(path)):
                missing.append(path)
        elif not (root / path).exists():
            missing.append(path)
        elif name and name not in names_in(root / path):
            missing.append(f"{path}::{name}")
    for module in _MODULE.findall(text):
        # A module, or a name in one.
        parts = module.split(".")
        places = [root.joinpath(*parts[:n]) for n in (len(parts), len(parts) - 1)]
        if not any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places):
            missing.append(module)
    return missing


def anchors_of(text):
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def broken_links(page):
    broken = []
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        there = page.parent / target if target else page
        if not there.exists() or (anchor and anchor not in anchors_of(there.read_text())):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page):
    assert missing_paths(page.read_text(), ROOT) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page):
    assert broken_links(page) == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_every_page_is_in_the_index():
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - {"README.md"}
    assert pages == set(_LINK.findall((ROOT / "docs/README.md").read_text()))


def test_every_room_is_in_the_tree():
    tree = (ROOT / "docs/extending.md").read_text().partition("## The tree")[2]
    rooms = {path.name for path in (ROOT / "gspo_mega").iterdir() if (path / "__init__.py").is_file()}
    assert rooms == set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))


def test_recipes_name_three_files_at_most():
    page = (ROOT / "docs/finding_things.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 12
    for row in rows:
        assert 0 < len({path for path, _ in _PATH.findall(row.split("|")[3])}) <= 3, row


def test_symptoms_are_words_of_the_code():
    """Every error text that troubleshooting.md quotes is in the package or in launch/setup.sh."""
    texts = []
    for path in (ROOT / "gspo_mega").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    texts = "\n".join([*texts, (ROOT / "launch/setup.sh").read_text()]).lower()
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("## Set-up")[2]
    symptoms = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    quoted = [words for symptom in symptoms for words in re.findall(r"`([^`]+)`", symptom)]
    assert len(quoted) > 30
    assert [words for words in quoted if words.lower() not in texts and not words.startswith("reward 0.000")] == []


# The checks find what they are for.


def test_a_missing_path_a_missing_name_and_a_missing_module_are_found(tmp_path):
    (tmp_path / "gspo_mega").mkdir()
    (tmp_path / "gspo_mega" / "a.py").write_text("class A:\n    def b(self): ...\nC = 1\n")
    text = "`gspo_mega/a.py::A.b` `gspo_mega/a.py::C` `gspo_mega/*.py` gspo_mega.a and gspo_mega.a.A"
    assert missing_paths(text, tmp_path) == []
    text = "`gspo_mega/b.py`, `gspo_mega/a.py::D`, `docs/*.md`, gspo_mega.b.c"
    assert missing_paths(text, tmp_path) == ["gspo_mega/b.py", "gspo_mega/a.py::D", "docs/*.md", "gspo_mega.b.c"]


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# What is *this*?\n[a](page.md#what-is-this) [b](#nothing) [c](other.md) [d](https://x.y/z)\n")
    assert broken_links(page) == ["#nothing", "other.md"]
