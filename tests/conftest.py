"""Common test settings: one thread, fixed examples, and no silent skip where everything is required.

Test modules are imported by path (`--import-mode=importlib`) with the repository root on sys.path,
so a shared helper is imported as `from tests.core.helpers import ...`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# torch reads these when it is loaded; setting them here spares tests/core the import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("fixed", derandomize=True, **_COMMON)
settings.register_profile("explore", derandomize=False, **_COMMON)
settings.load_profile(os.environ.get("MILEPOST_HYPOTHESIS_PROFILE", "fixed"))

REQUIRE_ALL = os.environ.get("MILEPOST_REQUIRE", "") == "all"
"""A skipped `oracle` or `service` test, or a whole module that skips itself, is then a failure."""


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Small checkpoints of every model family, made once: `tests.support.families.Shelf`."""
    from tests.support.families import Shelf  # torch is loaded only by tests that need it

    return Shelf(tmp_path_factory.mktemp("families"))


def pytest_collection_finish() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _fail_instead_of_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    report.outcome = "failed"
    report.longrepr = f"MILEPOST_REQUIRE=all: {report.nodeid} was skipped: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    required = any(item.iter_markers("oracle")) or any(item.iter_markers("service"))
    if REQUIRE_ALL and required and report.skipped and not hasattr(report, "wasxfail"):
        _fail_instead_of_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if REQUIRE_ALL and report.skipped:
        _fail_instead_of_skip(report)
    return report
