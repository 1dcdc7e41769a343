"""The answer's program in the sandbox: it is loaded, and does what its judge requests. No expected value is here.

``stdin`` is ``{"program": text, "requests": [[function, arguments, keywords], ...]}``. Printed is a line when the
program is loaded and one for each request: what came of it, and its arguments as they are now; or that it raised. The
program can forge all of it: that is as good as returning other values.
"""

import base64
import json
import marshal
import os
import sys
import types
from typing import Any, NoReturn

from flotilla.services.reward.verifiers.assertions.plain_data import Wire, named, pack, unpack, write_line


class Answer:
    """The answer's program, and the values that have come of requests."""

    def __init__(self) -> None:
        self._module = types.ModuleType("__main__")
        self._values: list[list[Any]] = []

    def load(self, program: str) -> None:
        """Run the program as a script is run."""
        sys.modules["__main__"] = self._module
        exec(compile(program, "answer.py", "exec", dont_inherit=True), self._module.__dict__)  # noqa: S102  the point

    def reply(self, request: Wire) -> Wire:
        """Carry out a request."""
        values: list[Any] = []
        self._values.append(values)
        number = len(self._values) - 1

        def refer(value: Any) -> Wire:
            for part, known in enumerate(values):
                if known is value:
                    return ["ref", number, part]
            values.append(value)
            return ["ref", number, len(values) - 1]

        try:
            function = unpack(request[0], self._resolve)
            args = [unpack(each, self._resolve) for each in request[1]]
            kwargs = {name: unpack(each, self._resolve) for name, each in request[2].items()}
            values.append(function(*args, **kwargs))
            return [pack(values[0], refer), [pack(each, refer) for each in args]]
        except Exception as error:  # whatever it is, it is what the answer does
            return ["raises", type(error).__name__, str(error)[:1000]]

    def _resolve(self, wire: list[Any]) -> Any:
        kind, *content = wire
        if kind == "value":
            return lambda value: value
        if kind == "global":
            space = self._module.__dict__
            if content[0] not in space:
                raise NameError(f"name {content[0]!r} is not defined")
            return space[content[0]]
        if kind == "ref":
            return self._values[content[0]][content[1]]
        if kind == "name":
            return named(content[0], content[1])
        if kind == "code":
            code = marshal.loads(base64.b64decode(content[0]))  # noqa: S302  the judge's, which trusts nothing here
            defaults = tuple(unpack(each, self._resolve) for each in content[1])
            return types.FunctionType(code, self._module.__dict__, None, defaults)
        raise ValueError(kind)


def be_the_answer(given: dict[str, Any]) -> NoReturn:
    """Load the program and print a line when that is done, and one per reply."""
    out = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    answer = Answer()
    answer.load(given["program"])
    write_line(out, True)
    for request in given["requests"]:
        write_line(out, answer.reply(request))
    os._exit(0)


if __name__ == "__main__":
    be_the_answer(json.loads(sys.stdin.buffer.read()))
