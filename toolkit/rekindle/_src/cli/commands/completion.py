"""`rekindle completion`: Tab in a shell completes subcommands, options, their values, and the names of models.

A shell's script asks this command for the words that may follow; names are read from the stores, no model is opened.
"""

from __future__ import annotations

import argparse
import shlex

from rekindle._src.cli.usage import Parser
from rekindle._src.models.loading.hub import EMBEDDED
from rekindle._src.models.loading.stores import known

BASH = """_rekindle() {
    local IFS=$'\\n'
    COMPREPLY=($(rekindle completion words --line "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    # Bash completes the text after the last of its own word breaks, such as the colon in ollama:qwen3.
    local typed=${COMP_LINE:0:COMP_POINT}; typed=${typed##* }
    if [[ $typed == *:* && $COMP_WORDBREAKS == *:* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${typed%"${typed##*:}"}"}")
    fi
}
complete -o default -F _rekindle rekindle
"""
ZSH = """_rekindle() {
    local following=("${(@f)$(rekindle completion words --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    compadd -- ${following:#} || _files
}
compdef _rekindle rekindle
"""
FISH = """complete -c rekindle -a '(rekindle completion words --line (commandline -cp | string collect) 2>/dev/null)'
"""
NEEDS = ()
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def options(command: Parser) -> None:
    command.add("shell", 'for ~/.bashrc: eval "$(rekindle completion bash)"', choices=("bash", "fish", "words", "zsh"))
    command.add("--line", "words: a line; its last word is completed", default="")


def run(arguments: argparse.Namespace) -> int:
    """Print a shell's script, or the words that may follow a line."""
    if arguments.shell != "words":
        print(SCRIPTS[arguments.shell], end="")
        return 0
    from rekindle._src.cli.main import parser

    print(*following(parser(), arguments.line), sep="\n")
    return 0


def following(root: Parser, line: str) -> list[str]:
    """Return the words that complete the last word of a line.

    A file's name is a stranger's, and bash puts a word into the line as it is: names that a shell would not read as one
    plain word are left out.
    """
    try:
        words = shlex.split(line)
    except ValueError:  # within quotes, where a text is written
        return []
    last = words.pop() if words and not line[-1].isspace() else ""
    choices = root.completions(words[1:], models=lambda: [*filter(_is_plain, known.names()), *EMBEDDED])
    return sorted({word for word in choices if word.startswith(last) and (last or not word.startswith("-"))})


def _is_plain(name: str) -> bool:
    """True if a name is one word in any shell, and the same one."""
    return shlex.quote(name) == name
