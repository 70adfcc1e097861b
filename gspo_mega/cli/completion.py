"""Print a script that completes `gspo-mega` in a shell: commands, options, their choices, configuration keys, files.

    source <(gspo-mega completion bash)                                                  in this shell
    gspo-mega completion bash > ~/.local/share/bash-completion/completions/gspo-mega     in every new shell
    source <(gspo-mega completion zsh)                        zsh, after `compinit`; or write it to a file _gspo-mega
                                                              in a folder of $fpath

The script contains all words, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from collections.abc import Iterator

from gspo_mega.cli.main import COMMANDS, module_of
from gspo_mega.config.explain import all_keys

# The words of one command are looked up as `COMMAND:options`, `COMMAND:keys` and `COMMAND:OPTION` (its choices).
_BASH = """\
# bash completion for gspo-mega, written by `gspo-mega completion bash`.
declare -gA _gspo_mega_words=(
{words}
)
_gspo_mega() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}} found
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    found=${{_gspo_mega_words[commands]}}
  elif [[ -n ${{_gspo_mega_words[$command:$previous]:-}} ]]; then
    found=${{_gspo_mega_words[$command:$previous]}}
  elif [[ $current == -* ]]; then
    found=${{_gspo_mega_words[$command:options]:-}}
  elif [[ -n $current && $previous != -* && $previous != = ]]; then
    found=${{_gspo_mega_words[$command:keys]:-}}
  fi
  # Without a match the shell completes file names.
  mapfile -t COMPREPLY < <(compgen -W "${{found:-}}" -- "$current")
  if [[ ${{COMPREPLY[0]:-}} == *= ]]; then
    compopt -o nospace 2>/dev/null || true
    mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$current")
  fi
}}
complete -o bashdefault -o default -F _gspo_mega gspo-mega
"""

_ZSH = """\
#compdef gspo-mega
# zsh completion for gspo-mega, written by `gspo-mega completion zsh`.
_gspo-mega() {{
  local -A table
  table=(
{words}
  )
  local current=${{words[CURRENT]}} previous=${{words[CURRENT-1]}} command=${{words[2]}} offers_files=
  local -a found keys
  if (( CURRENT == 2 )); then
    found=(${{=table[commands]}})
  elif [[ -n ${{table[$command:$previous]:-}} ]]; then
    found=(${{=table[$command:$previous]}})
  elif [[ $current == -* ]]; then
    found=(${{=table[$command:options]:-}})
  elif [[ -n $current && $previous != -* ]]; then
    found=(${{=table[$command:keys]:-}}) offers_files=yes
  else
    offers_files=yes
  fi
  keys=(${{(M)found:#*=}})
  (( $#keys )) && compadd -S '' -- $keys
  found=(${{found:#*=}})
  (( $#found )) && compadd -- $found
  [[ -z $offers_files ]] || _files
}}
if [[ ${{funcstack[1]:-}} == _gspo-mega ]]; then
  _gspo-mega "$@"
else
  compdef _gspo-mega gspo-mega
fi
"""
# Of each shell: its script, and a line of its table of words.
_SCRIPTS = {"bash": (_BASH, "  [{key}]={words}"), "zsh": (_ZSH, "    {key} {words}")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(_SCRIPTS), help="the shell to write for")


def run(args: argparse.Namespace) -> int:
    words = {"commands": [*COMMANDS, "--help", "--version"]}
    for name in COMMANDS:
        words.update((f"{name}:{what}", found) for what, found in _words_of(name))
    script, line = _SCRIPTS[args.shell]
    lines = (line.format(key=key, words=shlex.quote(" ".join(found))) for key, found in words.items())
    print(script.format(words="\n".join(lines)), end="")
    return 0


def _words_of(command: str) -> Iterator[tuple[str, list[str]]]:
    """(name, words) of one command: `options`, `keys`, and for each option with choices the option; the choices of an
    argument without an option have the command's name.
    """
    parser = argparse.ArgumentParser()
    importlib.import_module(module_of(command)).add_arguments(parser)
    options = [option for action in parser._actions for option in action.option_strings]
    yield "options", options
    for action in parser._actions:
        if action.choices is not None:
            # An argument without an option is the word after the command.
            for option in action.option_strings or [command]:
                yield option, list(map(str, action.choices))
        if action.dest == "overrides":
            keys = list(all_keys())
            sections = {key[:-1] for key in keys}
            yield "keys", [f"{'.'.join(key)}=" for key in keys if key not in sections]
