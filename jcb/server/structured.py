"""What an answer must look like: OpenAI's response_format, vLLM's structured_outputs and its older guided_*."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, WithJsonSchema

from jcb.types import RequestError, Structured

MAX_NAME = 64
"""Characters of a schema's name, as OpenAI has it."""

_KINDS = ("json", "regex", "choice", "grammar")
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}]}
_CHOICE = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1000}
_TEXT = {"type": "string", "minLength": 1}
_OPTIONS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")

_NULL = {"type": "null"}
_NOTHING = {"type": "array", "maxItems": 0}
_PLAIN_FORMAT = {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}}
_SPEC = {
    "name": {"type": ["string", "null"], "maxLength": MAX_NAME},
    "description": {"type": ["string", "null"]},
    "schema": {"type": "object"},
    "strict": {"type": ["boolean", "null"]},
}

_ResponseFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "oneOf": [
                _PLAIN_FORMAT,
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "properties": _SPEC,
                            "required": ["schema"],
                            "additionalProperties": _NULL,
                        },
                    },
                    "required": ["type", "json_schema"],
                },
            ]
        }
    ),
]
_FORMAT = {
    "oneOf": [
        _PLAIN_FORMAT,
        {
            "type": "object",
            "properties": {"type": {"const": "json_schema"}, **_SPEC},
            "required": ["type", "schema"],
            "additionalProperties": _NULL,
        },
    ]
}
TextOption = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"format": {"anyOf": [_FORMAT, _NULL]}, "verbosity": {"enum": ["medium", None]}},
            "additionalProperties": _NULL,
        }
    ),
]
"""The `text` of a response request: {format, verbosity}."""
_StructuredOutputs = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": {"anyOf": [_SCHEMA, _NULL]},
                "regex": {"anyOf": [_TEXT, _NULL]},
                "choice": {"anyOf": [_CHOICE, _NULL]},
                "grammar": {"anyOf": [_TEXT, _NULL]},
                "json_object": {"type": ["boolean", "null"]},
                **{option: {"enum": [False, None]} for option in _OPTIONS},
            },
            "additionalProperties": _NULL,
        }
    ),
]


class StructuredFields(BaseModel):
    """What an answer must look like; at most one of these may say so."""

    response_format: _ResponseFormat | None = None
    structured_outputs: _StructuredOutputs | None = None
    guided_json: Annotated[Any, WithJsonSchema({"anyOf": [_SCHEMA, _NULL, _NOTHING]})] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def structured_of(body: StructuredFields) -> Structured | None:
    """What `body` asks for; RequestError that names the field at fault."""
    found = [
        response_format(body.response_format or {}),
        *_outputs(body.structured_outputs or {}),
        *(_make(kind, getattr(body, f"guided_{kind}"), f"guided_{kind}") for kind in _guided(body)),
    ]
    asked = [each for each in found if each is not None]
    if len(asked) > 1:
        raise _invalid(asked[1].param, f"cannot be used together with {asked[0].param}")
    return asked[0] if asked else None


def _guided(body: StructuredFields) -> list[str]:
    """The kinds whose older field asks for something: an empty schema does, empty text does not."""
    given = {kind: getattr(body, f"guided_{kind}") for kind in _KINDS}
    return [kind for kind, value in given.items() if value not in (None, "", [])]


def response_format(given: Mapping[str, Any], param: str = "response_format") -> Structured | None:
    """OpenAI's field: text, json_object or json_schema. A schema is always enforced, strict or not."""
    if not given:
        return None
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _invalid(f"{param}.type", "must be text, json_object or json_schema")
    _only(given, {"type", "json_schema"}, param)
    if kind == "text":
        return None
    if kind == "json_object":
        return _make("json", {"type": "object"}, param)
    spec, where = given.get("json_schema"), f"{param}.json_schema"
    if not isinstance(spec, Mapping):
        raise _invalid(where, "must be an object with name and schema")
    return json_schema(spec, where)


def text_option(given: Mapping[str, Any], param: str = "text") -> Structured | None:
    """The field of /v1/responses: its format has the schema's fields beside `type`."""
    _only(given, {"format", "verbosity"}, param)
    if given.get("verbosity") not in (None, "medium"):
        raise RequestError(f"{param}.verbosity must be medium", param=f"{param}.verbosity", code="unsupported_field")
    form, where = given.get("format"), f"{param}.format"
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise _invalid(where, "must be an object with a type")
    if form.get("type") != "json_schema":
        return response_format(form, where)
    return json_schema({name: value for name, value in form.items() if name != "type"}, where)


def json_schema(spec: Mapping[str, Any], where: str) -> Structured:
    """The {name, description, schema, strict} of OpenAI's formats."""
    _only(spec, {"name", "description", "schema", "strict"}, where)
    for name, kinds in (("name", str | None), ("description", str | None), ("strict", bool | None)):
        if not isinstance(spec.get(name), kinds):
            raise _invalid(f"{where}.{name}", f"must not be {type(spec[name]).__name__}")
    if len(spec.get("name") or "") > MAX_NAME:
        raise _invalid(f"{where}.name", f"may have at most {MAX_NAME} characters, got {len(spec['name'])}")
    if not isinstance(spec.get("schema"), Mapping):
        raise _invalid(f"{where}.schema", "must be a JSON schema: an object")
    return Structured(kind="json", source=_dump(spec["schema"]), param=f"{where}.schema")


def _outputs(given: Mapping[str, Any]) -> list[Structured | None]:
    """vLLM's field. Its options for other back ends are refused unless they ask for nothing."""
    asked: list[Structured | None] = []
    for name, value in given.items():
        where = f"structured_outputs.{name[:64]}"
        if value is None or (name in _OPTIONS and value is False):
            continue
        if name in _KINDS:
            asked.append(_make(name, value, where))
        elif name == "json_object":
            if not isinstance(value, bool):
                raise _invalid(where, "must be true or false")
            asked += [_make("json", {"type": "object"}, where)] if value else []
        else:
            raise RequestError(f"{where} is not supported by this server", param=where, code="unsupported_field")
    return asked


def _make(kind: str, value: Any, param: str) -> Structured:
    if kind == "choice":
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _invalid(param, "must be a list of strings")
        return Structured(kind="choice", source=json.dumps(value), param=param)
    if kind == "json":
        if not isinstance(value, str | Mapping):
            raise _invalid(param, "must be a JSON schema: an object, or its text")
        return Structured(kind="json", source=value if isinstance(value, str) else _dump(value), param=param)
    if not isinstance(value, str):
        raise _invalid(param, "must be text")
    return Structured(kind="regex" if kind == "regex" else "grammar", source=value, param=param)


def _dump(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, ensure_ascii=False)


def _only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            shown = name[:64] if name.isidentifier() else "a field"
            raise RequestError(f"{where}.{shown} is not supported", param=where, code="unsupported_field")


def _invalid(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem}", param=param, code="invalid_value")
