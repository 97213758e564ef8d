"""Parsing of command lines: errors in two lines with the nearest option, and checks before JAX is imported."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.names import checked_name, nearest
from rekindle._src.core.options import Flag, Option, Place, Real, Size, Whole, Word, options_of, words_of
from rekindle._src.core.sampling import Sampling
from rekindle.errors import ConfigError, InvalidRequest, MissingExtra, RekindleError

if TYPE_CHECKING:
    from rekindle._src.capabilities.additions import Additions

Check = Callable[[argparse.Namespace], object]
WRONG_USAGE: Final = 2


class Parser(argparse.ArgumentParser):
    """A parser with `checks`: they raise a RekindleError for values that need more than their type.

    A subcommand's parser gets its options, by `declare`, when it is used.
    """

    def __init__(self, *arguments: Any, declare: Callable[[Parser], object] | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._declare = declare
        self.checks: list[Check] = []
        self.options: dict[type, list[str]] = {}  # of each record: the names that `add_options` has added
        self.model_arguments: tuple[str, ...] = ("model",)  # positional arguments that are models on this machine
        self.set_defaults(parser=self)  # the subcommand's parser sets it last

    def add(self, name: str, words: str | None, **options: Any) -> None:
        self.add_argument(name, help=words, **options)

    def flag(self, name: str, words: str, *, default: bool | None = False) -> None:
        """Add an option without a value."""
        self.add_argument(name, help=words, action="store_true", default=default)

    def declared(self) -> Self:
        """Return the parser itself, now with its options."""
        declare, self._declare = self._declare, None
        if declare is not None:
            declare(self)
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super(Parser, self.declared()).parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse and check a command line. Exit with status 2 if it is wrong."""
        arguments, unknown = self.parse_known_args(args, namespace)
        parser: Parser = arguments.parser
        if unknown:
            parser.error(parser._unexpected(unknown))
        try:
            for check in parser.checks:
                check(arguments)
        except RekindleError as error:
            parser.error(parser._message(error))
        return arguments

    def completions(self, words: Sequence[str], models: Callable[[], list[str]]) -> list[str]:
        """Return the words that may follow on a command line: subcommands, options, values, names of models."""
        self.declared()
        positional = self._get_positional_actions()
        commands = next((action.choices for action in positional if isinstance(action.choices, dict)), None)
        if commands is not None:
            if not words:
                return [*commands, *self._option_string_actions]
            command = commands.get(words[0])
            return command.completions(words[1:], models) if isinstance(command, Parser) else []
        option = self._option_string_actions.get(words[-1]) if words else None
        if option is not None and option.nargs is None:
            return [*map(str, option.choices or ())] or (models() if option.dest == "model" else [])
        choices = [str(choice) for action in positional[:1] if not words for choice in action.choices or ()]
        named = any(action.dest in self.model_arguments for action in positional)
        return [*choices, *(models() if named else []), *self._option_string_actions]

    def error(self, message: str) -> NoReturn:
        """Exit with a line for the problem and a line for the help."""
        self.exit(WRONG_USAGE, f"{self.prog}: {message}\n(`{self.prog} --help` lists what there is)\n")

    def _unexpected(self, unknown: Sequence[str]) -> str:
        dashed = (text.partition("=")[0] for text in unknown if text.startswith("-"))
        option = next((name for name in dashed if name.lstrip("-")[:1].isalpha()), None)  # no dash or negative number
        takes_text = any(not action.option_strings for action in self._actions)
        alone = len(unknown) == 1 and option is None and "--model" in self._option_string_actions
        if alone and (not takes_text or unknown[0] in ("tiny", "tiny-vision") or Path(unknown[0]).exists()):
            return f"unexpected {unknown[0]!r}. A model is passed as --model {unknown[0]}"
        if option is None:
            return f"unexpected {' '.join(unknown)!r}. Put text with spaces in quotes"
        # The second line of every mistake names --help.
        return f"unknown option {option}{_nearest(option, set(self._option_string_actions) - {'-h', '--help'})}"

    def _message(self, error: RekindleError) -> str:
        """Return an error as a line of text, with the option's name of the command line."""
        if not isinstance(error, ConfigError | InvalidRequest):
            return str(error)
        flag = f"--{error.field.replace('_', '-')}"
        singular = flag.removesuffix("s")  # an option that may be repeated
        name = next((name for name in (flag, singular) if name in self._option_string_actions), error.field)
        return f"{name} {error.value}: {error.problem}. {error.fix}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            fix = _nearest(str(value), known) or f". Use one of {', '.join(known)}"
            raise argparse.ArgumentError(action, f"{value!r} is not known{fix}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = nearest(name, known)
    return f". Did you mean {close}?" if close else ""


def add_options(command: Parser, record: type, place: Place | None, defaults: Mapping[str, object]) -> None:
    """Add the options that a record offers at a place, None for all: named, read and described as it declares them.

    `defaults` are those of the command line, where they differ.
    """
    words = words_of(record)
    for option in options_of(record):
        if place is None or place in option.also:
            default = defaults.get(option.name, option.default)
            name, arguments = _argument(option, words.get(option.name, ""), default)
            if option.name in defaults:
                arguments["default"] = default
            command.add_argument(name, **arguments)
            command.options.setdefault(record, []).append(option.name)


def _argument(option: Option, words: str, default: object) -> tuple[str, dict[str, Any]]:
    """Return how a command line spells an option, and the arguments of `add_argument`."""
    name = f"--{option.name.replace('_', '-')}"
    form: dict[str, Any] = {}
    shown = "" if default in (None, "", ()) or callable(default) else f" (default {default})"
    match option.check:
        case Whole():
            form = {"type": int, "metavar": "N"}
        case Real():
            form = {"type": float, "metavar": "X"}
        case Size():
            form = {"metavar": "SIZE"}
            shown = f" (default {Size.written(default)})" if isinstance(default, int) else ""
        case Flag() if default:
            form, shown = {"action": "store_false", "default": None, "dest": option.name}, ""
            name, words = f"--no-{name.removeprefix('--')}", f"don't {words}"
        case Flag():
            form, shown = {"action": "store_true", "default": None}, ""
        case Word(known):
            form = {"choices": known}
        case _ if isinstance(default, tuple):
            form = {"action": "append", "default": [], "metavar": "TEXT"}
            words = f"{words.removesuffix('.')}; several times for several"
    words = words.replace("None", "the default").removesuffix(".").replace("…", "...")  # not every terminal has it
    return name, {"help": f"{words}{shown}".replace("%", "%%"), **form, **_text_form(option)}


def text_form(record: type, name: str) -> dict[str, Any]:
    """Return the arguments of `add_argument` that read an option of a record and show its form."""
    return _text_form(next(option for option in options_of(record) if option.name == name))


def _text_form(option: Option) -> dict[str, Any]:
    if option.text is None:
        return {"type": _reader(option, None)} if isinstance(option.check, Size) else {}
    read = option.text.read
    return {"metavar": option.text.shape, "type": read if read in (int, float) else _reader(option, read)}


def _reader(option: Option, read: Callable[[str], Any] | None) -> Callable[[str], Any]:
    """Return a type of arguments: a function that reads text, or the option's check."""

    def checked(text: str) -> Any:
        try:
            return option.check(option.name, text, ConfigError) if read is None else read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{error.value!r} {error.problem}. {error.fix}") from None

    return checked


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `open()` on the command line."""
    return _values(arguments, EngineConfig)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return _values(arguments, Sampling)


def _values(arguments: argparse.Namespace, record: type) -> dict[str, Any]:
    names = arguments.parser.options.get(record, ())
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def add_model(command: Parser, *, checked: Check | None = None) -> None:
    """Add the model, and the options of a session that every command has."""
    command.add("--model", "a local folder, a GGUF file, a hub id, or 'tiny' (the default)", default="tiny")
    add_engine(command)
    command.checks.append(check_models if checked is None else checked)


def add_engine(command: Parser, place: Place | None = "command") -> None:
    """Add the options of a session that are offered at a place; None for all."""
    command.checks.append(lambda arguments: EngineConfig.of(engine_options(arguments)))
    add_options(command, EngineConfig, place, {"dtype": "auto", "precompile": "background"})


def add_sampling(command: Parser, *, max_tokens: int = 256) -> None:
    """Add the options of a request."""
    command.checks.append(lambda arguments: Sampling.of(None, sampling_options(arguments)))
    add_options(command, Sampling, "command", {"max_tokens": max_tokens})


def add_additions(command: Parser) -> None:
    """Add the first model's additions to its weights. Programs depend on whether there are any."""
    several: dict[str, Any] = {"action": "append", "default": []}
    adapter = "an adapter (LoRA) of the first model, served under its name; several times for several"
    command.add("--adapter", adapter, metavar="NAME=FOLDER", **several)
    steering = (
        "changes inside the first model that requests may name, safetensors of vectors; several times for several"
    )
    command.add("--steering", steering, metavar="NAME=FILE", **several)


def additions(arguments: argparse.Namespace) -> Additions:
    """Return the first model's additions."""
    return {
        "adapters": paths_by_name("--adapter", arguments.adapter, "folder"),
        "steering": paths_by_name("--steering", arguments.steering, "file"),
    }


# Checks: each raises a RekindleError.


def check_additions(arguments: argparse.Namespace, models: Container[str]) -> None:
    """Check that the first model's additions have names of their own, which no model of a server has."""
    for name in additions(arguments)["adapters"] or ():
        if name in models:
            problem = "is the name of a model, which requests with this name get"
            raise ConfigError("--adapter", name, problem, "Choose another name for the adapter")


def check_model(model: str | Path) -> None:
    """Check that a model is a folder, a file or a hub id that can be downloaded. The hub is not asked."""
    from rekindle._src.models.loading.hub import EMBEDDED, hub_id

    if model not in EMBEDDED and hub_id(model) is not None and importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtra("huggingface_hub", "hub")


def check_file(name: str, path: Path | None) -> None:
    """Check that a file to read exists."""
    if path is not None and not path.is_file():
        raise ConfigError(name, str(path), "is no file", "Check the path")


def check_models(arguments: argparse.Namespace) -> None:
    models = arguments.model if isinstance(arguments.model, list) else [arguments.model]
    for model in models:
        if model is not None:
            check_model(model)


def paths_by_name(option: str, texts: Sequence[str], kind: str) -> dict[str, str]:
    """Return the paths of NAME=PATH by their names. Raise ConfigError for another form, or a name twice."""
    by_name: dict[str, str] = {}
    for text in texts:
        name, mark, path = text.partition("=")
        if not (name and mark and path) or name in by_name:
            problem = f"is not NAME={kind.upper()}" if name not in by_name else "has a name that another one has"
            raise ConfigError(option, text, problem, f"Write {option} name={kind} for each")
        by_name[checked_name(option, name)] = path
    return by_name
