"""A class has a name of its own: who reads the name anywhere knows which one is meant."""

import ast
from collections import defaultdict
from pathlib import Path
from typing import Final

import nsquark

ROOT: Final = Path(nsquark.__file__).parent

SHARED: Final = {
    # The blocking client has the names of the client that it stands before.
    "Consumer": {"client/consumer.py", "sync.py"},
    "Producer": {"client/producer.py", "sync.py"},
    "ProducerPool": {"client/pool.py", "sync.py"},
    # For users' tests the programs have the names that they have here.
    "Nsqd": {"broker/nsqd.py", "testing/daemons.py"},
    "Nsqlookupd": {"lookupd/daemon.py", "testing/daemons.py"},
}


def homes_of_classes(sources: dict[str, str]) -> dict[str, list[str]]:
    """Lists the files that define a class, by its name."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path)
    return homes


def namesakes(sources: dict[str, str]) -> dict[str, list[str]]:
    return {
        name: homes
        for name, homes in homes_of_classes(sources).items()
        if len(homes) > 1 and set(homes) != SHARED.get(name)
    }


def test_no_two_classes_have_one_name() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    assert not namesakes(sources)


def test_a_namesake_is_found() -> None:
    assert namesakes({"a.py": "class Topic: ...", "b.py": "def f():\n    class Topic: ..."})
    assert namesakes({"a.py": "class Consumer: ...", "sync.py": "class Consumer: ..."})
    assert namesakes({"a.py": "class _Own: ...", "b.py": "class _Own: ..."})
