"""The OpenAPI document, built from the tables that requests are read by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle._src.core.version import VERSION
from rekindle._src.serve.fields import Endpoint

_ERRORS = {
    400: "A field is wrong, missing or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The queue is full; Retry-After says when to try again.",
    499: "The request was aborted by its id.",
    500: "The request failed in the engine.",
    503: "The model is being loaded, the server is shutting down, or compilers of grammars are busy.",
}


def document(posts: Sequence[Endpoint], gets: Sequence[tuple[str, str]], *, keys: bool) -> dict[str, Any]:
    """Return the document for endpoints that take a JSON object, and for GET paths."""
    paths: dict[str, Any] = {}
    for endpoint in posts:
        content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if "stream" in endpoint.by_name:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        body = {"required": True, "content": {"application/json": {"schema": endpoint.schema()}}}
        answers = {"200": {"description": "The answer.", "content": content}, **_errors()}
        operation = {"operationId": _name(endpoint.path), "summary": endpoint.summary, "requestBody": body}
        paths[endpoint.path] = {"post": {**operation, "responses": answers}}
    for path, summary in gets:
        operation = {"operationId": _name(path), "summary": summary}
        kind = "text/plain" if path == "/metrics" else "application/json"
        answers = {"200": {"description": "The answer.", "content": {kind: {}}}, **_errors(401, 404, 503)}
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        parameters = [parameter] if "{name}" in path else []
        paths[path] = {"get": {**operation, "parameters": parameters, "responses": answers}}
    members: dict[str, Any] = {
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]},
    }
    error = {"type": "object", "properties": members, "required": list(members)}
    anthropic = {"type": "object", "properties": {"type": {"const": "error"}, "error": {"type": "object"}}}
    schemas = {
        "Error": {"type": "object", "properties": {"error": error}, "required": ["error"]},
        "AnthropicError": {**anthropic, "required": ["type", "error"]},
    }
    root: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "rekindle", "version": VERSION, "description": "OpenAI's API over sessions of rekindle."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if keys:
        root["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        root["security"] = [{"bearer": []}]
    return root


def _errors(*statuses: int) -> dict[str, Any]:
    reference = [{"$ref": "#/components/schemas/Error"}, {"$ref": "#/components/schemas/AnthropicError"}]
    content = {"application/json": {"schema": {"anyOf": reference}}}
    listed = statuses or tuple(_ERRORS)
    return {str(status): {"description": _ERRORS[status], "content": content} for status in listed}


def _name(path: str) -> str:
    return path.strip("/").replace("/", "_").replace("{", "").replace("}", "")
