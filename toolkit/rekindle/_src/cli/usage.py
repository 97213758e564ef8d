"""Parsing of command lines: errors in two lines with the nearest option, and checks before JAX is imported."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from rekindle._src.core.config import EngineConfig
from rekindle._src.core.mesh_shape import MAX_PROCESSES, address
from rekindle._src.core.names import checked_name, name_of_model, nearest
from rekindle._src.core.options import Flag, Place, Real, Size, Whole, Word, options_of, words_of
from rekindle._src.core.sampling import Sampling
from rekindle._src.replicas.routing import roles_of
from rekindle.errors import ConfigError, InvalidRequest, MissingExtra, RekindleError

Check = Callable[[argparse.Namespace], object]
WRONG_USAGE: Final = 2


class Parser(argparse.ArgumentParser):
    """A parser with `checks`: they raise a RekindleError for values that need more than their type."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.checks: list[Check] = []
        self.options: dict[type, list[str]] = {}  # of each record: the names that `add_options` has added
        self.model_arguments: tuple[str, ...] = ("model",)  # positional arguments that are models on this machine
        self.set_defaults(parser=self)  # the subcommand's parser sets it last

    def add(self, name: str, words: str | None, **options: Any) -> None:
        self.add_argument(name, help=words, **options)

    def flag(self, name: str, words: str, *, default: bool | None = False) -> None:
        """Add an option without a value."""
        self.add_argument(name, help=words, action="store_true", default=default)

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
        if len(unknown) == 1 and "--model" in self._option_string_actions and Path(unknown[0]).exists():
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


def add_options(command: Parser, record: type, place: Place | None, special: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the options that a record offers at a place, None for all: named, read and described as it declares them.

    `special` has arguments of `add_argument` that differ, by the option's name.
    """
    words = words_of(record)
    for option in options_of(record):
        if place is None or place in option.also:
            name = option.name.replace("_", "-")
            arguments: dict[str, Any] = {"help": words.get(option.name, "").removesuffix(".").replace("%", "%%")}
            match option.check:
                case Whole():
                    arguments["type"] = int
                case Real():
                    arguments["type"] = float
                case Size():
                    arguments |= {"type": _size, "metavar": "SIZE"}
                case Flag() if option.default:
                    name = f"no-{name}"
                    arguments |= {"action": "store_false", "default": None, "dest": option.name}
                case Flag():
                    arguments |= {"action": "store_true", "default": None}
                case Word(known):
                    arguments["choices"] = known
            command.add_argument(f"--{name}", **{**arguments, **special.get(option.name, {})})
            command.options.setdefault(record, []).append(option.name)


def _size(text: str) -> int:
    try:
        return Size()("", text, ConfigError)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.problem}. {error.fix}") from None


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `open()` on the command line."""
    return _values(arguments, EngineConfig)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return _values(arguments, Sampling)


def _values(arguments: argparse.Namespace, record: type) -> dict[str, Any]:
    names = arguments.parser.options.get(record, ())
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


# Checks: each raises a RekindleError.


def check_model(model: str | Path) -> None:
    """Check that a model is a folder, a file or a hub id that can be downloaded. The hub is not asked."""
    from rekindle._src.models.loading.hub import EMBEDDED, hub_id

    if model not in EMBEDDED and hub_id(model) is not None and importlib.util.find_spec("huggingface_hub") is None:
        raise MissingExtra("huggingface_hub", "hub")


def check_pull(arguments: argparse.Namespace) -> None:
    """Check that the model to pull is a hub id, and that the hub's package is there."""
    from rekindle._src.models.loading.hub import EMBEDDED, hub_id
    from rekindle._src.models.loading.stores.known import store_of

    store = store_of(arguments.model)
    if store is not None and store.PREFIX != "hub":
        problem = f"is in {store.TITLE}, which its own tool fills"
        raise ConfigError("model", arguments.model, problem, "Pass a hub id such as owner/name")
    arguments.model = arguments.model.removeprefix("hub:")
    if arguments.model in EMBEDDED or hub_id(arguments.model) is None:
        raise ConfigError("model", arguments.model, "is on this machine", "Pass a hub id such as owner/name")
    check_model(arguments.model)


def check_models(arguments: argparse.Namespace) -> None:
    models = arguments.model if isinstance(arguments.model, list) else [arguments.model]
    for model in models:
        if model is not None:
            check_model(model)


def check_prompt(arguments: argparse.Namespace) -> None:
    if arguments.prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", "(none)", "is missing", 'Write rekindle generate "Once upon a time"')
    if arguments.prompt == "":
        raise InvalidRequest("prompt", '""', "has no tokens", "Write at least one character")


def check_bench(arguments: argparse.Namespace) -> None:
    from rekindle._src.bench.shapes import is_shape
    from rekindle._src.bench.workloads import BROKEN_DOWN, FRESH, WORKLOADS

    names, known = workload_names(arguments), sorted((*WORKLOADS, *FRESH))
    for name in names:
        if name not in known:
            raise ConfigError("--workloads", name, "is not known", f"Use some of {', '.join(known)}")
    if not names and not arguments.growth:
        raise ConfigError("--workloads", arguments.workloads, "names none", f"Use some of {', '.join(known)}")
    if arguments.breakdown and (arguments.growth or not set(names) & set(BROKEN_DOWN)):
        problem = f"needs one of {', '.join(BROKEN_DOWN)}, without --growth"
        raise ConfigError("--breakdown", True, problem, "Name one in --workloads")
    if arguments.repeat < 1:
        raise ConfigError("--repeat", arguments.repeat, "must be at least 1", "Use 3 for a median")
    if arguments.scale <= 0:
        raise ConfigError("--scale", arguments.scale, "must be above 0", "Use a share such as 0.5")
    if not is_shape(arguments.model):
        check_model(arguments.model)


def workload_names(arguments: argparse.Namespace) -> list[str]:
    return [name.strip().upper() for name in arguments.workloads.split(",") if name.strip()]


def check_files(arguments: argparse.Namespace) -> None:
    """Check that files to read exist."""
    for name in ("input", "trace"):
        path = getattr(arguments, name, None)
        if path is not None and not path.is_file():
            raise ConfigError(name if name == "input" else f"--{name}", str(path), "is no file", "Check the path")


def check_names(arguments: argparse.Namespace) -> None:
    """Check that `cache rm` has names, and no other action has."""
    if arguments.action == "rm" and not arguments.names:
        raise ConfigError("NAME", "(none)", "is missing", "Write rekindle cache rm NAME, as rekindle cache ls names it")
    if arguments.action != "rm" and arguments.names:
        raise ConfigError("NAME", arguments.names[0], "is for rm", f"Write rekindle cache rm {arguments.names[0]}")


def check_doctor(arguments: argparse.Namespace) -> None:
    if arguments.report and arguments.json:
        raise ConfigError("--report", True, "is text, and --json is none", "Pass one of them")
    if arguments.context is not None and arguments.context < 1:
        raise ConfigError(
            "--context", arguments.context, "must be at least 1", "Pass tokens of a request, or leave it out"
        )
    planned = {"--quantize": arguments.quantize, "--context": arguments.context}
    for option, value in planned.items():
        if value is not None and not arguments.plan:
            raise ConfigError(option, value, "is of a plan", "Pass --plan SHAPE as well, or leave it out")


def check_out(arguments: argparse.Namespace) -> None:
    if arguments.out.exists():
        raise ConfigError("out", str(arguments.out), "exists already", "Remove it, or pass another name")


def check_follow(arguments: argparse.Namespace) -> None:
    address(arguments.coordinator, "--coordinator")
    process, processes = arguments.process, arguments.processes
    if not 2 <= processes <= MAX_PROCESSES:
        raise ConfigError("--processes", processes, "can't share a model", f"Use from 2 to {MAX_PROCESSES:,}")
    if not 0 < process < processes:
        problem, fix = "is not the number of a follower", f"Use from 1 to {processes - 1}; 0 is the leader"
        raise ConfigError("--process", process, problem, fix)


def check_size(arguments: argparse.Namespace) -> None:
    """Replace the size that `cache prune` keeps by its bytes."""
    arguments.to = Size()("--to", arguments.to, ConfigError)


def check_serve(arguments: argparse.Namespace) -> None:
    from rekindle._src.serve.life import Hosts, check_bound, check_origins, seconds_to_drain

    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError("--port", arguments.port, "is no port", "Use one from 1024 to 65535, or 0 for a free one")
    roles: dict[Any, Any] = {"prefill": arguments.prefill, "decode": arguments.decode}
    if None in roles.values() and any(count is not None for count in roles.values()):
        option, partner = ("prefill", "--decode") if arguments.decode is None else ("decode", "--prefill")
        raise ConfigError(option, roles[option], f"needs {partner}", f"Pass {partner} 1, too")
    if arguments.prefill is not None:
        roles_of(roles, None)
    if not arguments.grafana and importlib.util.find_spec("uvicorn") is None:
        raise MissingExtra("uvicorn", "serve")
    check_origins(arguments.cors_origin)
    if arguments.max_connections is not None:
        check_bound("max_connections", arguments.max_connections)
    seconds_to_drain("--drain", arguments.drain)
    Hosts(arguments.allowed_host)
    names = models_by_name(arguments.model, arguments.name)
    for adapter in paths_by_name("--adapter", arguments.adapter, "folder"):
        if adapter in names:
            problem = "is the name of a model, which requests with this name get"
            raise ConfigError("--adapter", adapter, problem, "Choose another name for the adapter")
    api_keys(arguments)


def models_by_name(models: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    if len(names) > len(models):
        raise ConfigError("--name", names, f"gives more names than the {len(models)} models", "Give one for each")
    by_name: dict[str, str] = {}
    for index, model in enumerate(models):
        if index < len(names):
            name = checked_name("--name", names[index], colons=True)
        else:
            name = name_of_model(Path(model).name if os.path.exists(model) else model)
        if name in by_name:
            raise ConfigError("--name", name, "is the name of two models", "Give each a name of its own")
        by_name[name] = model
    return by_name


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


def api_keys(arguments: argparse.Namespace) -> list[str]:
    """Return the keys of the command line, of --api-key-file and of $REKINDLE_API_KEY."""
    keys: list[Any] = [*arguments.api_key]
    if arguments.api_key_file is not None:
        try:
            lines = arguments.api_key_file.read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                "--api-key-file", str(arguments.api_key_file), f"can't be read: {error}", "Check the path"
            ) from None
        file_keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not file_keys:
            raise ConfigError("--api-key-file", str(arguments.api_key_file), "has no key", "Write one on each line")
        keys += file_keys
    if os.environ.get("REKINDLE_API_KEY"):
        keys.append(os.environ["REKINDLE_API_KEY"])
    return keys
