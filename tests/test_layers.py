"""Who may import whom: read from the sources, as design.md section 8 has it.

A module-level import counts; one inside a function does not, since it is paid where it is used; nor
does one under TYPE_CHECKING, which never runs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.runs import REPOSITORY, environment

PACKAGE = REPOSITORY / "ftrain"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if path.stem != "__init__"
)

# From the ground up: a module imports only from layers before its own.
LAYERS = [
    # Words that all use, and pure functions.
    ["errors", "stacks", "tcp_sockets"],
    [
        "findings",
        "beat",
        "order",
        "compile_lock",
        "doctor.finding",
        "interfaces",
        "lane",
        "match",
        "node_list",
        "processes",
        "memory_tier",
        "tree",
        "worker_logs",
        "worker_pipes",
        "worker_signals",
        "undertaker",
        "wire",
    ],
    [
        "communicators",
        "endpoint",
        "reachability",
        "schedulers",
        "yaml_lines",
        "events",
        "restart",
        "journal",
        "watchdog",
        "pretrained",
        "run_lock",
        "run_token",
        "door",
        "user_code",
        "versions",
        "state",
        "data",
        "user_metrics",
        "layout",
        "contractions",
        "leaves",
        "nonfinite",
        "table",
        "runtime",
        "coordinator",
        "slots",
        "forking",
        "ears",
        "verdict",
        "target",
        "following",
        "chaos.hook",
        "chaos.network",
        "chaos.orders",
        "snapshots",
    ],
    [
        "mesh",
        "outcome",
        "digests",
        "transfer",
        "replicas",
        "initial",
        "loss",
        "records",
        "retention",
        "chaos.disk",
        "chaos.plan",
        "doctor.host",
    ],
    ["addresses", "history", "lease", "recoveries"],
    ["placement", "succession", "caller"],
    ["reduction", "contribution"],
    ["update", "explain"],
    [
        "sync",
        "span",
        "identity",
        "checkpoint",
        "config_rules",
        "step_rules",
        "chaos.live",
        "doctor.network",
        "doctor.probe",
    ],
    [
        "config",
        "recorder",
        "story",
        "warden",
        "trainer",
        "step",
        "restore",
        "saving",
        "saver",
        "keeper",
        "evaluation",
        "membership",
        "fault_rules",
        "profiling",
        "tensorboard",
        "sinks",
        "chaos.faults",
        "goodput",
        "lanes",
        "run_now",
    ],
    ["run_keys"],
    ["admission", "stepping", "load", "verify", "board", "panel", "prometheus"],
    ["sources", "screen", "status", "report"],
    ["init_from"],
    ["entrance"],
    ["environment", "loop", "meeting_point", "chaos.command"],
    ["headship"],
    ["preparing"],
    ["worker"],
    ["local_host"],
    ["remote_host"],
    ["hosts", "coordination", "crew", "head_line", "words"],
    ["lives"],
    ["supervisor", "agent"],
    ["run_hosts"],
    ["check", "debug", "template", "checkpoints", "sink_process"],
    ["doctor.devices"],
    ["doctor.command"],
    ["cli"],
    ["__main__"],
]

PROCESS_SIDE = set(
    """
    cli supervisor restart recorder story screen slots processes run_lock watchdog events config
    config_rules
    errors yaml_lines environment user_code beat versions worker_logs forking ears
    verdict stacks warden target match pretrained checkpoints
    findings records recoveries step_rules fault_rules verify goodput
    run_now board panel status lanes report
    agent coordination door hosts local_host meeting_point remote_host run_hosts run_token
    undertaker wire
    caller crew head_line headship history journal lease lives succession words
    addresses endpoint interfaces node_list placement schedulers
    sinks sink_process prometheus tensorboard following
    chaos.hook chaos.plan chaos.network chaos.disk chaos.orders chaos.live chaos.faults
    chaos.command
    __main__ keeper memory_tier retention
    doctor.command doctor.finding doctor.host doctor.network doctor.devices
""".split()
)
DEVICE_PACKAGES = {"jax", "jaxlib", "flax", "optax"}
HEAVY_PACKAGES = {"orbax", "grain", "sklearn", "flax"}
# The only files that name the parts of JAX that may change with any release.
TOUCH_INTERNALS = {"worker", "runtime", "membership", "coordinator"}
INTERNALS = ("jax.distributed", "jax._src", "jaxlib", "jax.experimental.multihost_utils")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())


def names_of(node: ast.AST) -> Iterator[str]:
    """The dotted names that an import statement asks for: `from a import b` asks for a.b."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not used here"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_level(nodes: list[ast.stmt]) -> Iterator[str]:
    """What is imported when the module is, under `if` and `try` too."""
    for node in nodes:
        yield from names_of(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from module_level(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for part in ("body", "orelse", "finalbody", "handlers"):
                below = getattr(node, part, [])
                for item in below:
                    yield from module_level(
                        item.body if isinstance(item, ast.ExceptHandler) else [item]
                    )


def imports(module: str) -> set[str]:
    return set(module_level(tree(module).body))


@cache
def own_imports(module: str) -> set[str]:
    """The modules of ftrain that `module` imports at its own import."""
    asked = {name.removeprefix("ftrain.") for name in imports(module) if name.startswith("ftrain.")}
    return {m for m in MODULES if any(a == m or a.startswith(m + ".") for a in asked)}


def reached(module: str) -> set[str]:
    """All modules of ftrain that are loaded with `module`."""
    seen, todo = set(), [module]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += own_imports(current)
    return seen


def test_every_module_has_its_layer():
    """A new file is given a place in the list above, once."""
    assert sorted(m for layer in LAYERS for m in layer) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_downward(module):
    """From one layer only into those before it; so they have no cycle either."""
    level = {m: i for i, layer in enumerate(LAYERS) for m in layer}
    upward = {m for m in own_imports(module) if level[m] >= level[module]}
    assert upward == set()


@pytest.mark.parametrize("module", sorted(PROCESS_SIDE))
def test_the_process_side_imports_no_jax(module):
    """Neither by itself nor through another module of ftrain."""
    found = {
        m: name
        for m in reached(module)
        for name in imports(m)
        if name.split(".")[0] in DEVICE_PACKAGES
    }
    assert found == {}


@pytest.mark.parametrize("module", MODULES)
def test_only_four_files_name_what_jax_may_change(module):
    """At module level or inside a function: what a new release breaks is found in one place."""
    asked = {name for node in ast.walk(tree(module)) for name in names_of(node)}
    used = {ast.unparse(node) for node in ast.walk(tree(module)) if isinstance(node, ast.Attribute)}
    named = {
        name
        for name in asked | used
        if any(name == part or name.startswith(part + ".") for part in INTERNALS)
    }
    assert module in TOUCH_INTERNALS or named == set()


@pytest.mark.parametrize("module", MODULES)
def test_slow_packages_are_imported_where_they_are_used(module):
    """Orbax, grain, scikit-learn and flax cost a third of a second and more at every restart."""
    assert {name for name in imports(module) if name.split(".")[0] in HEAVY_PACKAGES} == set()


def test_a_forbidden_import_is_found():
    """The reading itself: what counts and what does not."""
    source = """
if TYPE_CHECKING:
    import a
else:
    import b
try:
    from c.d import e
except ImportError:
    import f
class G:
    import g
def h():
    import h
"""
    assert set(module_level(ast.parse(source).body)) == {"b", "c.d.e", "f", "g"}


def loaded_after(statement: str) -> set[str]:
    """The top packages that a fresh Python has loaded after a statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=REPOSITORY,
        text=True,
        env=environment(),
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "ftrain",
        "ftrain.supervisor",
        "ftrain.cli",
        "ftrain.user_code",
        "ftrain.config",
        "ftrain.verify",
        "ftrain.report",
        "ftrain.status",
    ],
)
def test_importing_the_process_side_loads_no_jax(module):
    """In a real interpreter, whatever the sources look like."""
    assert loaded_after(f"import {module}") & (DEVICE_PACKAGES | HEAVY_PACKAGES) == set()


def test_the_command_line_loads_no_jax_when_it_refuses():
    """A typo is told in a fraction of a second."""
    statement = "from ftrain.cli import main\nassert main(['run', 'no_such_file.yaml']) == 2"
    assert loaded_after(statement) & DEVICE_PACKAGES == set()


def test_a_worker_s_imports_load_nothing_slow():
    """What a `linear` worker imports before its first commit: neither Orbax nor grain nor flax."""
    statement = (
        "import ftrain.loop, ftrain.membership, ftrain.saving, ftrain.restore, ftrain.worker"
    )
    assert loaded_after(statement) & HEAVY_PACKAGES == set()


@pytest.mark.parametrize(
    "name",
    ["Config", "Dataset", "Init", "Loss", "TrainState", "Trainer", "load_params", "load_state"],
)
def test_public_names_load_on_first_use(name):
    """And are listed."""
    import ftrain

    assert getattr(ftrain, name).__name__ == name
    assert name in ftrain.__all__ and name in dir(ftrain)


def test_a_name_that_is_not_there_says_which_are():
    """As any module, with the names it has."""
    import ftrain

    with pytest.raises(AttributeError, match="no attribute 'Trianer'; it has .*'Trainer'"):
        _ = ftrain.Trianer


def test_every_module_says_what_it_is():
    """A file begins with its docstring."""
    assert [m for m in MODULES if not ast.get_docstring(tree(m))] == []


def test_the_sources_are_those_that_are_imported():
    """The tests read this repository, not an installed copy."""
    import ftrain

    assert Path(ftrain.__file__).parent == PACKAGE
