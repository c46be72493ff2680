"""Makes docs/client-reference.md of the client's docstrings: `python -m tests.docs.reference`, or `make reference`.

A docstring's last paragraph lists parameters, a line for each: `name: what it means`. An attribute's docstring is the
string below it. What has no docstring, and a parameter that none explains, is a problem, and nothing is written.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

WIDTH = 120
REFERENCE = Path(__file__).parents[2] / "docs" / "client-reference.md"
PUBLIC = {
    "nsquark": (
        "Producer",
        "ProducerPool",
        "Consumer",
        "Message",
        "Batch",
        "Dedupe",
        "Config",
        "read_arrow",
        "read_polars",
        "infer_schema",
    ),
    "nsquark.query.schema": ("TopicSchema",),
    "nsquark.client.packing": ("Packing",),
    "nsquark.client.stats": ("Stats",),
    "nsquark.client.pool": ("NsqdStatus",),
    "nsquark.client.dedupe": ("DedupeStore",),
    "nsquark.sync": ("Producer", "ProducerPool", "Consumer"),
    "nsquark.errors": (),
    "nsquark.testing": ("Nsqd", "Nsqlookupd", "HttpReply", "StartError"),
    "nsquark.contrib.opentelemetry": ("Telemetry", "TracedProducer"),
    "nsquark.contrib.taskiq": ("NsqBroker",),
}
"""Classes and functions by the module where users find them; of a module without names, all that it exports."""
INTERNAL = {
    "Producer": {"response_received", "error_received", "messages_received", "connection_lost", "close_because"},
    "Consumer": {"calls_hook_off_loop", "handle", "is_called_by_own_thread", "log"},
    "Message": {
        "answer_for",
        "deadline_s",
        "fail",
        "give_back",
        "key",
        "last_deadline_s",
        "conclude",
        "subscription",
    },
    "Batch": {"answer_for", "conclude"},
    "Config": {"identify_body", "merge", "ssl_context"},
    "TracedProducer": {"producer"},
    "Telemetry": {"begin_publish"},
    "Nsqd": {"MODULE", "keeps_ports"},
    "Nsqlookupd": {"MODULE", "keeps_ports"},
}
"""These are public to the other parts of the client only."""
MADE_BY_OTHERS = {"Message", "Batch", "TracedProducer"}
"""Users get these and never make them."""
NOT_OURS = {"self", "cls", "options", "packing"}
"""Parameters that are explained elsewhere: `**options` by Config, `**packing` by Packing."""
SHOWN_DEFAULTS = {
    "client_id": "of this machine",
    "hostname": "of this machine",
    "user_agent": "`nsquark/<version>`",
}
HEAD = """# Client reference

All classes, functions, parameters and errors of the [client library](client.md), made from the docstrings by
`make reference`.
`**options` are those of [Config](#nsquarkconfig), `**packing` those of [Packing](#nsquarkclientpackingpacking).
"""

_PARAMETERS = re.compile(r"^\*{0,2}([a-z_]+(?:, [a-z_]+)*): ")


class Reference:
    """Holds the text that was made, and what was missing on the way."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        parts = [HEAD]
        for module_name, names in PUBLIC.items():
            module = importlib.import_module(module_name)
            for name in names or module.__all__:
                shown = getattr(module, name)
                made = self._class(module, shown) if inspect.isclass(shown) else self._called(module, shown)
                parts.append("\n".join(made))
        self.text = "\n".join(parts) + "\n"

    def _class(self, module: ModuleType, kind: type) -> Iterator[str]:
        where = f"{module.__name__}.{kind.__name__}"
        yield f"## {where}\n"
        own: dict[str, inspect.Parameter] = {}
        if not issubclass(kind, Exception) and not _is_record(kind) and kind.__name__ not in MADE_BY_OTHERS:
            signature = inspect.signature(kind)
            own = dict(signature.parameters)
            yield f"`{kind.__name__}{_shown(signature)}`\n"
        yield f"{self._text(where, kind.__doc__, own)}\n"
        yield from self._parameters(where, [base.__doc__ for base in _bases(kind)], own)
        yield from self._attributes(where, kind, own)
        yield from self._methods(where, kind)

    def _attributes(self, where: str, kind: type, parameters: Collection[str]) -> Iterator[str]:
        found = {
            name: doc
            for base in reversed(_bases(kind))
            for name, doc in _attribute_docs(base).items()
            if not name.startswith("_") and name not in INTERNAL.get(kind.__name__, ())
        }
        for name, member in _members(kind):
            if isinstance(member, property):
                found[name] = inspect.getdoc(member) or ""
        for name in parameters:
            found.pop(name, None)  # it is what was given
        if not found:
            return
        is_config = kind.__name__ == "Config"
        defaults = {field.name: field.default for field in dataclasses.fields(kind)} if is_config else {}
        yield "| option | default | |\n|---|---|---|" if is_config else "| attribute | |\n|---|---|"
        for name, doc in found.items():
            if not doc:
                self.problems.append(f"{where}.{name} has no docstring")
            default = f" {SHOWN_DEFAULTS.get(name) or _default(defaults[name])} |" if is_config else ""
            yield f"| `{name}` |{default} {_flat(doc)} |"
        yield ""

    def _methods(self, where: str, kind: type) -> Iterator[str]:
        for name, member in _members(kind):
            function = inspect.unwrap(member.__func__ if isinstance(member, staticmethod | classmethod) else member)
            if not inspect.isfunction(function):
                continue
            yield from self._function(f"{where}.{name}", function)

    def _called(self, module: ModuleType, function: Callable[..., Any]) -> Iterator[str]:
        where = f"{module.__name__}.{function.__name__}"
        yield f"## {where}\n"
        yield from self._function(where, function)

    def _function(self, where: str, function: Callable[..., Any]) -> Iterator[str]:
        signature = inspect.signature(function)
        own = dict(signature.parameters)
        prefix = "await " if inspect.iscoroutinefunction(function) else ""
        yield f"**`{prefix}{function.__name__}{_shown(signature)}`**\n"
        yield f"{self._text(where, function.__doc__, own)}\n"
        yield from self._parameters(where, [function.__doc__], own)

    def _text(self, where: str, doc: str | None, parameters: Collection[str]) -> str:
        """Returns what a docstring says to users, without its parameters."""
        if not doc:
            self.problems.append(f"{where} has no docstring")
            return ""
        lines = [lines for lines in _paragraphs(doc) if not _are_parameters(lines, parameters)]
        return "\n\n".join(_joined(paragraph) for paragraph in lines if not paragraph[0].startswith("Invariant"))

    def _parameters(self, where: str, docs: list[str | None], own: dict[str, inspect.Parameter]) -> list[str]:
        explained: dict[str, str] = {}
        for lines in (lines for doc in docs for lines in _paragraphs(doc or "") if _are_parameters(lines, own)):
            explained = _explained(lines) | explained
        missing = own.keys() - explained.keys() - NOT_OURS
        self.problems += [f"{where}: nothing explains the parameter {name}" for name in sorted(missing)]
        listed = [_wrapped(f"* {_parameter(own[name])}: {explained[name]}", "  ") for name in own if name in explained]
        return [*listed, ""] if listed else []


def _paragraphs(doc: str) -> list[list[str]]:
    return [paragraph.splitlines() for paragraph in inspect.cleandoc(doc).split("\n\n") if paragraph]


def _are_parameters(lines: list[str], known: Collection[str]) -> bool:
    found = _PARAMETERS.match(lines[0])
    return found is not None and set(found[1].split(", ")) <= set(known)


def _explained(lines: list[str]) -> dict[str, str]:
    explained: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        found = _PARAMETERS.match(line)
        if found is not None:
            names = found[1].split(", ")
            explained.update(dict.fromkeys(names, line[found.end() :]))
        else:
            explained.update({name: f"{explained[name]} {line.strip()}" for name in names})
    return explained


def _members(kind: type) -> list[tuple[str, Any]]:
    """Returns methods and properties in the order of the source, those of bases of ours first."""
    members: dict[str, Any] = {}
    for base in reversed(_bases(kind)):
        members.update(vars(base))
    hidden = INTERNAL.get(kind.__name__, set())
    is_shown = [(name, member) for name, member in members.items() if not name.startswith("_") and name not in hidden]
    kinds = (property, staticmethod, classmethod)
    return [(name, member) for name, member in is_shown if isinstance(member, kinds) or inspect.isfunction(member)]


def _bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.startswith("nsquark")]


def _is_record(kind: type) -> bool:
    """Users read its fields and never make one, or make it by its fields' names."""
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields") or typing.is_typeddict(kind) or _is_protocol(kind)


def _is_protocol(kind: type) -> bool:
    return getattr(kind, "_is_protocol", False)


def _attribute_docs(kind: type) -> dict[str, str]:
    """Finds the strings below fields and below what `__init__` sets; one that is missing is empty."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = _docs_below(tree.body, lambda target: target.id if isinstance(target, ast.Name) else None)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            docs |= _docs_below(node.body, lambda target: target.attr if isinstance(target, ast.Attribute) else None)
    return docs


def _docs_below(body: list[ast.stmt], name_of: Any) -> dict[str, str]:
    docs: dict[str, str] = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            is_doc = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            doc = str(below.value.value) if is_doc else ""  # type: ignore[union-attr]
            docs |= {name: inspect.cleandoc(doc) for target in targets if (name := name_of(target)) is not None}
    return docs


def _shown(signature: inspect.Signature) -> str:
    """Writes a signature without types, which stand with the parameters."""
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _parameter(parameter: inspect.Parameter) -> str:
    kind = parameter.annotation
    shown = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return f"`{parameter.name}` (`{shown}`)" if kind is not inspect.Parameter.empty else f"`{parameter.name}`"


def _default(value: object) -> str:
    return f"`{value}`" if value not in ("", None) else ""


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _joined(lines: list[str]) -> str:
    """Joins lines that flow; a list stays one."""
    is_list = any(line.lstrip().startswith("* ") for line in lines)
    return "\n".join(lines) if is_list else _wrapped(" ".join(map(str.strip, lines)))


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def main() -> None:
    made = Reference()
    if made.problems:
        sys.exit("\n".join(made.problems))
    REFERENCE.write_text(made.text)


if __name__ == "__main__":
    main()
