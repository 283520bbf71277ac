# SPDX-License-Identifier: Apache-2.0
"""Routes, parameters and bodies of the API, from the discovery document that google-api-python-client ships. Requests are refused for
what the document does not have; answers too, so that the stand-in cannot make up a field."""

import base64
import binascii
import importlib.metadata
import json
import re

from core.messages import Refusal

# Parameters that Google's front end accepts for all methods, beside those that the document lists.
SYSTEM = {"$alt", "$apiVersion", "$fields", "$prettyPrint", "$userProject"}
TYPES = {"string": "TYPE_STRING", "boolean": "TYPE_BOOL", "number": "TYPE_FLOAT", "object": "TYPE_MESSAGE"}
INTEGERS = {"int32": (-(2**31), 2**31 - 1), "uint32": (0, 2**32 - 1), "int64": (-(2**63), 2**63 - 1), "uint64": (0, 2**64 - 1)}


def bad(message):
    """A request that does not parse."""
    return Refusal(400, "badRequest", message)


def invalid(field, value, why):
    """A field whose value is wrong."""
    return Refusal(400, "invalid", f"Invalid value for field '{field}': '{value}'. {why}")


def read_document():
    """The document as JSON."""
    distribution = importlib.metadata.distribution("google-api-python-client")
    return json.loads(distribution.locate_file("googleapiclient/discovery_cache/documents/compute.v1.json").read_text(encoding="utf-8"))


class Method:
    """One method of the API."""

    def __init__(self, collection, action, document):
        self.collection, self.action = collection, action
        self.id = document["id"]
        self.verb = document["httpMethod"]
        self.segments = document.get("flatPath", document["path"]).split("/")
        self.parameters = document.get("parameters", {})
        self.request = document.get("request", {}).get("$ref")
        self.response = document.get("response", {}).get("$ref")


class Api:
    """The document, prepared."""

    def __init__(self):
        document = read_document()
        self.schemas = document["schemas"]
        self.base = document["basePath"]
        self.parameters = document["parameters"]
        self._routes = {}
        for collection, resource in document["resources"].items():
            for action, method in resource.get("methods", {}).items():
                self._add(Method(collection, action, method))

    def _add(self, method):
        node = self._routes
        for segment in method.segments:
            node = node.setdefault("{}" if segment.startswith("{") else segment, {})
        node[("method", method.verb)] = method

    def route(self, verb, path):
        """The method of a path below the base, and the values in the path. (None, {}) if there is none."""
        # Controllers of the vendor call other versions for some resources; their further fields are unknown here.
        path = re.sub("^/compute/(alpha|beta)/", self.base, path)
        segments = path.removeprefix(self.base).split("/")
        nodes = [self._routes]
        for segment in segments:
            nodes = [below for node in nodes for below in (node.get(segment), node.get("{}")) if below is not None]
        method = next((found for node in nodes if (found := node.get(("method", verb)))), None)
        if method is None:
            return None, {}
        named = zip(method.segments, segments, strict=True)
        return method, {name[1:-1]: value for name, value in named if name.startswith("{")}

    def check_path(self, method, values):
        """Refuses values that do not match their patterns."""
        for name, value in values.items():
            pattern = method.parameters.get(name, {}).get("pattern")
            if pattern and not re.fullmatch(pattern, value):
                raise invalid(name, value, f"Must be a match of regex '{pattern}'")

    def query(self, method, pairs):
        """The parameters of the method, with their types. Refuses unknown ones."""
        values = {}
        for name, value in pairs:
            if name in SYSTEM or name in self.parameters:
                if name.lstrip("$") == "alt" and value.split(";")[0] != "json":
                    raise bad(f"Invalid value for alt: {value}")
                continue
            schema = method.parameters.get(name)
            if schema is None or schema["location"] != "query":
                raise bad(f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter. Field \'{name}\' could not be found in request message.')
            if schema["type"] == "boolean":
                if value not in ("true", "false"):
                    raise bad(f"Invalid value at '{name}' (TYPE_BOOL), \"{value}\"")
                value = value == "true"
            elif schema["type"] == "integer":
                if not value.isdigit():
                    raise bad(f"Invalid value at '{name}' (TYPE_UINT32), \"{value}\"")
                value = int(value)
            if schema.get("repeated"):
                value = [*values.get(name, []), value]
            values[name] = value
        return values

    def body(self, name, value, patch=False):
        """A request's body as the schema has it, without what only the server sets. In a patch, None stays: it clears a field."""
        if not isinstance(value, dict):
            raise bad("Invalid JSON payload received. Root element must be a message.")
        return self._object(self.schemas[name], value, "resource", patch, request=True)

    def check_answer(self, name, value):
        """An answer that the schema does not have is a fault of the stand-in."""
        if name:
            try:
                self._object(self.schemas[name], value, name, False, request=False)
            except Refusal as refusal:
                raise AssertionError(f"the stand-in answers what the schema lacks: {refusal.message}") from refusal

    def _object(self, schema, value, where, patch, request):
        properties, result = schema.get("properties"), {}
        for name, item in value.items():
            field = (properties or {}).get(name)
            if field is None:
                if "additionalProperties" not in schema:
                    at = "" if where == "resource" else f" at '{where}'"
                    raise bad(f'Invalid JSON payload received. Unknown name "{name}"{at}: Cannot find field.')
                field = schema["additionalProperties"]
            elif request and (field.get("readOnly") or field.get("description", "").startswith("[Output Only]")):
                continue
            if item is None:
                if patch:
                    result[name] = None
                continue
            result[name] = self._value(field, item, f"{where}.{name}", patch, request)
        return result

    def _value(self, schema, value, where, patch, request):
        if "$ref" in schema:
            schema = self.schemas[schema["$ref"]]
        kind = schema.get("type")
        if kind == "array":
            if not isinstance(value, list):
                raise bad(f"Invalid value at '{where}' (TYPE_ARRAY), {json.dumps(value)}")
            return [self._value(schema["items"], item, f"{where}[{index}]", patch, request) for index, item in enumerate(value)]
        if kind == "object":
            if not isinstance(value, dict):
                raise bad(f"Invalid value at '{where}' ({TYPES[kind]}), {json.dumps(value)}")
            return self._object(schema, value, where, patch, request)
        return _scalar(schema, value, where)


def _scalar(schema, value, where):
    kind, form = schema["type"], schema.get("format")
    if kind == "any":
        return value
    if form in INTEGERS:
        return _integer(kind, form, value, where)
    right = {"string": isinstance(value, str), "boolean": isinstance(value, bool)}
    right["number"] = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not right[kind]:
        raise bad(f"Invalid value at '{where}' ({TYPES[kind]}), {json.dumps(value)}")
    if form == "byte":
        try:
            base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise bad(f"Invalid value at '{where}' (TYPE_BYTES), Base64 decoding failed for \"{value}\"") from None
    if "enum" in schema and value not in schema["enum"]:
        raise invalid(where, value, f"Must be one of [{', '.join(schema['enum'])}]")
    if "pattern" in schema and value and not re.fullmatch(schema["pattern"], value):
        raise invalid(where, value, f"Must be a match of regex '{schema['pattern']}'")
    return value


def _integer(kind, form, value, where):
    # JSON of protocol buffers: numbers may be strings, and 64 bits are strings in answers.
    text = value if isinstance(value, str) else json.dumps(value)
    low, high = INTEGERS[form]
    if isinstance(value, bool) or not re.fullmatch(r"-?\d+", text) or not low <= int(text) <= high:
        raise bad(f"Invalid value at '{where}' (TYPE_{form.upper()}), {json.dumps(value)}")
    return text if kind == "string" else int(text)
