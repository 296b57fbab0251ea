"""Run unit tests that call an agent's solution through the gateway's sandbox: `verify = "python3 -I judge.py DIR"`.

The gateway copies this file into the directory where `verify` starts, so it imports only the standard library.
The tests run in this process. The solution runs in another sandbox without the tests or the verdict, so it can only
return answers to the tests.
"""

import builtins
import json
import os
import socket
import sys
import unittest
from types import SimpleNamespace
from typing import Any

CALL = """
import importlib, json, os, sys
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
module, name, args, kwargs = json.load(sys.stdin)
sys.path.insert(0, os.getcwd())
try:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    said = found(*args, **kwargs), "", ""
except Exception as error:
    said = None, type(error).__name__, str(error)
json.dump(said, answer)
"""
"""Program that `call` runs in the sandbox. Output that the solution prints goes to standard error."""
RAISED = (
    *(ArithmeticError, AssertionError, AttributeError, FileNotFoundError, IndexError, KeyError, LookupError),
    *(NotImplementedError, OSError, OverflowError, RuntimeError, TypeError, ValueError, ZeroDivisionError),
)
"""Exceptions of the solution that `call` raises as they are."""


class Broken(BaseException):
    """Error of a solution that gave no answer; as a BaseException it does not satisfy `assertRaises(Exception)`."""


def run(argv: list[str], stdin: str = "", seconds: float = 10.0) -> Any:
    """Run a program in the solution's sandbox; return an object with its status, code, out, err and seconds."""
    with socket.socket(socket.AF_UNIX) as service:
        service.connect(os.environ["SLIPSTREAM_SOLUTION"])
        service.sendall(json.dumps({"argv": argv, "stdin": stdin, "seconds": seconds}).encode())
        service.shutdown(socket.SHUT_WR)
        return SimpleNamespace(**json.load(service.makefile()))


def call(function: str, *args: Any, **kwargs: Any) -> Any:
    """Call "module:function" of the solution in a new process. Arguments and result are copied as JSON.

    An exception in `RAISED` is raised again here, and any other exception as a RuntimeError with its name.
    """
    module, _, name = function.partition(":")
    ran = run(["python3", "-I", "-c", CALL], json.dumps([module, name, args, kwargs]))
    try:
        returned, raised, message = json.loads(ran.out)
        kind = getattr(builtins, raised, RuntimeError)
    except (ValueError, TypeError, RecursionError):
        raise Broken(f"{function} gave no answer ({ran.status}): {ran.err[-500:]}") from None
    if not raised:
        return returned
    raise kind(message) if kind in RAISED else RuntimeError(f"{raised}: {message}")


def main(directory: str) -> None:
    """Run the tests and write the reward: 1 if at least one test ran and none failed, else 0."""
    sys.modules["judge"] = sys.modules["__main__"]  # tests import `call` and `run` from judge
    loader = unittest.TestLoader()
    tests = loader.discover(directory)
    if loader.errors or not tests.countTestCases():
        sys.exit("\n".join([*map(str, loader.errors), f"{directory}: no tests were found, or they cannot be loaded"]))
    result = unittest.TextTestRunner().run(tests)
    skipped = sum(not hasattr(test, "test_case") for test, _ in result.skipped)  # whole tests, no parts (subTest)
    with open(os.environ["SLIPSTREAM_VERDICT"], "w") as file:  # noqa: PTH123 (a file by itself)
        json.dump(float(result.wasSuccessful() and result.testsRun > skipped), file)


if __name__ == "__main__":
    main(sys.argv[1])
