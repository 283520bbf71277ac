# SPDX-License-Identifier: Apache-2.0
"""Filters of lists, as far as clients need them: comparisons with `=` and `!=`, and with `eq` and `ne`, which take a regular expression,
in parentheses or not, joined by AND, OR or nothing. Everything else is refused."""

import re

from core.messages import Refusal

TOKEN = re.compile(r"""\s*(?:(?P<mark>\(|\)|!=|=)|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[^\s()=!"']+))""")


def _tokens(text):
    position, tokens = 0, []
    while text[position:].strip():
        found = TOKEN.match(text, position)
        if not found:
            raise ValueError(text[position:])
        position = found.end()
        if found["mark"] or found["word"]:
            tokens.append(("mark" if found["mark"] else "word", found["mark"] or found["word"]))
        else:
            tokens.append(("text", found["double"] if found["double"] is not None else found["single"]))
    return tokens


class _Parser:
    def __init__(self, tokens, fields):
        self.tokens, self.fields, self.styles = tokens, fields, set()

    def take(self, *wanted):
        if self.tokens and self.tokens[0] in wanted:
            return self.tokens.pop(0)
        return None

    def either(self):
        tests = [self.both()]
        while self.take(("word", "OR")):
            tests.append(self.both())
        return lambda item: any(test(item) for test in tests)

    def both(self):
        tests = [self.one()]
        while self.take(("word", "AND")) or (self.tokens and self.tokens[0] not in (("mark", ")"), ("word", "OR"))):
            tests.append(self.one())
        return lambda item: all(test(item) for test in tests)

    def one(self):
        if self.take(("mark", "(")):
            test = self.either()
            if not self.take(("mark", ")")):
                raise ValueError("a parenthesis is open")
            return test
        (kind, field), (_, operator), (value_kind, value) = (self.tokens.pop(0) for _ in range(3))
        if kind != "word" or value_kind == "mark" or field.split(".")[0] not in self.fields:
            raise ValueError(field)
        wanted = operator in ("=", "eq")
        if operator in ("=", "!="):
            self.styles.add("comparison")
            return lambda item: (_text(item, field) == value) == wanted
        if operator in ("eq", "ne"):
            self.styles.add("expression")
            pattern = re.compile(value)
            return lambda item: bool(pattern.fullmatch(_text(item, field))) == wanted
        raise ValueError(operator)


def _text(item, path):
    for name in path.split("."):
        item = item.get(name) if isinstance(item, dict) else None
    if isinstance(item, bool):
        return str(item).lower()
    return "" if item is None else str(item)


def compile_filter(text, fields):
    """A function that says whether an item passes. `fields` are those that an item can have."""
    if not text:
        return lambda item: True
    try:
        parser = _Parser(_tokens(text), fields)
        test = parser.either()
        if parser.tokens or len(parser.styles) > 1:
            raise ValueError(text)
    except (ValueError, IndexError, re.error):
        raise Refusal(400, "invalid", f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.") from None
    return test
