"""The examples in the docstrings of the package run and print what they say."""

import doctest
import importlib
import pathlib

import pytest

import tfscale

PACKAGE = pathlib.Path(tfscale.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text()
]


def test_there_are_modules_with_examples():
    assert {"tfscale", "tfscale.policies", "tfscale.callbacks.monitor"} <= set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name):
    tests = doctest.DocTestFinder().find(importlib.import_module(name))
    runner, report = doctest.DocTestRunner(), []
    for test in tests:
        runner.run(test, out=report.append)
    assert runner.tries > 0
    assert not runner.failures, "".join(report)
