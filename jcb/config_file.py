"""ServeConfig from a TOML file and from `key=value` overrides, and back to TOML.

Host half. A key is a dotted path such as `scheduler.max_num_seqs`; a field name that only one section has may
stand alone. Every value is checked against the type of its field, and a bad one is a ValueError that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jcb.config import ServeConfig

_SIZES = tuple[int, ...]
_GIB = {"": 1.0, "K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}


def load(path: str | Path, base: ServeConfig | None = None) -> ServeConfig:
    """`base` (default: the defaults) with what the TOML file at `path` sets."""
    try:
        with open(path, "rb") as file:
            tree = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"config file {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config file {str(path)!r} is not TOML: {error}") from error
    try:
        return _merge(base or ServeConfig(), tree, "")
    except ValueError as error:
        raise ValueError(f"config file {str(path)!r}: {error}") from error


def loads(text: str) -> ServeConfig:
    """The configuration that TOML spells, the inverse of `dump`."""
    return _merge(ServeConfig(), tomllib.loads(text), "")


def override(config: ServeConfig, values: Mapping[str, object]) -> ServeConfig:
    """`config` with the value of each key in `values` changed; all at once, so their order does not matter."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = full_path(key).split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return _merge(config, tree, "")


def parse_settings(settings: Iterable[str]) -> dict[str, object]:
    """Values by full path from `key=value` texts, each read as the type of its field; the last one wins."""
    values: dict[str, object] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not of the form key=value, for example cache.page_size=32")
        path = full_path(key.strip())
        values[path] = _parse(path, text.strip(), fields()[path].type)
    return values


def parse_gib(text: str) -> float:
    """GiB from a size such as "2", "2G", "1.5GiB" or "512M"; a plain number is GiB."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"size {text!r} must be a number of GiB, or a number with K, M, G or T, for example 512M")
    return float(match[1]) * _GIB[match[2].upper()]


def dump(config: ServeConfig) -> str:
    """`config` as TOML that `load` reads back to the same value; fields that are None are left out as comments."""
    lines: list[str] = []
    section = ""
    for path, field in sorted(fields().items(), key=lambda item: "." in item[0]):
        prefix, _, name = path.rpartition(".")
        if prefix != section:
            section = prefix
            lines += ["", f"[{section}]"]
        value = field.get(config)
        lines.append(f"# {name} = (none)" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: object) -> str:
    """A TOML scalar; JSON's form but for infinity and the one control character that JSON leaves as it is."""
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclasses.dataclass(frozen=True)
class Field:
    """One setting: its dotted path, its type and its default."""

    path: str
    type: Any
    default: object

    def get(self, config: ServeConfig) -> object:
        """The value of this setting in `config`."""
        value: object = config
        for name in self.path.split("."):
            value = getattr(value, name)
        return value


def fields() -> dict[str, Field]:
    """Every setting by its dotted path, in the order of the dataclasses."""
    return {field.path: field for field in _walk(ServeConfig(), "")}


def full_path(key: str) -> str:
    """The dotted path that `key` means: itself, or the one path whose last part it is."""
    known = fields()
    if key in known:
        return key
    matches = [path for path in known if path.rpartition(".")[2] == key]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ValueError(f"setting {key!r} could be {' or '.join(matches)}: write the whole path")
    raise ValueError(f"unknown setting {key!r}{_suggest(key, known)}")


def _walk(config: Any, prefix: str) -> Iterator[Field]:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.")
        else:
            yield Field(prefix + field.name, hints[field.name], value)


def _merge(config: Any, tree: Mapping[str, Any], prefix: str) -> Any:
    """`config` with the values of a nested mapping; unknown names and wrong types are errors naming the path."""
    names = {field.name for field in dataclasses.fields(config)}
    hints = typing.get_type_hints(type(config))
    changed: dict[str, Any] = {}
    for name, value in tree.items():
        path = prefix + name
        if name not in names:
            raise ValueError(f"unknown setting {path!r}{_suggest(path, fields())}")
        current = getattr(config, name)
        if not dataclasses.is_dataclass(current):
            changed[name] = _check(path, value, hints[name])
        elif isinstance(value, Mapping):
            changed[name] = _merge(current, value, f"{path}.")
        else:
            raise ValueError(f"{path}={value!r} must be a section with settings of its own")
    return dataclasses.replace(config, **changed)


def _suggest(key: str, known: Iterable[str]) -> str:
    """A did-you-mean for `key`: the closest path, or failing that the closest last name or section."""
    known = list(known)
    sections = sorted({path.partition(".")[0] for path in known if "." in path})
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not close:
        by_name = {path.rpartition(".")[2]: path for path in known} | {section: section for section in sections}
        close = [by_name[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1, cutoff=0.6)]
    return f"; did you mean {close[0]!r}?" if close else f"; the sections are {', '.join(sections)}"


def _options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _expected(annotation: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}
    literal = typing.get_origin(annotation) is typing.Literal
    if annotation == _SIZES:
        return "a list of whole numbers"
    choices = typing.get_args(annotation) if literal else [words[option] for option in _options(annotation)]
    return ("one of " if literal else "") + (", " if literal else " or ").join(choices)


def _check(path: str, value: Any, annotation: Any) -> Any:
    """`value` if it is of the annotated type (whole numbers also serve as float), else a ValueError."""
    if typing.get_origin(annotation) is typing.Literal:
        if value in typing.get_args(annotation):
            return value
    elif annotation == _SIZES:
        if isinstance(value, list | tuple) and all(type(item) is int for item in value):
            return tuple(value)
    elif value is None and types.NoneType in _options(annotation):
        return None
    elif type(value) in _options(annotation) and not (isinstance(value, float) and math.isnan(value)):
        return value
    elif type(value) is int and float in _options(annotation):
        return float(value)
    raise ValueError(f"{path}={value!r} must be {_expected(annotation)}")


def _parse(path: str, text: str, annotation: Any) -> Any:
    """The value that `text` writes for a field of the annotated type."""
    options = _options(annotation)
    if typing.get_origin(annotation) is typing.Literal or options == (str,):
        return _check(path, text, annotation)
    if text.lower() in ("none", "null") and types.NoneType in options:
        return None
    if bool in options and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if annotation == _SIZES:
        words = text.removeprefix("[").removesuffix("]").replace(",", " ").split()
        return _check(path, [int(word) if word.isdecimal() else word for word in words], annotation)
    for option in (int, float):
        if option in options:
            try:
                return _check(path, option(text), annotation)
            except ValueError:
                continue
    raise ValueError(f"{path}={text!r} must be {_expected(annotation)}")
