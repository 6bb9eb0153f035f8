"""Runs the model step by step: as much of Promela as `protocol.pml` is written in.

Each alternative of a process's loop is one step, as in the model. A step's label is what it prints; a step that prints
nothing has none.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.servers import programs

State = tuple[int, ...]
_TOKENS: Final = re.compile(r'"[^"]*"|\w+|::|->|&&|\|\||==|!=|<=|>=|<<|>>|[-+*/%&|^~!<>=(){}\[\];:,]')
_TYPES: Final = {"bool", "bit", "byte", "mtype"}
_BINARY: Final = [["||"], ["&&"], ["|"], ["^"], ["&"], ["==", "!="], ["<", ">", "<=", ">="], ["<<", ">>"], ["+", "-"]]
_PYTHON: Final = {"||": "or", "&&": "and"}


class Token(NamedTuple):
    """A word of the model, and its line."""

    text: str
    line: int


class Outcome(NamedTuple):
    """One way in which a step ends.

    Attributes:
        state: the state after it.
        label: what it printed; empty if nothing.
        lines: the lines of the alternatives that were taken.
    """

    state: State
    label: str
    lines: frozenset[int]


Statement = tuple[Any, ...]


@dataclass
class Model:
    """The model as preprocessed with some flags.

    Attributes:
        start: the first state.
        processes: the alternatives of each process, by its name.
    """

    text: str
    _slots: dict[str, int] = field(default_factory=dict)
    _values: list[int] = field(default_factory=list)
    _names: dict[str, int] = field(default_factory=dict)
    _inlines: dict[str, tuple[list[str], list[Token]]] = field(default_factory=dict)
    processes: dict[str, Statement] = field(default_factory=dict)
    _known: dict[State, list[tuple[str, Outcome]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = _tokens(self.text)
        bodies: dict[str, tuple[list[Token], list[Token]]] = {}
        at = 0
        while at < len(tokens):
            word = tokens[at].text
            if word == "inline":
                name, (given, at) = tokens[at + 1].text, _bracketed(tokens, at + 2)
                body, at = _bracketed(tokens, at)
                self._inlines[name] = ([each.text for each in given if each.text != ","], body)
            elif word == "proctype":
                name, (given, at) = tokens[at + 1].text, _bracketed(tokens, at + 2)
                body, at = _bracketed(tokens, at)
                bodies[name] = (given, body)
            elif word in {"ltl", "init"}:
                while tokens[at].text != "{":
                    at += 1
                _, at = _bracketed(tokens, at)
            elif word == "mtype" and tokens[at + 1].text == "=":
                values, at = _bracketed(tokens, at + 2)
                for each in values:
                    if each.text != ",":
                        self._names[each.text] = len(self._names)
            elif word in _TYPES:
                at = self._declare(tokens, at, "")
            else:
                at += 1
        for name, (given, body) in bodies.items():
            for number in range(2 if given else 1):
                instance = f"{name}{number}" if given else name
                if given:
                    self._add(f"{instance}.{given[1].text}", [number])
                at = 0
                while body[at].text in _TYPES:
                    at = self._declare(body, at, f"{instance}.")
                self.processes[instance] = _Parser(self, f"{instance}.", body[at:]).sequence()
        self.start: State = tuple(self._values)

    def _declare(self, tokens: Sequence[Token], at: int, scope: str) -> int:
        while tokens[at].text != ";":
            name, size, value, at = tokens[at + 1].text, 1, 0, at + 2
            if tokens[at].text == "[":
                size, at = int(tokens[at + 1].text), at + 3
            if tokens[at].text == "=":
                value, at = self._constant(tokens[at + 1].text), at + 2
            self._add(scope + name, [value] * size)
        return at + 1

    def _constant(self, word: str) -> int:
        if word in {"true", "false"}:
            return int(word == "true")
        return int(word) if word.isdigit() else self._names[word]

    def _add(self, name: str, values: Sequence[int]) -> None:
        self._slots[name] = len(self._values)
        self._values += values

    def slot(self, name: str, scope: str) -> int | None:
        """Where a variable is."""
        return self._slots.get(scope + name, self._slots.get(name))

    def inline(self, name: str) -> tuple[list[str], list[Token]] | None:
        """The parameters and the body of a step."""
        return self._inlines.get(name)

    def constant(self, name: str) -> int:
        """A name's value."""
        return self._constant(name)

    def value(self, state: State, name: str, index: int = 0) -> int:
        """A variable's value."""
        return state[self._slots[name] + index]

    def named(self, state: State, name: str, index: int = 0) -> str:
        """The name of a variable's value."""
        return next(word for word, value in self._names.items() if value == self.value(state, name, index))

    def with_value(self, state: State, name: str, value: int) -> State:
        """A state in which one variable is another."""
        slot = self._slots[name]
        return (*state[:slot], value, *state[slot + 1 :])

    def steps(self, state: State) -> list[tuple[str, Outcome]]:
        """Everything that can happen next: who does it, and how it ends."""
        found = self._known.get(state)
        if found is None:
            found = self._known[state] = [
                (name, Outcome(tuple(after), label, lines))
                for name, loop in self.processes.items()
                for after, label, lines in _run(loop, list(state))
            ]
        return found


def load(file: Path, flags: Sequence[str] = ()) -> Model:
    """The model, preprocessed as spin does it."""
    command = [programs.path("cc"), "-E", "-x", "c", "-w", *(f"-D{flag}" for flag in flags), str(file)]
    return Model(subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout)


def _tokens(text: str) -> list[Token]:
    found, number = [], 0
    for line in text.splitlines():
        if mark := re.match(r"# (\d+) ", line):
            number = int(mark[1])
            continue
        found += [Token(word, number) for word in _TOKENS.findall(line)]
        number += 1
    return found


def _bracketed(tokens: Sequence[Token], at: int) -> tuple[list[Token], int]:
    """What stands in the brackets that open here, and where it goes on behind them."""
    depth, begun = 0, at
    while True:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(tokens[at].text, 0)
        at += 1
        if depth == 0:
            return list(tokens[begun + 1 : at - 1]), at


class _Parser:
    def __init__(self, model: Model, scope: str, tokens: Sequence[Token]) -> None:
        self._model, self._scope, self._tokens, self._at = model, scope, tokens, 0

    def _next(self, ahead: int = 0) -> str:
        place = self._at + ahead
        return self._tokens[place].text if place < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        word = self._next()
        assert not expected or word in expected, (word, expected, self._tokens[self._at : self._at + 5])
        self._at += 1
        return word

    def sequence(self) -> Statement:
        parts: list[Statement] = []
        while self._next() not in {"", "::", "fi", "od"}:
            if self._next() in {";", "->"}:
                self._take()
            elif self._next(1) == ":":  # a name of the place
                self._at += 2
            else:
                parts.append(self._statement())
        return ("all", tuple(parts))

    def _statement(self) -> Statement:
        word = self._next()
        if word in {"if", "do"}:
            return self._choice()
        if word == "atomic":
            self._take()
            body, self._at = _bracketed(self._tokens, self._at)
            return self._inner(body)
        if word in {"printf", "assert"}:
            self._take()
            body, self._at = _bracketed(self._tokens, self._at)
            if word == "assert":
                return ("all", ())
            inner = _Parser(self._model, self._scope, body[2:])
            return ("print", body[0].text[1:-1], tuple(inner.arguments()))
        if word == "else":
            self._take()
            return ("else",)
        step = self._model.inline(word) if self._next(1) == "(" else None
        if step is not None:
            self._take()
            body, self._at = _bracketed(self._tokens, self._at)
            given = dict(zip(step[0], _split(body), strict=True))
            return self._inner([new for token in step[1] for new in given.get(token.text, [token])])
        begun = self._at
        source = self._expression()
        if self._next() == "=":
            self._take()
            target = re.fullmatch(r"s\[(.*)\]", source)
            assert target is not None, self._tokens[begun]
            return ("set", _compiled(target[1]), _compiled(self._expression()))
        return ("when", _compiled(source))

    def arguments(self) -> Iterator[Callable[[Sequence[int]], int]]:
        """Expressions between commas."""
        while self._next():
            yield _compiled(self._expression())
            if self._next() == ",":
                self._take()

    def _inner(self, tokens: Sequence[Token]) -> Statement:
        parser = _Parser(self._model, self._scope, tokens)
        found = parser.sequence()
        assert not parser._next(), parser._next()
        return found

    def _choice(self) -> Statement:
        self._take("if", "do")
        options = []
        while self._next() == "::":
            line = self._tokens[self._at].line
            self._take("::")
            options.append((line, self.sequence()))
        self._take("fi", "od")
        return ("one", tuple(options))

    def _expression(self, level: int = 0) -> str:
        if level == len(_BINARY):
            return self._unary()
        left = self._expression(level + 1)
        while self._next() in _BINARY[level]:
            word = self._take()
            left = f"({left} {_PYTHON.get(word, word)} {self._expression(level + 1)})"
        return left

    def _unary(self) -> str:
        word = self._take()
        if word in {"!", "~", "-"}:
            return f"({'not ' if word == '!' else word}{self._unary()})"
        if word == "(":
            inner = self._expression()
            if self._next() == "->":
                self._take()
                yes = self._expression()
                self._take(":")
                inner = f"({yes} if {inner} else {self._expression()})"
            self._take(")")
            return f"({inner})" if not inner.startswith("s[") else inner
        slot = self._model.slot(word, self._scope)
        if slot is None:
            return str(self._model.constant(word))
        if self._next() != "[":
            return f"s[{slot}]"
        self._take("[")
        index = self._expression()
        self._take("]")
        return f"s[{slot}+{index}]"


def _split(tokens: Sequence[Token]) -> list[list[Token]]:
    """What stands between commas outside of brackets."""
    parts: list[list[Token]] = [[]] if tokens else []
    depth = 0
    for token in tokens:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.text, 0)
        if token.text == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _compiled(source: str) -> Callable[[Sequence[int]], int]:
    made: Callable[[Sequence[int]], int] = eval(f"lambda s: {source}")
    return made


def _run(statement: Statement, state: list[int]) -> Iterator[tuple[list[int], str, frozenset[int]]]:
    """All ways through a statement; none if it has to wait."""
    match statement:
        case ("set", target, value):
            after = list(state)
            after[target(state)] = int(value(state))
            yield after, "", frozenset()
        case ("when", condition):
            if condition(state):
                yield state, "", frozenset()
        case ("else",):
            yield state, "", frozenset()
        case ("print", text, arguments):
            yield state, text.replace("\\n", "") % tuple(each(state) for each in arguments), frozenset()
        case ("one", options):
            open_ = [(line, body) for line, body in options if not _is_else(body)]
            chosen = [each for each in open_ if _may_begin(each[1], state)]
            for line, body in chosen or [each for each in options if _is_else(each[1])]:
                for after, label, lines in _run(body, state):
                    yield after, label, lines | {line}
        case ("all", parts):
            yield from _in_turn(parts, state)


def _in_turn(parts: Sequence[Statement], state: list[int]) -> Iterator[tuple[list[int], str, frozenset[int]]]:
    if not parts:
        yield state, "", frozenset()
        return
    for between, label, lines in _run(parts[0], state):
        for after, more, further in _in_turn(parts[1:], between):
            yield after, "; ".join(filter(None, (label, more))), lines | further


def _is_else(body: Statement) -> bool:
    return body[0] == "all" and bool(body[1]) and body[1][0] == ("else",)


def _may_begin(body: Statement, state: list[int]) -> bool:
    if body[0] == "when":
        return bool(body[1](state))
    if body[0] == "one":
        return any(_may_begin(each, state) or _is_else(each) for _, each in body[1])
    return body[0] != "all" or not body[1] or _may_begin(body[1][0], state)
