"""Checks that the programs, flags, keys and files exist that the examples in contrib/ name."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import Nsqd
from harness.lookupd import Nsqlookupd
from nsquark.base.flags import table
from nsquark.broker import options as nsqd_options
from nsquark.lookupd import options as nsqlookupd_options

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib"
OPTIONS: dict[str, Any] = {"nsqd": nsqd_options, "nsqlookupd": nsqlookupd_options}
TABLES: dict[str, type[Any]] = {"nsqd": nsqd_options.NsqdOptions, "nsqlookupd": nsqlookupd_options.LookupdOptions}
DEFAULT_PORTS = {4150, 4151, 4160, 4161}
INSTRUCTIONS = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "VOLUME", "EXPOSE", "CMD"}


def check_command(command: Sequence[str]) -> None:
    """Its program is installed with the package, and takes these flags."""
    program = Path(command[0]).name
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert program in scripts
    # Config files are elsewhere on the machines these are for; their keys are looked at below.
    OPTIONS[program].parse_options([flag for flag in command[1:] if not flag.startswith("--config=")])


# -- config files ----------------------------------------------------------------------------------------


def test_nsqd_starts_with_its_example(make_nsqd: Callable[..., Nsqd]) -> None:
    """Flags win over the file, so ports and data path are the test's."""
    nsqd = make_nsqd(f"--config={CONTRIB / 'nsqd.toml'}", "--lookupd-tcp-address=127.0.0.1:1")
    assert nsqd.get("/ping").text == "OK"


def test_nsqlookupd_starts_with_its_example() -> None:
    with Nsqlookupd(f"--config={CONTRIB / 'nsqlookupd.toml'}") as lookupd:
        assert lookupd.get("/ping").text == "OK"


@pytest.mark.parametrize("program", sorted(OPTIONS))
def test_every_key_of_the_examples_exists(program: str, tmp_path: Path) -> None:
    """Daemons ignore keys they do not know. Examples that are commented out count too."""
    text = re.sub(r"^# (?=\w+ = )", "", (CONTRIB / f"{program}.toml").read_text(), flags=re.MULTILINE)
    keys = tomllib.loads(text).keys()
    assert keys
    assert keys <= {row.key for row in table(TABLES[program])}
    everything = tmp_path / "all.toml"
    everything.write_text(text)
    OPTIONS[program].parse_options([f"--config={everything}"])


# -- systemd ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", sorted(CONTRIB.glob("systemd/*.service")), ids=lambda path: path.name)
def test_units_start_programs_with_flags_that_exist(unit: Path, tmp_path: Path) -> None:
    parser = configparser.ConfigParser(strict=True, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    check_command(shlex.split(parser["Service"]["ExecStart"]))
    if shutil.which("systemd-analyze"):
        # It also checks that the program exists, which is not so on this machine.
        here = tmp_path / unit.name
        here.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
        result = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", here], capture_output=True, text=True, timeout=60, check=False
        )
        assert unit.name not in result.stderr, result.stderr


# -- containers ------------------------------------------------------------------------------------------


def dockerfile() -> list[tuple[str, str]]:
    lines = (CONTRIB / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]


def test_the_dockerfile_copies_what_is_there_and_starts_nsqd() -> None:
    steps = dockerfile()
    assert {word for word, _ in steps} <= INSTRUCTIONS
    ignored = (CONTRIB / "Dockerfile.dockerignore").read_text().splitlines()
    for source in (
        name for word, rest in steps if word == "COPY" and "--from" not in rest for name in rest.split()[:-1]
    ):
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    assert {int(port) for word, rest in steps if word == "EXPOSE" for port in rest.split()} == DEFAULT_PORTS
    (command,) = (json.loads(rest) for word, rest in steps if word == "CMD")
    check_command(command)
    assert f"--data-path={dict(steps)['VOLUME']}" in command


def test_the_compose_file_names_only_what_exists() -> None:
    compose = yaml.safe_load((CONTRIB / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == set(OPTIONS)
    published = set()
    for service in services.values():
        check_command(service["command"])
        assert (CONTRIB / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert set(service.get("depends_on", [])) <= services.keys()
        assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= compose["volumes"].keys()
        published |= {int(port.rpartition(":")[2]) for port in service["ports"]}
        script = service["healthcheck"]["test"][-1]
        compile(script, "healthcheck", "exec")
    assert published == DEFAULT_PORTS
    names = re.findall(r"--(?:broadcast|lookupd-tcp)-address=(\w+)", " ".join(services["nsqd"]["command"]))
    assert set(names) <= services.keys()


# -- who can reach it ------------------------------------------------------------------------------------


def test_examples_are_open_to_this_machine_alone() -> None:
    for name in ("nsqd.toml", "nsqlookupd.toml"):
        config = tomllib.loads((CONTRIB / name).read_text())
        assert {config[key].rpartition(":")[0] for key in ("tcp_address", "http_address")} == {"127.0.0.1"}
    services = yaml.safe_load((CONTRIB / "compose.yaml").read_text())["services"]
    published = [port for service in services.values() for port in service.get("ports", ())]
    published += re.findall(r"-p (\d\S+)", (CONTRIB / "Dockerfile").read_text())
    assert len(published) == 6
    assert all(str(port).startswith("127.0.0.1:") for port in published)
