"""The two confined processes: one runs a program and answers calls of its functions, the other judges it by its test.

The judge is out of the program's reach: what it gets are values, so that nothing but right ones pass the test.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, final

from .confine import confine
from .wire import decode, encode, receive, send


def main() -> None:
    """Be the process that the first argument says: `program` or `judge`."""
    # What was put there to import this package; a program has the standard library and what is installed.
    del sys.path[0]
    sys.set_int_max_str_digits(0)
    {"program": _program, "judge": _judge}[sys.argv[1]]()
    # Nothing that a program or a test has registered for the end is run.
    os._exit(0)


def _take_streams() -> tuple[int, int]:
    """Where messages come from and go to, which are the standard streams no longer."""
    incoming, outgoing = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", buffering=0) as nothing:
        for stream in (0, 1):
            os.dup2(nothing.fileno(), stream)
    return incoming, outgoing


def _program() -> None:
    requests, answers = _take_streams()
    job = receive(requests)
    send(answers, confine(job["limits"]))
    kept: list[Any] = []

    def keep(function: Any) -> int:
        kept.append(function)
        return len(kept) - 1

    def answer(make: Callable[[], Any]) -> None:
        try:
            message = {"value": encode(make(), keep)}
        except BaseException as error:
            message = {"error": type(error).__name__, "text": _text(error)}
        send(answers, message)

    scope: dict[str, Any] = {}
    code = job["program"]
    # As code_eval does: without what this file imports from __future__, and not as a main program.
    answer(lambda: exec(compile(code, "<program>", "exec", dont_inherit=True), scope))
    for request in iter(lambda: receive(requests), None):
        if "name" in request:
            answer(lambda request=request: scope[request["name"]])
        else:
            arguments, options = (decode(request[key], kept.__getitem__) for key in ("arguments", "options"))
            answer(lambda request=request, a=arguments, o=options: kept[request["function"]](*a, **o))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:200]
    except BaseException:
        return ""


@final
class Program:
    """The program as its judge has it: functions to call, which give plain data."""

    def __init__(self, answers: int, requests: int):
        self.answers, self.requests = answers, requests

    def ask(self, request: dict[str, Any]) -> Any:
        """The value of a request; what it raised is raised here if it is an exception that Python has."""
        send(self.requests, request)
        return self.listen()

    def listen(self) -> Any:
        answer = receive(self.answers)
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), None)
            text = f"{answer['error']}: {answer['text']}"
            # A StopIteration would end the loop of a test before its last problem.
            if kind is StopIteration or not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise RuntimeError(text)
            raise _make(kind, text)
        return decode(answer["value"], self.function)

    def function(self, number: int) -> Callable[..., Any]:
        """What stands for a function of the program."""

        def call(*arguments: Any, **options: Any) -> Any:
            message = {"function": number, "arguments": encode(list(arguments), _refuse)}
            return self.ask({**message, "options": encode(options, _refuse)})

        return call


def _make(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:
        # Some, such as UnicodeDecodeError, want more than a text.
        return RuntimeError(text)


def _refuse(function: Any) -> int:
    raise TypeError("a test cannot hand its own functions to the program it judges")


def _judge() -> None:
    incoming, verdicts = _take_streams()
    job = receive(incoming)
    program = Program(*job["descriptors"])
    isolation = confine(job["limits"])
    send(program.requests, {"limits": job["limits"], "program": job["program"]})
    theirs = receive(program.answers)
    # The program's clock starts here.
    _say(verdicts, [name for name in isolation if name in theirs])
    try:
        program.listen()
        exec(compile(job["test"], "<test>", "exec", dont_inherit=True), _scope(program, job["program"], job["test"]))
        reason = ""
    except BaseException as error:
        reason = f"{type(error).__name__}: {_text(error)}".rstrip(": ")
    _say(verdicts, reason)


def _say(descriptor: int, verdict: Any) -> None:
    os.write(descriptor, json.dumps(verdict).encode() + b"\n")


def _scope(program: Program, source: str, test: str) -> dict[str, Any]:
    """What a test finds: the names it uses of those that the program has; modules and their parts it imports itself."""
    used = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    names = [name for name in used if not name.startswith("__")]
    scope: dict[str, Any] = {"__builtins__": builtins}
    own = [name for name in names if not hasattr(builtins, name)]
    for name in own:
        _add(scope, name, program, source)
    if len(scope) == 1:
        # What is tested may have the name of a builtin, as `sum`; else a program could replace what it is tested with.
        for name in set(names) - set(own):
            _add(scope, name, program, source)
    return scope


def _add(scope: dict[str, Any], name: str, program: Program, source: str) -> None:
    statement = _import_of(name, source)
    # What the program has not, or cannot hand over, the test finds missing.
    with contextlib.suppress(KeyError, RuntimeError, TypeError, ImportError):
        if statement is not None:
            found: dict[str, Any] = {}
            exec(compile(ast.Module([statement], []), "<imports>", "exec"), found)
            # A function is called where the program is, since it may give what equals everything.
            if isinstance(found[name], ModuleType) or type(found[name]).__module__ == "typing":
                scope[name] = found[name]
                return
        scope[name] = program.ask({"name": name})


def _import_of(name: str, source: str) -> ast.stmt | None:
    """The statement by which a program imports a name that it does not define anew."""
    found: ast.stmt | None = None
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    found = statement
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
            found = None
    return found
