"""YAML with the line of every key, refusing whatever could be read in two ways.

PyYAML follows YAML 1.1: `1e-4` is text there, `on` is True, `010` is 8, and of two equal keys the
last wins silently. So only its parser's events are used here; values are made from them by YAML
1.2's core schema, and each key's place is kept for the messages. Problems are collected, not
raised, since a user wants to see all of them at once.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

Path = tuple[str | int, ...]

_MAX_DEPTH = 32  # far above any real config, far below Python's recursion limit
_SETS = 10**9  # a `--set` sorts after every line of the file

_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {w: w in ("true", "True", "TRUE") for w in "true True TRUE false False FALSE".split()}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TWO_READINGS = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9]+_[0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?")


class Place(NamedTuple):
    """Where a key was given: sorts by `order`, and `text` begins the message."""

    order: int
    text: str  # `configs/digits.yaml:7` or `--set cluster.workers=x`
    names: Path = ()  # the key that `text` itself shows, not to be told twice


@dataclass
class Document:
    """What a file and the `--set`s applied to it say.

    Attributes:
      values: the plain values: dict, list, str, int, float, bool, None.
      places: where each key was given; () is the file as a whole.
      problems: (order, message) of what was refused so far.
      broken: the keys refused; where no value could be made, they hold a stand-in.
      complete: False if the text could not be read to its end; keys may then be missing.
    """

    values: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[tuple[int, str]] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)
    complete: bool = True

    def refuse(self, path: Path, message: str, place: Place | None = None) -> None:
        """Adds a problem with the key `path`, told where it or what holds it was given."""
        above = path
        while place is None:
            place, above = self.places.get(above), above[:-1]
        key = "" if path == place.names else ".".join(map(str, path)) + ": "
        self.problems.append((place.order, f"{place.text}: {key}{message}"))
        self.broken.add(path)

    def apply_set(self, item: str) -> None:
        """Applies `--set key.path=value`; the value is YAML and replaces what was there."""
        key, equals, text = item.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        place = Place(self._next_order(), f"--set {item}", path)
        if not equals or not all(path):
            self.refuse((), "write it as --set key.path=value", place._replace(names=()))
            return
        self._put(place, _Builder(text, lambda _: place, path).build())

    def apply_flag(self, flag: str, key: str, value: str) -> None:
        """Gives a top-level key the text that a command-line flag has."""
        self._put(Place(self._next_order(), f"{flag} {value}", (key,)), Document(value))

    def was_set(self, path: Path) -> bool:
        """Whether a `--set` or a flag gave that key."""
        return path in self.places and self.places[path].order >= _SETS

    def drop_from_file(self, path: Path) -> None:
        """Forgets a top-level key, unless a `--set` or a flag gave it."""
        if path in self.places and not self.was_set(path):
            del self.places[path], self.values[path[0]]
            self.broken.discard(path)

    def _next_order(self) -> int:
        return max(_SETS, *(place.order + 1 for place in self.places.values()))

    def _put(self, place: Place, given: Document) -> None:
        path = place.names
        self.problems += given.problems
        if path in self.places and self.places[path].order >= _SETS:
            self.refuse(path, f"given twice, also by {self.places[path].text}; keep one", place)
            return
        node = self.values
        for depth, part in enumerate(path[:-1], 1):
            node = node.setdefault(part, {})
            self.places.setdefault(path[:depth], place)
            if not isinstance(node, dict):
                self.refuse(path[:depth], f"{show(node)} has no keys below it", place)
                return
        node[path[-1]] = given.values
        self.broken = {p for p in self.broken if p[: len(path)] != path} | given.broken
        kept = {p: at for p, at in self.places.items() if p[: len(path)] != path}
        self.places = kept | given.places | {path: place}


def read_document(text: str, name: str) -> Document:
    """Reads a file's text, which must be one mapping; a BOM and CRLF are taken.

    Args:
      text: the file's content.
      name: the file's name as the messages should show it.
    """
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    document = _Builder(text, lambda line: Place(line, f"{name}:{line}"), ()).build()
    document.places[()] = Place(0, name)
    if not isinstance(document.values, dict):
        if not document.problems:
            empty = document.values is None
            what = "the file is empty" if empty else f"the top level is {show(document.values)}"
            document.refuse((), f"{what}; write key: value lines", Place(1, f"{name}:1"))
        document.values, document.complete = {}, False
    return document


class _Builder:
    """Makes one Document of one YAML text. All paths start with `base`."""

    def __init__(self, text: str, place: Callable[[int], Place], base: Path):
        self.text, self.place, self.base = text, place, base
        self.events = yaml.parse(text, Loader=yaml.SafeLoader)
        self.document = Document()

    def build(self) -> Document:
        try:
            next(self.events)  # the stream's start
            if isinstance(next(self.events), yaml.DocumentStartEvent):
                self.document.values = self._value(next(self.events), self.base)
                next(self.events)  # the document's end
                if isinstance(second := next(self.events), yaml.DocumentStartEvent):
                    self._refuse(second, self.base, "a second document starts here; keep one")
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            self._stop(line, f"the character U+{error.character:04X} is not text; remove it")
        except yaml.MarkedYAMLError as error:
            self._stop_at(error)
        return self.document

    def _stop(self, line: int, message: str) -> None:
        self.document.refuse(self.base, message, self.place(line))
        self.document.complete = False

    def _stop_at(self, error: yaml.MarkedYAMLError) -> None:
        line = error.problem_mark.line + 1
        tabs = [n for n, row in enumerate(self.text.split("\n"), 1) if re.match(r" *\t", row)]
        if line in tabs or "'\\t'" in error.problem:
            for tab in sorted({*tabs, line}):
                self._stop(tab, "a tab is not taken here; use spaces")
            return
        begun = error.context_mark and error.context_mark.line + 1
        if begun and error.problem == "could not find expected ':'":
            line = begun  # PyYAML stops at the next line's colon, but this one lacks it
        context = f" ({error.context} of line {begun})" if begun and begun != line else ""
        self._stop(line, f"cannot be read as YAML: {error.problem}{context}")

    def _refuse(self, event: yaml.Event, path: Path, message: str) -> None:
        self.document.refuse(path, message, self.place(event.start_mark.line + 1))

    def _value(self, event: yaml.Event, path: Path) -> Any:
        if len(path) > _MAX_DEPTH:
            problem = f"nested more than {_MAX_DEPTH} deep"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            self._refuse(event, path, f"*{event.anchor} is an alias; write the value out")
            return None
        if event.anchor is not None:
            self._refuse(event, path, f"&{event.anchor} is an anchor; leave it out")
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, path, f"{tag} is a tag; write a plain value")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        return self._scalar(event, path)

    def _mapping(self, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key = self._key(event, path)
            here = (*path, "?" if key is None else key)
            if key in values:
                first = self.document.places[here].text
                self._refuse(event, here, f"given twice, first at {first}; keep one")
            self.document.places.setdefault(here, self.place(event.start_mark.line + 1))
            value = self._value(next(self.events), here)
            if key is not None:
                values.setdefault(key, value)
        return values

    def _key(self, event: yaml.Event, path: Path) -> str | None:
        """The key, or None where it was refused."""
        here = (*path, getattr(event, "value", "?"))
        key = self._value(event, here)
        if isinstance(event, yaml.ScalarEvent) and event.style is None and event.value == "<<":
            self._refuse(event, here, "a merge key is not taken; write its keys out")
            return None
        if not isinstance(key, str) and not isinstance(event, yaml.AliasEvent):
            self._refuse(event, here, "a key is a word; a number or the like needs quotes")
        return key if isinstance(key, str) else None

    def _sequence(self, path: Path) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            values.append(self._value(event, (*path, len(values))))
        return values

    def _scalar(self, event: yaml.ScalarEvent, path: Path) -> Any:
        try:
            # With a style it is quoted, or a block of text.
            return resolve(event.value) if event.style is None else event.value
        except ValueError as error:
            self._refuse(event, path, str(error))
            return event.value


def resolve(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar by YAML 1.2's core schema.

    Raises:
      ValueError: YAML 1.1 and 1.2 read the number differently, or it is too large.
    """
    if text in _NULLS or text in _BOOLS:
        return _BOOLS.get(text)
    if len(text) > 1000 and _INTEGER.fullmatch(text):
        raise ValueError("a number of more than 1000 digits; write a smaller one")
    if _INTEGER.fullmatch(text):
        return int(text, 0)
    if _TWO_READINGS.fullmatch(text):
        plain = re.sub(r"^([-+]?)0+(?=\d)", r"\1", text.replace("_", ""))
        why = "has a leading zero or an underscore, which YAML 1.1 and 1.2 read differently"
        raise ValueError(f"{text} {why}; write {plain}, or '{text}' for text")
    if not _FLOAT.fullmatch(text) and not _SPECIAL.fullmatch(text):
        return text
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(value) and not _SPECIAL.fullmatch(text):
        raise ValueError(f"{text} is too large for a float; write .inf if that is meant")
    return value


def is_text(text: str) -> bool:
    """Whether `text` is read as itself when it has no quotes."""
    try:
        return isinstance(resolve(text), str)
    except ValueError:
        return False


def show(value: Any) -> str:
    """A value as a message shows it: short, in YAML's spelling, text in quotes."""
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return "null" if value is None else text if len(text) <= 80 else text[:77] + "..."


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # anchors are refused on reading

    def represent_text(self, value: str) -> yaml.ScalarNode:
        # PyYAML quotes what YAML 1.1 takes for a number; `1e-4` and `08` it leaves bare, and a
        # U+0085 in single quotes it folds into a space.
        style = '"' if not value.isprintable() else None if is_text(value) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _Dumper.represent_text)


def dump_yaml(values: dict[str, Any]) -> str:
    """YAML text that `read_document` reads back as equal values; keys stay in their order."""
    width = sys.maxsize  # no folding of long text
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width)
