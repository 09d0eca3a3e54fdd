"""Mutation testing of the core: does a test fail when one place of the code is wrong?

python tools/mutate.py                       # checkpoints, chunking, coordinator, groups, retention
python tools/mutate.py core/siblings.py      # another module
python tools/mutate.py --again old.json      # only what survived in an earlier run

The tree is copied to a temporary folder and changed there. Every mutant is tried in a process forked
from this one, which has loaded pytest but nothing of the project, with the tests of its module
(`PLAN`), killers first. A mutant that needs more than `--limit` seconds of processor time counts as
killed. Survivors that docs/mutation.md proves equivalent are left out of the score; any other makes the
exit status 1.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import hypothesis.stateful  # noqa: F401  loaded once, for all children
import pytest
from hypothesis import HealthCheck, Phase, settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutation_operators import Mutant, mutants_of  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs") / "mutation.md"
COPIED = ("src", "tests", "pyproject.toml", "docs", "README.md", "CHANGELOG.md", "Makefile")

SWARM = "tests/sim/test_swarm.py"
"""Random worlds of fixed seeds with every check on."""
LOOKUP = (
    "tests/core/test_groups_and_coordinator.py",
    "tests/core/test_rule_edges.py",
    "tests/core/test_prefix_cache.py",
    "tests/core/test_explain.py",
    "tests/sim/test_contract_on_milepost.py",
    SWARM,
)
CACHE = (
    "tests/core/test_prefix_cache.py",
    "tests/core/test_losses.py",
    "tests/core/test_eviction.py",
    "tests/core/test_markers_and_conversations.py",
    "tests/core/test_explain.py",
    "tests/core/test_stats.py",
    "tests/core/test_scheduler.py",
    "tests/core/test_invariants_fire.py",
    "tests/core/test_retention.py",
    "tests/core/test_admission.py",
    "tests/bugs/test_accounting.py",
    SWARM,
)
PLAN: dict[str, tuple[str, ...]] = {
    "core/checkpoints.py": (
        "tests/core/test_checkpoints.py",
        "tests/core/test_chunking.py",
    ),
    "core/chunking.py": (
        "tests/core/test_rule_edges.py",
        "tests/core/test_chunking.py",
        "tests/core/test_markers_and_conversations.py",
        "tests/core/test_scheduler.py",
        SWARM,
    ),
    "core/coordinator.py": LOOKUP,
    "core/groups/attention.py": LOOKUP,
    "core/groups/recurrent.py": LOOKUP,
    "core/retention.py": (
        "tests/core/test_rule_edges.py",
        "tests/core/test_retention.py",
        "tests/core/test_eviction.py",
        SWARM,
    ),
    "core/prefix_cache.py": CACHE,
    "core/eviction.py": CACHE,
    "core/admission.py": (
        "tests/core/test_admission_edges.py",
        "tests/core/test_transfers.py",
        "tests/core/test_admission.py",
        "tests/core/test_scheduler.py",
        "tests/core/test_config.py",
        SWARM,
    ),
    "core/siblings.py": (
        "tests/core/test_siblings.py",
        "tests/core/test_promises.py",
        SWARM,
    ),
}
"""Module -> tests, killers first. Together they take well under the limit on unchanged code."""
RULES = (
    "core/checkpoints.py",
    "core/chunking.py",
    "core/coordinator.py",
    "core/groups/attention.py",
    "core/groups/recurrent.py",
    "core/retention.py",
)
"""What is tried by default: minutes. The other modules of the plan are larger."""

PYTEST_ARGS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow and not service")
settings.register_profile(
    "mutation",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.generate),
)
LARGEST_SHARE = 0.7
"""Of the limit, for the tests of unchanged code."""
WALL_FACTOR = 30
"""The machine may be shared: seconds of the clock per second of processor time before it counts as hung."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        outcome: "killed", "timeout", "survived" or "equivalent" (survived, with a proof in the page).
        killer: the first test that failed.
    """

    module: str
    function: str
    line: int
    operator: str
    diff: str
    outcome: str
    seconds: float
    killer: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return f"{self.module}::{self.function}", _unindented(self.diff)


def _unindented(diff: str) -> str:
    """The lines of a diff, which may move in a file, without their indentation."""
    return "\n".join(line[0] + line[1:].strip() for line in diff.splitlines() if line.strip())


def proven_equivalent(page: Path) -> set[tuple[str, str]]:
    """Keys of the survivors listed in the page: diff blocks that begin with `--- module::function`."""
    if not page.exists():
        return set()
    blocks = re.findall(r"```diff\n--- (\S+)\n(.*?)```", page.read_text(), re.S)
    return {(where, _unindented(diff)) for where, diff in blocks}


class FailFast:
    """A pytest plugin: an example that fails is enough, nobody reads a smaller one."""

    def pytest_configure(self) -> None:
        settings.load_profile("mutation")


class Runner:
    """Runs tests of a copied tree in forked children.

    Args:
        tree: the copy.
        limit_seconds: processor time a child may use.
    """

    def __init__(self, tree: Path, limit_seconds: int) -> None:
        self.tree = tree
        self.limit_seconds = limit_seconds
        self.output = tree / "output.txt"

    def run(self, tests: Sequence[str], *, writes_bytecode: bool = False) -> tuple[str, float, str]:
        """Returns (outcome, processor seconds, first failed test).

        Raises:
            RuntimeError: pytest did not run any test.
        """
        pid = os.fork()
        if pid == 0:
            self._child(tests, writes_bytecode)
        status, usage = self._wait(pid)
        seconds = usage.ru_utime + usage.ru_stime
        text = self.output.read_text(errors="replace")
        if os.WIFSIGNALED(status):
            is_late = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
            return ("timeout" if is_late else "killed"), seconds, f"signal {os.WTERMSIG(status)}"
        code = os.WEXITSTATUS(status)
        if code == 0:
            return "survived", seconds, ""
        if code not in (1, 2):
            raise RuntimeError(f"pytest ended with status {code}:\n{text[-2000:]}")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
        return "killed", seconds, failed.group(1) if failed else "while collecting"

    def _child(self, tests: Sequence[str], writes_bytecode: bool) -> None:
        code = 70
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit_seconds, self.limit_seconds + 2))
            target = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, 1)
            os.dup2(target, 2)
            os.chdir(self.tree)
            sys.path.insert(0, str(self.tree / "src"))
            sys.dont_write_bytecode = not writes_bytecode
            import milepost

            if not str(milepost.__file__).startswith(str(self.tree)):
                raise RuntimeError(f"{milepost.__file__} is not the copy")
            code = int(pytest.main([*PYTEST_ARGS, "--rootdir", str(self.tree), *tests], plugins=[FailFast()]))
        except SyntaxError:
            code = 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _wait(self, pid: int) -> tuple[int, resource.struct_rusage]:
        deadline = time.monotonic() + WALL_FACTOR * self.limit_seconds
        while True:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                return status, usage
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                _, status, usage = os.wait4(pid, 0)
                return status, usage
            time.sleep(0.01)


def copy_tree(root: Path, target: Path) -> None:
    """What the tests of the plan need."""
    skip = shutil.ignore_patterns("__pycache__", "*.so", ".*")
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=skip)
        elif source.exists():
            shutil.copy(source, target / name)


def forget_bytecode(path: Path) -> None:
    """A mutant may have size and second in common with the original, which is all bytecode is checked by."""
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink()


def diff_of(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    return "\n".join(line for line in lines if line[:2] not in ("--", "++", "@@"))


def chosen(module: str, source: str, again: set[tuple[str, str]] | None) -> Iterator[Mutant]:
    """Mutants of a module, or those of them that `again` names."""
    for mutant in mutants_of(source):
        key = (f"{module}::{mutant.function}", _unindented(diff_of(source, mutant.source)))
        if again is None or key in again:
            yield mutant


def mutate_module(
    runner: Runner, module: str, args: argparse.Namespace, proven: set[tuple[str, str]],
    again: set[tuple[str, str]] | None, console: Console,
) -> list[Verdict]:  # fmt: skip
    """Try every mutant of one module.

    Raises:
        RuntimeError: the tests fail, or take more than `LARGEST_SHARE` of the limit, without any change.
    """
    tests = PLAN[module]
    path = runner.tree / "src" / "milepost" / module
    source = path.read_text()
    mutants = list(chosen(module, source, again))
    if not mutants:
        return []
    runner.run(tests, writes_bytecode=True)
    outcome, seconds, failed = runner.run(tests)
    if outcome != "survived":
        raise RuntimeError(
            f"{module}: unchanged, {failed} fails ({outcome}):\n{runner.output.read_text()[-3000:]}"
        )
    if seconds > LARGEST_SHARE * runner.limit_seconds:
        raise RuntimeError(f"{module}: its tests take {seconds:.1f} s, too near to the limit")
    console.print(f"{module}: {len(mutants)} mutants, {seconds:.1f} s for one that survives")
    forget_bytecode(path)
    verdicts = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(module, total=len(mutants))
        for mutant in mutants:
            path.write_text(mutant.source)
            outcome, seconds, killer = runner.run(tests)
            diff = diff_of(source, mutant.source)
            verdict = Verdict(
                module, mutant.function, mutant.line, mutant.operator, diff, outcome, seconds, killer
            )
            if outcome == "survived":
                if verdict.key in proven:
                    verdict = Verdict(**{**asdict(verdict), "outcome": "equivalent"})
                else:
                    progress.console.print(
                        f"[red]survived[/] {module}::{mutant.function} ({mutant.operator})"
                    )
                    progress.console.print(diff, markup=False)
            verdicts.append(verdict)
            progress.advance(task)
    path.write_text(source)
    forget_bytecode(path)
    return verdicts


def score(outcomes: Counter[str]) -> float:
    """Share killed of those that are not equivalent."""
    killed = outcomes["killed"] + outcomes["timeout"]
    return killed / max(1, killed + outcomes["survived"])


def table_of(verdicts: Sequence[Verdict]) -> Table:
    table = Table("module", "mutants", "killed", "of these by time", "equivalent", "survived", "score")
    modules = list(dict.fromkeys(v.module for v in verdicts))
    for module in [*modules, "all"]:
        outcomes = Counter(v.outcome for v in verdicts if module in (v.module, "all"))
        numbers = (outcomes["killed"] + outcomes["timeout"], outcomes["timeout"], outcomes["equivalent"])
        table.add_row(
            module, str(outcomes.total()), *map(str, numbers), str(outcomes["survived"]),
            f"{100 * score(outcomes):.1f} %",
        )  # fmt: skip
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation testing of the core.")
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help=f"of {', '.join(PLAN)}; default: the rules"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    parser.add_argument("--limit", type=int, default=20, help="seconds of processor time per mutant")
    parser.add_argument("--nice", type=int, default=10, help="how far to stand back behind others")
    parser.add_argument("--json", type=Path, help="write every verdict here")
    parser.add_argument("--again", type=Path, help="try only what survived according to this file")
    args = parser.parse_args()
    if unknown := [module for module in args.modules if module not in PLAN]:
        parser.error(f"no tests are planned for {', '.join(unknown)}")
    again = None
    if args.again is not None:
        records = [Verdict(**record) for record in json.loads(args.again.read_text())]
        again = {record.key for record in records if record.outcome in ("survived", "equivalent")}
    os.nice(args.nice)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder goes
    console = Console()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="milepost-mutants-") as folder:
        tree = Path(folder).resolve()
        copy_tree(args.root.resolve(), tree)
        runner = Runner(tree, args.limit)
        proven = proven_equivalent(args.root / PAGE)
        for module in args.modules or RULES:
            verdicts += mutate_module(runner, module, args, proven, again, console)
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                args.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1) + "\n")
    console.print(table_of(verdicts))
    return any(v.outcome == "survived" for v in verdicts)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings would make a verdict depend on the run.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
