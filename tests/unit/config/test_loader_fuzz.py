import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo_mega.base.errors import ConfigError
from gspo_mega.config import Config, load_config
from gspo_mega.config.strict_yaml import parse

PIECES = st.lists(
    st.sampled_from(
        [
            "run",
            "name",
            "reward",
            "data",
            "batch",
            "sources",
            ": ",
            ":\n",
            "\n",
            "  ",
            "\t",
            "- ",
            "{",
            "}",
            "[",
            "]",
            ", ",
            "&a ",
            "*a",
            "<<: ",
            "!!int ",
            "!x ",
            "%YAML 1.2\n",
            "---\n",
            "...\n",
            "'",
            '"',
            '"\\ud800"',
            "\\x",
            "|\n",
            ">-\n",
            "#",
            "? ",
            "1e9999",
            "9" * 5000,
            "0x",
            ".nan",
            "~",
            "\0",
            "\x85",
            "é",
            "\ufeff",
        ]
    ),
    max_size=30,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=PIECES | st.text(max_size=40))
@example(text='run: {name: "\\ud800"}')
@example(text="run: {seed: " + "9" * 5000 + "}")
@example(text="%YAML 9.9\n---\na: 1")
@example(text="a: !!timestamp x")
def test_any_text_is_a_configuration_or_an_error_in_words(text):
    parse(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.yaml"
        path.write_text(text, encoding="utf-8", errors="ignore", newline="")
        try:
            loaded = load_config(path, [f"run.name={text}"])
        except ConfigError as error:
            assert str(error)
        else:
            assert isinstance(loaded.config, Config)
