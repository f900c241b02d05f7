"""What holds for all of the agent's source, read as text."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import dshealthd
from dshealthd.config import registry
from dshealthd.core.collector import Worker
from tests.web.certificates import authority

T = TypeVar("T")
SOURCE = Path(dshealthd.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
COMMANDS = ("doctor/", "explain/", "cli/free_port.py", "slurm/", "status/")
"""What never runs in the agent: a thread or a child there ends with its command."""
BROAD = {
    "core/result.py": "a defect in one collector must not end the agent",
    "findings/judgement.py": "a defect in one rule must not hide what the others see",
    "training/heartbeat.py": "no defect of ours may end a training",
    "linux/forked.py": "whatever fails in a function becomes its reason, in a process of its own",
    "doctor/job/sources/inspect_deepspeed.py": "DeepSpeed raises what it likes, and runs apart",
}
"""The only modules that catch every exception and go on."""
AGENT = re.compile(rf"(?!{'|'.join(COMMANDS)})")
ONE_WAY: dict[str, tuple[set[str], re.Pattern[str], dict[str, str]]] = {
    # Nothing waits in threads of the loop's own executor, which would keep the agent from ending.
    "a thread is started by core/background.py": (
        {"Thread", "Timer", "ThreadPoolExecutor", "to_thread", "run_in_executor"}
        | {"loop.getaddrinfo", "loop.getnameinfo"},
        AGENT,
        {
            "core/background.py": "itself",
            "jobs/launches/breakpoints.py": "in a process of its own, which waits for it",
            "nvrx/server.py": "gRPC's own, in a process of its own",
            "probe/workers/worker.py": "a process of the training environment",
        },
    ),
    # What systemd gives to the agent alone does not reach a child: one place scrubs it.
    "a child is started by core/child.py": (
        {"Popen", "create_subprocess_exec", "create_subprocess_shell", "posix_spawn", "execv"},
        AGENT,
        {
            "core/child.py": "itself",
            "core/state_file.py": "with an empty environment, from a thread",
            "evidence/stacks.py": "py-spy, from the collecting process",
            "probe/workers/launch.py": "a process of its own, which becomes a checked interpreter",
            "probe/workers/worker.py": "a process of the training environment",
        },
    ),
    # Nobody is blamed for the time in which the agent was stopped, or the machine suspended: an
    # answer that had arrived counts, whichever of both asyncio sees first.
    "a deadline is one of core/timing.py": (
        {"asyncio.timeout", "asyncio.timeout_at", "asyncio.wait_for"},
        AGENT,
        {
            "core/timing.py": "itself",
        },
    ),
    # What somebody names is opened only if it is a regular file: a FIFO would hang the reader.
    "a named file is read by read_named of core/host.py": (
        {"read_text"},
        re.compile(""),
        {
            "doctor/job/context.py": "calls that of source.py",
            "doctor/job/sources/source.py": "its own, with the rights of the file's owner",
            "core/exposition.py": "a file of this repository",
            "evidence/command.py": "the summary that the agent has just written",
            "explain/patterns.py": "files of this repository",
            "doctor/job/sources/deepspeed_config.py": "a file of this repository",
            "doctor/job/sources/launcher_command.py": "a file of this repository",
            "jobs/nccl/names.py": "a file of this repository",
            "symptoms/__init__.py": "files of this repository",
        },
    ),
    # No name that somebody else has given moves a cursor or adds a line at a terminal.
    "a text is printed by print_lines of core/text.py": (
        {"print"},
        re.compile(""),
        {
            "core/text.py": "print_lines itself",
            "doctor/command.py": "a report in color, whose texts are printable; our runbook",
            "status/command.py": "a status in color, whose texts are printable",
        },
    ),
    # A name that a user gives, of a mount point or a program, cannot begin a line: the kernel
    # escapes the line feed in it, not the other characters at which `splitlines` splits.
    "lines of the kernel are those of lines_of of core/host.py": (
        {"splitlines"},
        re.compile(r"linux/|collectors/|jobs/|evidence/|nvml/"),
        {
            "collectors/software.py": "files of a distribution",
            "evidence/stacks.py": "what py-spy prints",
            "jobs/installation.py": "files of an environment",
        },
    ),
}
"""Rules, with the names that are used in no other way, the modules they are about, and those that
use one of the names all the same, each with why."""


CHECKS = {"Check", "check_of", "snapshot_check"}
"""A check that one of these declares is a definition, too: it has a name, and is run."""
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
JSON = "core/documents.py"
"""Where JSON is written."""
STANDALONE = {
    "probe/workers/launch.py": "runs before the package can be imported",
    "probe/workers/worker.py": "a process of the training environment, without the package",
    "doctor/job/sources/inspect_deepspeed.py": "likewise",
}
"""What writes JSON without the package's own function, with allow_nan off each time."""


SHARED_CLASS_NAMES = frozenset({"Finding"})
"""Class names that may stand in several modules: that of the node, and that of a log."""


SEAMS = frozenset(
    {
        "explain/recognition.py",
    }
)
"""Modules whose constants are still to be moved."""


@functools.cache
def parsed(file: Path) -> ast.Module:
    """Return a module as a tree."""
    return ast.parse(file.read_text(encoding="utf-8"))


def each(check: Callable[[Path], T]) -> dict[str, T]:
    """Return what a check finds in each module, by its path."""
    return {str(file.relative_to(SOURCE)): check(file) for file in FILES}


@pytest.fixture(autouse=True, scope="module")
def _trees_are_kept_for_this_file() -> Iterator[None]:
    """Parse each module once, and leave no hundreds of megabytes to the tests that follow."""
    yield
    parsed.cache_clear()
    names.cache_clear()


def caught(tree: ast.AST) -> set[str]:
    """Return the broad exceptions that a module catches without raising them again at the end."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            text = "BaseException" if node.type is None else ast.unparse(node.type)
            found |= {"Exception", "BaseException"} & set(text.strip("()").split(", "))
    return found


def test_broad_handlers_are_few() -> None:
    """Every exception is caught in few places, each for one reason; elsewhere it has a name."""
    found = each(lambda file: caught(parsed(file)))
    assert {name for name, kinds in found.items() if kinds} == {*BROAD}, (
        "name the exception that you expect; where none can be named, say why in BROAD"
    )
    assert all(found[name] == {"Exception"} for name in BROAD)


@pytest.mark.parametrize(("text", "kinds"), [
    ("except Exception: pass", {"Exception"}),
    ("except (ValueError, Exception): pass", {"Exception"}),
    ("except: pass", {"BaseException"}),
    ("except BaseException: raise", set()),
    ("except OSError: pass", set()),
])  # fmt: skip
def test_a_broad_handler_would_be_seen(text: str, kinds: set[str]) -> None:
    """The check sees each way to write one."""
    assert caught(ast.parse(f"try:\n  x\n{text}")) == kinds


def handlers(tree: ast.AST) -> Iterator[tuple[int, set[str]]]:
    """Yield line and exceptions of each handler and each `suppress`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            kinds = node.args
        else:
            continue
        yield node.lineno, {ast.unparse(kind) for kind in kinds}


def one_sided(tree: ast.AST) -> list[int]:
    """Return the lines that expect a text which is no number, but not a number that is no value."""
    return [
        line
        for line, kinds in handlers(tree)
        if ("ValueError" in kinds) != ("ArithmeticError" in kinds)
        or kinds & {"OverflowError", "ZeroDivisionError"}
    ]


def test_no_number_of_others_escapes() -> None:
    """Who expects a ValueError of what others write expects an ArithmeticError too.

    A number that is too large for a float, for a C integer or for the calendar raises
    OverflowError, which is no ValueError: one line of one user would end the reading of
    everybody's.
    """
    found = each(lambda file: one_sided(parsed(file)))
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(("text", "seen"), [
    ("except ValueError: pass", True),
    ("except (OSError, ValueError): pass", True),
    ("except (ValueError, OverflowError): pass", True),
    ("except OverflowError: pass", True),
    ("except (ValueError, ArithmeticError): pass", False),
    ("except (OSError, KeyError): pass", False),
])  # fmt: skip
# a parameter
def test_a_one_sided_handler_would_be_seen(text: str, seen: bool) -> None:  # noqa: FBT001
    """The check sees each way to write one."""
    assert bool(one_sided(ast.parse(f"try:\n  x\n{text}"))) is seen


def unguarded(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that parse a document where a nested or foreign one may escape."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(DOCUMENTS):
            continue
        guards: set[str] = set()
        inner: ast.AST = node
        while (outer := parents.get(inner)) is not None:
            if isinstance(outer, ast.Try) and inner in outer.body:
                for handler in outer.handlers:
                    guards |= {kind for _, kinds in handlers(handler) for kind in kinds}
            elif isinstance(outer, ast.With):
                guards |= {ast.unparse(item.context_expr).partition("(")[0] for item in outer.items}
            inner = outer
        if not guards & {
            "RecursionError",
            "documents.MISSHAPEN",
            "*documents.MISSHAPEN",
            "schema.reading",
        }:
            yield f"{node.lineno}: {ast.unparse(node.func)}"


DOCUMENTS = ("json.loads", "json.load", "tomllib.loads", "literal_eval", "get_single_data")
"""Parsers of nested documents, which raise RecursionError too."""
DOCUMENTS_ELSEWHERE = {
    "core/wire.py": "the agent's own frames, in its worker",
    "doctor/job/sources/inspect_deepspeed.py": "our own request; its text is parsed under a guard",
    "doctor/status_document.py": "what this process has just rendered",
    "explain/patterns.py": "files of this repository",
    "doctor/job/sources/deepspeed_config.py": "a file of this repository",
    "doctor/job/sources/launcher_command.py": "a file of this repository",
    "jobs/nccl/names.py": "a file of this repository",
    "probe/workers/session.py": "its caller takes documents.MISSHAPEN",
    "probe/workers/worker.py": "the agent's own messages, in a worker",
    "symptoms/entry.py": "files of this repository",
}


def test_no_document_of_others_escapes() -> None:
    """What parses a document of somebody else expects one that is nested too deeply."""
    found = each(lambda file: list(unguarded(parsed(file))))
    found = {name: calls for name, calls in found.items() if calls}
    assert found.keys() == DOCUMENTS_ELSEWHERE.keys(), found


def test_state_is_read_in_one_way() -> None:
    """A past that is not ours costs the past alone: state files are parsed by core/schema.py."""
    readers = {"state_file", "Maintenance", "read_state"}
    own_way = {
        name for name, used in each(names).items() if used & readers and "json.loads" in used
    }
    assert own_way == set(), "use schema.document, within schema.reading"


@functools.cache
def names(file: Path) -> set[str]:
    """Return the names that a module uses: of attributes too, alone and behind their owner's."""
    nodes = [*ast.walk(parsed(file))]
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).removesuffix("()").rpartition("_")[2]
            found |= {node.attr, f"{owner}.{node.attr}"}
    return found


@pytest.mark.parametrize("rule", ONE_WAY)
def test_one_way(rule: str) -> None:
    """Each of these is done in one way; where that cannot be, the table says why."""
    wanted, about, known = ONE_WAY[rule]
    found = {name for name, used in each(names).items() if used & wanted and about.match(name)}
    assert found == known.keys(), rule


def test_an_agent_without_probes_does_without_them() -> None:
    """To load a configuration, and to import the agent, takes the options of the probes alone; and
    the agent with all its collectors imports neither NVML nor torch.
    """
    code = (
        "import sys\nimport dshealthd.config.config, dshealthd.agent.agent, "
        "dshealthd.cli.commands\nprint(*(name for name in sys.modules if "
        "name.startswith('dshealthd.probe')))\ndshealthd.config.registry.all_collectors()\nforeign "
        "= 'dshealthd.nvml.session', 'pynvml', 'torch', 'deepspeed', 'psutil', "
        "'prometheus_client'\nprint(*(name for name in sys.modules if name.startswith(foreign)))"
    )
    probes, foreign = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(probes.split()) == {
        "dshealthd.probe",
        "dshealthd.probe.members",
        "dshealthd.probe.members.hostlist",
        "dshealthd.probe.options",
    }
    assert foreign == ""


def test_workers_do_without_what_only_the_loop_needs() -> None:
    """Each worker has its own copy of what it imports: asyncio and TLS would be 4 MiB of each."""
    workers: dict[str, list[str]] = {}
    for name, collector in registry.all_collectors().items():
        if collector.worker is not None:
            workers.setdefault(collector.worker, []).append(name)
    assert len(workers) == len(Worker)
    for names in workers.values():
        code = (
            "import sys; from dshealthd.collection import worker\n"
            f"for name in {names}: worker.registry.load(name)\n"
            "print(*sorted({'asyncio', 'ssl', 'subprocess', 'http', 'email'} & set(sys.modules)))"
        )
        loaded = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert loaded.stdout.split() == [], f"import it where it is used: a worker of {names}"


def test_agent_does_without_certificate_authorities(tmp_path: Path) -> None:
    """Aiohttp's client, which it does not use, would load all of the system's: 2 MiB."""
    authority(tmp_path, "ca")
    places = {"SSL_CERT_FILE": str(tmp_path / "ca.pem"), "SSL_CERT_DIR": str(tmp_path)}
    code = (
        "import os, ssl\nmade, make = [], ssl.create_default_context\nssl.create_default_context = "
        "lambda *a, **k: made.append(make(*a, **k)) or made[-1]\nfrom dshealthd.cli import "
        "commands\ncommands._import_aiohttp()\nimport dshealthd.agent.agent\nprint(len(made), "
        "sum(context.cert_store_stats()['x509'] for context in "
        "made))\nprint(os.environ.get('SSL_CERT_FILE'), os.environ.get('SSL_CERT_DIR'))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **places},
    )
    assert loaded.stdout.splitlines() == ["1 0", " ".join(places.values())]


def writers(tree: ast.AST) -> list[bool]:
    """Return of each place that writes JSON whether it refuses what JSON lacks; a writer that is
    imported or passed on by its name might be called either way.
    """
    named, found = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"json.dumps", "json.dump"}:
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            found.append(options.get("allow_nan") == "False")
            named.append(node.func)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in named:
            found += [False] * (
                ast.unparse(node) in {"json.dumps", "json.dump", "json.JSONEncoder"}
            )
        elif isinstance(node, ast.ImportFrom) and node.module == "json":
            found += [False] * any(
                name.name in {"dumps", "dump", "JSONEncoder"} for name in node.names
            )
        elif isinstance(node, ast.Import):
            found += [False] * any(name.name == "json" and name.asname for name in node.names)
    return found


def test_json_is_written_in_one_place() -> None:
    """No document has Infinity or NaN, which only Python parses: one function writes all of
    them.
    """
    found = each(lambda file: writers(parsed(file)))
    assert {name for name, calls in found.items() if calls} == {JSON, *STANDALONE}, (
        "write it with core/documents.py"
    )
    assert all(all(calls) for calls in found.values())


@pytest.mark.parametrize(("text", "found"), [
    ("json.dumps(x)", [False]),
    ("json.dump(x, file, allow_nan=True)", [False]),
    ("json.dumps(x, allow_nan=False)", [True]),
    ("map(json.dumps, xs)", [False]),
    ("from json import dumps", [False]),
    ("import json as j", [False]),
    ("json.loads(x)", []),
])  # fmt: skip
def test_another_writer_of_json_would_be_seen(text: str, found: list[bool]) -> None:
    """The check sees each way to write JSON."""
    assert writers(ast.parse(text)) == found


def test_class_names_stand_in_one_module() -> None:
    """Who reads a class's name knows which is meant, without a look at the imports."""
    modules: dict[str, set[Path]] = {}
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, set()).add(file)
    shared = sorted(name for name, files in modules.items() if len(files) > 1)
    assert set(shared) <= SHARED_CLASS_NAMES, f"rename the one you added: {shared}"


VAGUE = re.compile(r"_*(look|see|take|ask|note|meet|hear|tell)(s|ed|_.*)?")
"""Names of functions that say of a program what a person does, and not what comes of it."""
VAGUE_ELSEWHERE = ("explain/", "doctor/job/")
"""Folders that still have some."""
PLAIN = frozenset({"tell", "_tell", "take_part"})
"""News that collectors tell the scheduler, and members that take part in a round."""


def vague(tree: ast.AST) -> set[str]:
    """Return the vague names of functions in a module."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, FUNCTIONS)}
    return {name for name in names - PLAIN if VAGUE.fullmatch(name)}


def test_functions_are_called_what_they_do() -> None:
    """A function that looks, asks or takes does something of its own: it checks, queries, reads."""
    found = each(lambda file: vague(parsed(file)))
    assert {
        name: names
        for name, names in found.items()
        if names and not name.startswith(VAGUE_ELSEWHERE)
    } == {}


@pytest.mark.parametrize(("text", "found"), [
    ("def look(): ...", {"look"}),
    ("class A:\n  async def _take_all(self): ...", {"_take_all"}),
    ("def takes(): ...\ndef asked(): ...", {"takes", "asked"}),
    ("def lookup(): ...\ndef seek(): ...\ndef notify(): ...\ndef take_part(): ...", set()),
])  # fmt: skip
def test_a_vague_name_would_be_seen(text: str, found: set[str]) -> None:
    """Each form of such a verb is seen, and no other word that begins alike."""
    assert vague(ast.parse(text)) == found


def imported(file: Path, modules: Collection[str], *, at_once: bool = False) -> set[str]:
    """Return those of `modules` that one imports; `at_once`, those that run with it alone."""
    found: set[str] = set()
    for node in parsed(file).body if at_once else ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in names}
    return found & set(modules)


def modules_of_source() -> dict[str, Path]:
    """Return the file of each module."""
    return {
        ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): (
            file
        )
        for file in FILES
    }


def test_no_module_imports_one_that_imports_it() -> None:
    """Modules can be read from the bottom up, types that only annotations name included."""
    modules = modules_of_source()
    graph = {name: imported(file, modules) for name, file in modules.items()}
    order = tuple(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("dshealthd.core.collector") < order.index("dshealthd.agent.agent")


def test_no_package_imports_one_that_imports_it() -> None:
    """What runs at import goes one way between packages."""
    modules = modules_of_source()
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        package = name.split(".")[:2]
        others = {".".join(other.split(".")[:2]) for other in imported(file, modules, at_once=True)}
        graph.setdefault(".".join(package), set()).update(others - {".".join(package), "dshealthd"})
    order = tuple(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("dshealthd.core") < order.index("dshealthd.probe")
    # A package declares its own section.
    assert graph["dshealthd.config"] == {"dshealthd.core"}


def test_packages_name_their_modules() -> None:
    """What a package's docstring quotes as a module is one of it."""
    for file in FILES:
        if file.name == "__init__.py":
            for name in re.findall(r"`([a-z_]+)`", ast.get_docstring(parsed(file)) or ""):
                place = file.parent / name
                assert place.is_dir() or place.with_suffix(".py").exists(), (file, name)


def tours() -> dict[str, list[str]]:
    """Return the files of each tour of CONTRIBUTING, in order, by its headline."""
    text = (SOURCE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    parts = text.partition("## Three tours")[2].partition("\n## ")[0].split("\n### ")[1:]
    return {part.partition("\n")[0]: re.findall(r"(?m)^\d+\. `(.+?)`", part) for part in parts}


@pytest.mark.parametrize(("headline", "most"), [
    ("Temperature → `/metrics`", 14),
    ("Heartbeat → `dshealthd_job_hang`", 12),
    ("Invitation → `dshealthd_suspect`", 30),
])  # fmt: skip
def test_tours_lead_through_the_code(headline: str, most: int) -> None:
    """A tour is short, its files exist, and each has to do with another: one imports the other."""
    files = tours()[headline]
    assert 10 < len(files) <= most, "list the files where something is decided, not all entered"
    names = {file: "dshealthd." + file.removesuffix(".py").replace("/", ".") for file in files}
    joins = {name: imported(SOURCE / file, names.values()) for file, name in names.items()}
    alone = {
        name
        for name, others in joins.items()
        if not others - {name} and not any(name in joins[other] for other in joins if other != name)
    }
    assert not alone, "neither imports nor is imported by another file of this tour"


def names_in(node: ast.AST) -> set[str]:
    """Return the names in a piece of code."""
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def seams(module: ast.Module) -> list[str]:
    """Return the constants after a definition of a module that need none of its definitions, so
    that they could stand at its head.
    """
    defined: set[str] = set()
    found = []
    for node in module.body:
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and defined and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            own = set[str]().union(*map(names_in, targets))
            if names_in(node.value) & (defined | CHECKS):
                defined |= own
            else:
                found += sorted(own)
    return found


def test_constants_stand_at_the_head_of_their_module() -> None:
    """A block of constants between two definitions is the seam of two files: one subject a file."""
    found = {
        name for name, constants in each(lambda file: seams(parsed(file))).items() if constants
    }
    assert found <= SEAMS


@pytest.mark.parametrize(("text", "found"), [
    ("A = 1\ndef f(): ...\ndef g(): ...", []),
    ("def f(): ...\nA = 1\ndef g(): ...", ["A"]),
    ("def f(): ...\ndef g(): ...\nA = 1", ["A"]),
    ("def f(): ...\nA = f()\nB = A\ndef g(): ...", []),
    ("class F: ...\nA, B = 1, 2\nclass G: ...", ["A", "B"]),
])  # fmt: skip
def test_a_seam_would_be_seen(text: str, found: list[str]) -> None:
    """Constants are seen that could stand before the first definition, and no others."""
    assert seams(ast.parse(text)) == found
