"""Declares a program's options once, as a class, and reads them from the command line (Go's syntax) and a TOML file.

    @option_table
    class Options:
        tcp_address: str = option(STRING, "0.0.0.0:4150", "where TCP clients connect")

    options = parse("nsqd", Options, sys.argv[1:])

The attribute `tcp_address` is the flag `--tcp-address` and the key `tcp_address` of the file. `Options()`
has the defaults, and `table(Options)` is the list of declarations.
"""

import dataclasses
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar, cast, dataclass_transform

from nsquark.base.errors import EXIT_FATAL, EXIT_USAGE
from nsquark.base.kinds import FatalValueError, Kind
from nsquark.base.logs import Level, Logger

T = TypeVar("T")
OptionsT = TypeVar("OptionsT")

SHOWN_VALUE_LENGTH_MAX: Final = 200
"""An error message repeats at most this many characters of a bad value."""

_METADATA_KEY: Final = "nsquark.option"
_HELP_FLAGS: Final = ("h", "help")


@dataclass(frozen=True, slots=True)
class Option:
    """Describes one declared option. `key` is its name in the config file, or None if it cannot be set there."""

    attribute: str
    flag: str
    key: str | None
    kind: Kind[Any]
    default: Any
    help: str


@dataclass(frozen=True, slots=True)
class _Declaration:
    kind: Kind[Any]
    help: str
    key: str | None
    in_config: bool


def option(kind: Kind[T], default: T, help: str, *, key: str | None = None, in_config: bool = True) -> T:
    """Declares an option, typed as its value is; `key` is given only where the config file names it differently."""
    metadata = {_METADATA_KEY: _Declaration(kind, help, key, in_config)}
    if isinstance(default, list):
        items: list[Any] = default
        field: Any = dataclasses.field(default_factory=items.copy, metadata=metadata)
    else:
        field = dataclasses.field(default=default, metadata=metadata)
    return cast(T, field)


@dataclass_transform(field_specifiers=(option,))
def option_table(cls: type[OptionsT]) -> type[OptionsT]:
    """Makes a class of `option(...)` declarations into a dataclass."""
    return dataclass(slots=True)(cls)


def table(options: type[Any]) -> tuple[Option, ...]:
    """Lists what a class of options declares, in the order of its attributes."""
    rows = []
    for field in dataclasses.fields(options):
        declared: _Declaration = field.metadata[_METADATA_KEY]
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        key = (declared.key or field.name) if declared.in_config else None
        flag = field.name.rstrip("_").replace("_", "-")  # an attribute that would be a Python keyword ends in `_`
        rows.append(Option(field.name, flag, key, declared.kind, default, declared.help))
    return tuple(rows)


def parse(program: str, options: type[OptionsT], argv: Sequence[str], version: str = "") -> OptionsT:
    """Reads options: flags override the config file, which overrides the defaults. Help, version and mistakes raise
    SystemExit.

    The flags `version` and `config`, where the table has them, are acted upon here.
    """
    return parse_with_rest(program, options, argv, version)[0]


def parse_with_rest(
    program: str, options: type[OptionsT], argv: Sequence[str], version: str = "", example: str = ""
) -> tuple[OptionsT, list[str]]:
    """Does what `parse` does, and also returns the arguments behind the flags; the usage text ends with the example."""
    spec = table(options)
    given, rest = _read_flags(program, spec, argv, example)
    if version and given.get("version"):
        print(version, flush=True)
        raise SystemExit(0)
    values = _read_config(program, spec, given["config"]) if given.get("config") else {}
    return options(**{**values, **given}), rest


def usage(program: str, spec: Sequence[Option], example: str = "") -> str:
    """Writes the text that `--help` shows, as Go's programs do."""
    lines = [f"Usage of {program}:"]
    for row in sorted(spec, key=lambda row: row.flag):
        lines.append(f"  -{row.flag} {row.kind.word}".rstrip())
        default = row.kind.show_default(row.default)
        lines.append(f"    \t{row.help}" + (f" (default {default})" if default else ""))
    if example:
        lines += ["", "Example:", f"  {example}"]
    return "\n".join(lines) + "\n"


def exit_fatal(program: str, text: str) -> NoReturn:
    """Ends the program because of its options, with one line that says why."""
    logger = Logger(f"[{program}] ", Level.INFO)
    logger.fatal(text)
    logger.flush()
    raise SystemExit(EXIT_FATAL)


def _read_flags(
    program: str, spec: Sequence[Option], argv: Sequence[str], example: str
) -> tuple[dict[str, Any], list[str]]:
    by_flag = {row.flag: row for row in spec}
    text = usage(program, spec, example)
    given: dict[str, Any] = {}
    arguments = list(reversed(argv))
    while arguments and arguments[-1].startswith("-") and arguments[-1] != "-":
        argument = arguments.pop()
        if argument == "--":
            break
        name, equals, value = argument.removeprefix("-").removeprefix("-").partition("=")
        if not name or name.startswith("-"):
            _exit_usage(text, f"bad flag syntax: {_shown(argument)}")
        row = by_flag.get(name)
        if row is None:
            if name in _HELP_FLAGS:
                sys.stderr.write(text)
                raise SystemExit(0)
            _exit_usage(text, f"flag provided but not defined: -{_shown(name)}")
        if not equals:
            if row.kind.boolean:
                value = "true"
            elif arguments:
                value = arguments.pop()
            else:
                _exit_usage(text, f"flag needs an argument: -{name}")
        try:
            given[row.attribute] = _with(given.get(row.attribute), row.kind, value)
        except FatalValueError as error:
            exit_fatal(program, str(error))
        except ValueError as error:
            before, after = ("boolean ", "") if row.kind.boolean else ("", "flag ")
            _exit_usage(text, f'invalid {before}value "{_shown(value)}" for {after}-{name}: {error}')
    return given, arguments[::-1]


def _with(before: list[object] | None, kind: Kind[Any], value: str) -> object:
    """Returns an option's value after one more use of its flag, given its value `before`."""
    read = kind.from_flag(value)
    return kind.arrange([*(before or ()), *read]) if kind.repeated else read


def _read_config(program: str, spec: Sequence[Option], path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            config = tomllib.load(file)
    except OSError as error:
        exit_fatal(program, f"failed to load config file {path} - {error.strerror or error}")
    except (ValueError, RecursionError) as error:
        exit_fatal(program, f"failed to load config file {path} - {error}")
    values = {}
    for row in spec:
        if row.key is None or row.key not in config:
            continue
        value = config[row.key]
        try:
            values[row.attribute] = row.kind.from_config(value)
        except ValueError as error:
            exit_fatal(program, f"failed parsing {row.key} {_shown(str(value))} in {path} - {error}")
    return values


def _exit_usage(usage_text: str, mistake: str) -> NoReturn:
    sys.stderr.write(f"{mistake}\n{usage_text}")
    raise SystemExit(EXIT_USAGE)


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_VALUE_LENGTH_MAX else text[:SHOWN_VALUE_LENGTH_MAX] + "..."
