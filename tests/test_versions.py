"""A JAX or Python that ftrain does not know is refused at start, in one line with what to do."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ftrain.errors import ConfigError
from ftrain.versions import JAX_RULE, PYTHONS, check_versions, version_problem

INSTALL = f"pip install 'jax{JAX_RULE}' 'jaxlib{JAX_RULE}', or use scripts/ftrain"
REFUSED = {
    ((3, 13), "0.12.0", "0.12.0"): "Python 3.13 is not 3.11 or 3.12, on which ftrain is tested; "
    "start it with one of them, or use scripts/ftrain",
    ((3, 10), "0.10.2", "0.10.2"): "Python 3.10 is not 3.11 or 3.12, on which ftrain is tested; "
    "start it with one of them, or use scripts/ftrain",
    ((3, 11), None, None): f"jax is not installed; {INSTALL}",
    ((3, 11), "0.10.2", None): f"jaxlib is not installed; {INSTALL}",
    ((3, 11), "0.10.1", "0.10.1"): f"jax 0.10.1 is not {JAX_RULE}, which ftrain knows; {INSTALL}",
    ((3, 12), "0.13.0", "0.13.0"): f"jax 0.13.0 is not {JAX_RULE}, which ftrain knows; {INSTALL}",
    ((3, 12), "0.13", "0.12.0"): f"jax 0.13 is not {JAX_RULE}, which ftrain knows; {INSTALL}",
    ((3, 12), "1.0.0rc1", "1.0.0"): f"jax 1.0.0rc1 is not {JAX_RULE}, which ftrain knows; "
    f"{INSTALL}",
    ((3, 12), "0.11.2", "0.9.0"): f"jaxlib 0.9.0 is not {JAX_RULE}, which ftrain knows; {INSTALL}",
    ((3, 12), "0.12.0.1", "0.11.2"): f"jax 0.12.0.1 and jaxlib 0.11.2 do not belong together; "
    f"{INSTALL}",
}


@pytest.mark.parametrize("versions", REFUSED, ids=str)
def test_unknown_versions_are_refused_in_one_line(versions):
    assert version_problem(*versions) == REFUSED[versions]


@pytest.mark.parametrize(
    ("python", "jax", "jaxlib"),
    [
        ((3, 11), "0.10.2", "0.10.2"),
        ((3, 12), "0.12.0.1", "0.12.0.1"),
        ((3, 12), "0.11.2", "0.11.0"),
        ((3, 12), "0.12.1.dev20260101+abc", "0.12.0"),
    ],
)
def test_known_versions_are_taken(python, jax, jaxlib):
    assert version_problem(python, jax, jaxlib) is None


def test_versions_of_this_environment_are_taken():
    check_versions()


def test_installed_version_is_the_one_that_is_checked(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.13.1")
    with pytest.raises(ConfigError) as caught:
        check_versions()
    assert caught.value.problems == (
        f"jax 0.13.1 is not {JAX_RULE}, which ftrain knows; {INSTALL}",
    )


def test_missing_package_is_a_problem_and_no_traceback(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match="jax is not installed"):
        check_versions()


def test_check_imports_no_jax():
    code = (
        "import sys; from ftrain.versions import check_versions; check_versions(); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bounds_are_those_of_pyproject():
    """What pip would install and what a start takes must not drift apart."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert {f"jax{JAX_RULE}", f"jaxlib{JAX_RULE}"} <= set(project["dependencies"])
    (_, oldest), (major, newest) = PYTHONS[0], PYTHONS[-1]
    assert project["requires-python"] == f">={major}.{oldest},<{major}.{newest + 1}"
    edges = ["0.10.2", "0.12.99"], ["0.10.1", "0.13"]
    assert [version_problem((3, 11), v, v) for v in edges[0]] == [None, None]
    assert all(version_problem((3, 11), v, v) for v in edges[1])
