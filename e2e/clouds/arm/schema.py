# SPDX-License-Identifier: Apache-2.0
"""Bodies as azure-mgmt-network's types describe them. Requests are refused for fields and values that the types do not have; answers too,
so that the stand-in cannot make up a field."""

import importlib
import importlib.util
import sys
import typing
from enum import EnumMeta

from core.messages import Refusal



def _load():
    """The models and the types of azure-mgmt-network. Its package would import all clients first, which takes two seconds."""
    spec = importlib.util.find_spec("azure.mgmt.network")
    sys.modules.setdefault("azure.mgmt.network", importlib.util.module_from_spec(spec))
    return importlib.import_module("azure.mgmt.network.models"), importlib.import_module("azure.mgmt.network.types")


models, types = _load()
# What the types refer to: enumerations are with the models.
NAMES = vars(models) | vars(types)
# The version of the API that the types are of; newer ones are unknown.
VERSION = "2026-03-01"


def malformed(code, message):
    """A body that does not parse, as Microsoft.Network says it."""
    return Refusal(400, "InvalidRequestFormat", "Cannot parse the request.", details=[{"code": code, "message": message}])


class Schema:
    """The types, read as they are needed."""

    def __init__(self):
        self._known = {}

    def _fields(self, cls):
        """Of each field: its type, whether it is required, and whether only the server sets it."""
        if cls not in self._known:
            hints = typing.get_type_hints(cls, NAMES, include_extras=True)
            model = getattr(models, cls.__name__, None)
            visible = {field._rest_name: field._visibility for field in model({})._attr_to_rest_field.values()} if model else {}
            self._known[cls] = {name: (hint, typing.get_origin(hint) is typing.Required, visible.get(name) == ["read"]) for name, hint in hints.items()}
        return self._known[cls]

    def request(self, name, value):
        """The body of a request, without what only the server sets."""
        return self._object(getattr(types, name), value, "", request=True)

    def check_answer(self, name, value):
        """An answer that the types do not have is a fault of the stand-in."""
        try:
            self._object(getattr(types, name), value, "", request=False)
        except Refusal as refusal:
            raise AssertionError(f"the stand-in answers what the types lack: {refusal.more}") from refusal

    def _object(self, cls, value, path, request):
        if not isinstance(value, dict):
            raise malformed("InvalidJson", f"Error converting value to type '{cls.__name__}'. Path '{path}'.")
        fields, result = self._fields(cls), {}
        for name, item in value.items():
            if name not in fields:
                raise malformed("InvalidJson", f"Could not find member '{name}' on object of type '{cls.__name__}'. Path '{path}{name}'.")
            hint, _, read_only = fields[name]
            if item is not None and not (request and read_only):
                result[name] = self._value(hint, item, f"{path}{name}", request)
        for name, (_, required, read_only) in fields.items():
            if request and required and not read_only and name not in result:
                raise malformed("MissingJsonProperty", f"Required property '{name}' not found in JSON. Path '{path}'.")
        return result

    def _value(self, hint, value, path, request):
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Required, typing.NotRequired):
            return self._value(arguments[0], value, path, request)
        if origin is typing.Union:
            enum = next((argument for argument in arguments if isinstance(argument, EnumMeta)), None)
            if enum is None:
                return self._value(arguments[0], value, path, request)
            allowed = {member.value.lower(): member.value for member in enum}
            if not isinstance(value, str) or value.lower() not in allowed:
                raise malformed("InvalidJson", f"Error converting value \"{value}\" to type '{enum.__name__}'. Path '{path}'.")
            return allowed[value.lower()]
        if origin is list:
            if not isinstance(value, list):
                raise malformed("InvalidJson", f"Error converting value to a list. Path '{path}'.")
            return [self._value(arguments[0], item, f"{path}[{index}]", request) for index, item in enumerate(value)]
        if origin is dict:
            if not isinstance(value, dict):
                raise malformed("InvalidJson", f"Error converting value to an object. Path '{path}'.")
            return {name: self._value(arguments[1], item, f"{path}.{name}", request) for name, item in value.items()}
        # Those of typing_extensions are none for typing.
        if hasattr(hint, "__required_keys__"):
            return self._object(hint, value, f"{path}.", request)
        wanted = {str: str, int: int, bool: bool, float: (int, float)}.get(hint)
        if wanted and (not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool)):
            raise malformed("InvalidJson", f"Error converting value \"{value}\" to type '{hint.__name__}'. Path '{path}'.")
        return value
