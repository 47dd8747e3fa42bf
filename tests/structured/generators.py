"""Random JSON schemas and regular expressions whose answers are short, and checks of answers by other libraries."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema

WORDS = ("a", "id", "name", "größe", "x y", "tags", "n-1", "kind", "Æ", 'quoted"key')


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of `depth` levels at most, with every bound that keeps an answer short."""
    makers = [_string, _integer, _number, _enum, _plain]
    if depth > 0:
        makers += [_object, _object, _array, _any_of]
    return rng.choice(makers)(rng, depth - 1)


def random_object_schema(rng: random.Random) -> dict[str, Any]:
    """An object, as most callers ask for; parts of it are sometimes referred to by $ref."""
    schema = _object(rng, 2)
    if rng.random() < 0.3 and schema["properties"]:
        name, part = rng.choice(sorted(schema["properties"].items()))
        schema["properties"][name] = {"$ref": "#/$defs/part"}
        schema["$defs"] = {"part": part}
    return schema


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    kinds = (
        {"maxLength": rng.randrange(1, 8)},
        {"minLength": low, "maxLength": low + rng.randrange(6)},
        {"pattern": f"^{random_bounded_regex(rng, 1)}$"},
        {"format": rng.choice(["ipv4", "uuid"])},
    )
    return {"type": "string"} | rng.choice(kinds)


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(-1000, 1000)
    kinds = (
        {"minimum": low, "maximum": low + rng.randrange(500)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + rng.randrange(50)},
        {"minimum": low},
        {"multipleOf": rng.randrange(2, 9), "minimum": 0, "maximum": 10_000},
        {},
    )
    return {"type": "integer"} | rng.choice(kinds)


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = round(rng.uniform(-10, 10), 2)
    return {"type": "number"} | rng.choice(({}, {"minimum": low, "maximum": low + 5}, {"exclusiveMinimum": low}))


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [rng.choice([1, -2.5, None, True, "text", "it's", {"a": [1]}, [], "\n\t\\"]) for _ in range(3)]
    return rng.choice([{"enum": values}, {"const": values[0]}])


def _plain(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randrange(1, 5))
    properties = {name: random_schema(rng, depth) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | {"required": [name for name in names if rng.random() < 0.7]}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    schema: dict[str, Any] = {"type": "array", "items": random_schema(rng, depth), "maxItems": low + rng.randrange(3)}
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, 0)]
    return schema | {"minItems": low}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randrange(2, 4))]}


def random_bounded_regex(rng: random.Random, depth: int = 3) -> str:
    """One without `*` and `+`: a small model may go round in those until its tokens are used up."""
    return random_regex(rng, depth).replace("[a-c]*", "[a-c]{0,6}").replace("[0-1]+", "[0-1]{1,6}")


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """A regex that Python's `re` reads the same way."""
    return "".join(_repeated(rng, depth) for _ in range(rng.randrange(1, 4)))


def _repeated(rng: random.Random, depth: int) -> str:
    atom = _atom(rng, depth)
    if atom.startswith("("):  # ambiguous repetitions would take `re`, the judge, ages
        return atom + rng.choice(["", "", "?", "{2}"])
    low = rng.randrange(3)
    return atom + rng.choice(["", "", "?", f"{{{low + 1}}}", f"{{{low},{low + rng.randrange(3)}}}"])


def _atom(rng: random.Random, depth: int) -> str:
    if depth > 0 and rng.random() < 0.5:
        return f"({'|'.join(random_regex(rng, depth - 1) for _ in range(rng.randrange(1, 4)))})"
    return rng.choice(
        ["a", "Z", "7", "é", "漢", r"\.", r"\-", r"\(", " ", "/", "[a-f]", "[A-Z0-9_]", "[^a-y\\n]", r"[\-+]", "[0-9]"]
        + [".", "(?:ab|ba)", "(?:[a-c]*)", "(?:[0-1]+)"]
    )


def fits_schema(text: str, schema: dict[str, Any]) -> None:
    """Raises unless `text` is JSON of this schema."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def fits_regex(text: str, pattern: str) -> None:
    """Raises unless all of `text` matches."""
    assert re.fullmatch(pattern, text), (pattern, text)
