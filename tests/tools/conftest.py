from collections.abc import Callable, Iterator

import pytest

from tools.rig import Cluster, Tool


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        running.start()
        yield running
    finally:
        running.end()


@pytest.fixture
def start() -> Iterator[Callable[..., Tool]]:
    """Starts tools, which are killed after the test if they still run."""
    tools: list[Tool] = []

    def start_one(tool: str, *flags: str, **settings: object) -> Tool:
        tools.append(Tool(tool, *flags, **settings))
        return tools[-1]

    yield start_one
    for tool in tools:
        tool.kill()
