"""Tools and the choice among them, from Messages to function tools; schemas are carried as bytes, never read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from attrs import frozen

from aiogw.dialects.anthropic.parsing import NULL, is_null, read
from aiogw.errors import InvalidField, quoted

_EMPTY_SCHEMA = msgspec.Raw(b'{"type":"object","properties":{}}')


class _Tool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: msgspec.Raw = NULL
    input_schema: msgspec.Raw = NULL
    strict: msgspec.Raw = NULL


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ChangedTool(msgspec.Struct):
    type: str
    name: str | None = None
    definition: msgspec.Raw = NULL


class _Change(msgspec.Struct):
    tool: _ChangedTool


_tool = msgspec.json.Decoder(_Tool)
_change = msgspec.json.Decoder(_Change)


@frozen(kw_only=True)
class ToolChange:
    """A ``tool_addition`` or ``tool_removal`` block that stands in the conversation at ``path``."""

    addition: bool
    block: msgspec.Raw
    path: str


@frozen(kw_only=True)
class _Offer:
    """One entry of ``tools``: ``function`` is None for a kind of tool that only Anthropic's own servers can run."""

    path: str
    name: str
    kind: str
    function: dict[str, Any] | None


def tool_members(
    tools: Iterable[msgspec.Raw], changes: Iterable[ToolChange], choice: ToolChoice | None
) -> dict[str, Any]:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls`` of a chat request, as far as each is to be sent.

    Raises InvalidField.
    """
    offers = _offers(tools, changes)
    functions = [offer.function for offer in offers if offer.function is not None]
    typed = [offer for offer in offers if offer.function is None]
    named = choice.name if choice is not None and choice.type == "tool" else None
    for offer in typed:
        # Left out where other tools remain; where it is all there is, the caller waits for something that cannot come.
        if not functions or offer.name == named:
            reason = f"tool type {quoted(offer.kind)} is not supported by this gateway"
            raise InvalidField(path=offer.path, reason=reason)
    members: dict[str, Any] = {}
    if functions:
        members["tools"] = [{"type": "function", "function": function} for function in functions]
    if choice is not None:
        members |= _choice_members(choice, [function["name"] for function in functions])
    return members


def _choice_members(choice: ToolChoice, names: list[str]) -> dict[str, Any]:
    wire: Any
    match choice.type:
        case "auto" | "none":
            if not names:
                return {}
            wire = choice.type
        case "any":
            wire = "required"
        case "tool":
            wire = {"type": "function", "function": {"name": choice.name}}
        case other:
            raise InvalidField(path="tool_choice.type", reason=f"{quoted(other)} is not supported by this gateway")
    if not names:
        raise InvalidField(path="tool_choice", reason="no tools were given")
    if choice.type == "tool" and choice.name is None:
        raise InvalidField(path="tool_choice.name", reason="Field required")
    if choice.type == "tool" and choice.name not in names:
        raise InvalidField(path="tool_choice.name", reason=f"tool {quoted(str(choice.name))} not found in tools")
    members = {"tool_choice": wire}
    if choice.disable_parallel_tool_use:
        members["parallel_tool_calls"] = False
    return members


def _offers(tools: Iterable[msgspec.Raw], changes: Iterable[ToolChange]) -> list[_Offer]:
    declared = [_offer(tool, f"tools.{number}") for number, tool in enumerate(tools)]
    known = {offer.name: offer for offer in declared}
    if len(known) != len(declared):
        raise InvalidField(path="tools", reason="Tool names must be unique.")
    offered = dict(known)
    for change in changes:
        where = f"{change.path}.tool"
        tool = read(change.block, _change, change.path).tool
        if tool.type == "tool_definition" and change.addition and not is_null(tool.definition):
            offer = _offer(tool.definition, f"{where}.definition")
            known[offer.name] = offered[offer.name] = offer
        elif tool.type == "tool_reference" and tool.name in known:
            offered.pop(tool.name, None)
            if change.addition:
                offered[tool.name] = known[tool.name]
        elif tool.type == "tool_reference":
            raise InvalidField(path=f"{where}.name", reason=f"tool {quoted(tool.name or '')} not found in tools")
        else:
            raise InvalidField(path=f"{where}.type", reason=f"{quoted(tool.type)} is not supported by this gateway")
    return list(offered.values())


def _offer(raw: msgspec.Raw, path: str) -> _Offer:
    tool = read(raw, _tool, path)
    if tool.type is not None and tool.type != "custom":
        # A toolset has no name of its own.
        return _Offer(path=path, name=tool.name or path, kind=tool.type, function=None)
    if not tool.name:
        raise InvalidField(path=f"{path}.name", reason="Field required")
    function: dict[str, Any] = {"name": tool.name}
    if bytes(tool.description).startswith(b'"'):
        function["description"] = tool.description
    if is_null(tool.input_schema):
        function["parameters"] = _EMPTY_SCHEMA
    elif bytes(tool.input_schema).startswith(b"{"):
        function["parameters"] = tool.input_schema
    else:
        raise InvalidField(path=f"{path}.input_schema", reason="must be an object")
    if bytes(tool.strict) == b"true":
        function["strict"] = True
    return _Offer(path=path, name=tool.name, kind="custom", function=function)
