"""The command ``pols``: flags -> calls. A verb is one module with a function ``main``, and one line of the table below."""

import importlib
import sys
from collections.abc import Sequence

from pols_jax import __version__
from pols_jax.cli.running import run
from pols_jax.errors import ConfigError, unknown_name

COMMANDS = {
    "train": ("train", "train networks whose single logits can be trusted, and compare them"),
    "eval": ("evaluate", "measure trained networks with one logit and with all logits"),
    "normalize": ("normalize", "make one logit as good as all of them, without training again"),
    "adopt": ("adopt", "take over a network that was trained elsewhere"),
    "index": ("index", "look at pictures once, to search them for any class"),
    "search": ("search", "find every picture of a class"),
    "serve": ("serve", "a page and an HTTP API that find every picture of a class"),
    "export": ("export", "write a network as files that need no part of this package"),
    "bench": ("bench", "measure the cost of one logit against that of all"),
}
"""Every verb: its module in this package, which is imported when it is used, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first word names (of the words after ``pols``); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int | None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"pols {__version__}")
        return 0
    if words[0] not in COMMANDS:
        raise ConfigError(unknown_name("command", words[0], COMMANDS) + " See: pols --help.")
    module, _ = COMMANDS[words[0]]
    return importlib.import_module(f"{__name__}.{module}").main(words[1:])


def _help() -> str:
    width = max(map(len, COMMANDS))
    verbs = [f"  {verb:{width}}  {what}" for verb, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pols COMMAND ...",
            "",
            "Single-logit classification: one logit answers whether a picture is of a class.",
            "",
            *verbs,
            "",
            "pols COMMAND --help lists the flags of a command, pols --version says which version this is.",
        ]
    )
