"""Messages of ranks and keepers as JSON, and the variables that join them.

A rank says ``{"ready": id, "address": "host:port"}`` when it can train, ``{"entered":
generation}`` when it trains, ``{"failed": generation}`` when a collective can't end,
``{"drained": [ids]}`` when it and these others leave between two steps, and ``{"left":
id}`` after its last step. A keeper says ``{"view": ...}``, ``{"end": generation}`` when
nothing that waits in a generation can end, and ``{"drain": true}`` when a rank is to
leave.

Keepers exchange the messages of `ballots`, each as ``{"say": kind, "body": ...}``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stretto.members.ballots import (
    Accept,
    Accepted,
    Beat,
    Decided,
    Message,
    Prepare,
    Promise,
    Refuse,
)
from stretto.members.view import View

_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Accept, Accepted, Beat, Decided, Prepare, Promise, Refuse)
}


def view_message(view: View) -> dict[str, Any]:
    """Return the message that gives a rank a view."""
    return {"view": msgspec.to_builtins(view)}


def view_of(message: dict[str, Any]) -> View | None:
    """Return a message's view, or ``None`` if it is another message."""
    found = message.get("view")
    return None if found is None else msgspec.convert(found, View)


def keeper_message(message: Message) -> dict[str, Any]:
    """Return a keeper's message as JSON has it."""
    return {"say": type(message).__name__, "body": msgspec.to_builtins(message)}


def keeper_message_of(message: dict[str, Any]) -> Message | None:
    """Return the message of another keeper, or ``None`` if it is another message."""
    kind = _KINDS.get(str(message.get("say")))
    if kind is None:
        return None
    try:
        return msgspec.convert(message.get("body"), kind)
    except msgspec.ValidationError:
        return None
