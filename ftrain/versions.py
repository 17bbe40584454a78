"""Which versions ftrain runs on, asked of the installed packages' metadata: no jax is imported.

ftrain rests on private parts of JAX (`runtime`, `membership`, `coordinator`), so a JAX that nobody
has checked is refused before anything starts instead of failing somewhere in a recovery.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

from ftrain.errors import ConfigError

PYTHONS = ((3, 11), (3, 12))
OLDEST_JAX = (0, 10, 2)
FIRST_UNKNOWN_JAX = (0, 13)
JAX_RULE = ">=0.10.2,<0.13"  # the two above, as pyproject.toml has them


def check_versions() -> None:
    """Checks Python, jax and jaxlib. A few milliseconds.

    Raises:
      ConfigError: ftrain does not know one of them, or jax and jaxlib do not belong together.
    """
    problem = version_problem(sys.version_info[:2], _installed("jax"), _installed("jaxlib"))
    if problem:
        raise ConfigError(problem)


def version_problem(python: tuple[int, int], jax: str | None, jaxlib: str | None) -> str | None:
    """What keeps ftrain from running on these versions, in one line; None if nothing does.

    Args:
      python: major and minor.
      jax: the installed version, None if it is not installed.
      jaxlib: likewise.
    """
    install = f"pip install 'jax{JAX_RULE}' 'jaxlib{JAX_RULE}', or use scripts/ftrain"
    if python not in PYTHONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        return (
            f"Python {python[0]}.{python[1]} is not {known}, on which ftrain is tested; start "
            "it with one of them, or use scripts/ftrain"
        )
    for name, version in (("jax", jax), ("jaxlib", jaxlib)):
        if version is None:
            return f"{name} is not installed; {install}"
        if not OLDEST_JAX <= _numbers(version) < FIRST_UNKNOWN_JAX:
            return f"{name} {version} is not {JAX_RULE}, which ftrain knows; {install}"
    if _numbers(jax)[:2] != _numbers(jaxlib)[:2]:
        return f"jax {jax} and jaxlib {jaxlib} do not belong together; {install}"
    return None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """`0.12.0.1.dev3+local` as (0, 12, 0, 1)."""
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", version)[0].split(".")))
