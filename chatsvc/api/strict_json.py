"""Request bodies, decoded strictly: ``1`` is no boolean, ``"5"`` no number, and every fault names its field.

The framework's own decoding converts such values silently; what a client sent by mistake would be stored as something
else.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, Final

import msgspec
from litestar.dto import AbstractDTO, DTOFieldDefinition
from litestar.typing import FieldDefinition

from chatsvc.api.schemas import Body
from chatsvc.errors import InvalidInput

_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN: Final = "unknown field"
_NAMED: Final = re.compile(r"field `([^`]+)`")


class StrictJson(AbstractDTO[Body]):
    """Decodes the body into the type of the handler's ``data``."""

    model_type = Body

    @classmethod
    def create_for_field_definition(
        cls, field_definition: FieldDefinition, handler_id: str, backend_cls: Any = None
    ) -> None:
        """Nothing to prepare: msgspec decodes straight into the type."""

    @classmethod
    def create_openapi_schema(cls, field_definition: FieldDefinition, handler_id: str, schema_creator: Any) -> Any:
        """The type's own schema."""
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Generator[DTOFieldDefinition, None, None]:
        """There is no transfer model, so there are no fields of one."""
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        """As above."""
        return False

    def decode_bytes(self, value: bytes) -> Any:
        """The body. Raises ``InvalidInput`` naming the field."""
        handler: Any = self.asgi_connection.scope["route_handler"]
        return decode_strictly(value, handler.parsed_fn_signature.parameters["data"].annotation)


def decode_strictly(value: bytes, type_: type[Any]) -> Any:
    """JSON as a value of that type. Raises ``InvalidInput`` naming the field."""
    try:
        return msgspec.json.decode(value, type=type_)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        named = _NAMED.search(message)
        field = (path and path.group(1)) or (named and named.group(1)) or "body"
        fields = ""
        if _UNKNOWN in message and path is None:
            names = sorted(known.encode_name for known in msgspec.structs.fields(type_))
            fields = f"; the fields are {', '.join(names)}"
        raise InvalidInput(f"{field}: {_PATH.sub('', message)}{fields}", field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"The body is not valid JSON: {error}", field="body") from error
