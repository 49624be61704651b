"""Lines of JSON between a rank and its keeper, and the variables that join them.

A rank says ``{"ready": id, "address": "host:port"}`` once, ``{"entered": generation}``
when it trains, ``{"failed": generation}`` when a collective can't end, and
``{"left": id}`` after its last step. A keeper says ``{"view": ...}``, and ``{"end":
generation}`` when a rank has left a generation for one that is decided already.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stretto.members.view import View

SOCKET_VARIABLE = "STRETTO_KEEPER"
"""Path of the keeper's socket; set for ranks of ``stretto run --elastic``."""

MEMBER_VARIABLE = "STRETTO_MEMBER"
"""The rank's id as a member."""

JOINS_VARIABLE = "STRETTO_JOINS"
"""Set for a rank that joins a job which trains already."""


def view_message(view: View) -> dict[str, Any]:
    """Return the message that gives a rank a view."""
    return {"view": msgspec.to_builtins(view)}


def view_of(message: dict[str, Any]) -> View | None:
    """Return a message's view, or ``None`` if it is another message."""
    found = message.get("view")
    return None if found is None else msgspec.convert(found, View)
