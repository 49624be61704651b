"""Proofs that a keeper knows its job's name and token."""

from __future__ import annotations

import hashlib
import hmac
import json


def key_of(job: str, token: str) -> bytes:
    """Return the key of the proofs."""
    return hashlib.sha256(json.dumps(["stretto", job, token]).encode()).digest()


def proof_of(key: bytes, *parts: str) -> str:
    """Return the proof of some texts, in hexadecimal."""
    return hmac.new(key, json.dumps(parts).encode(), "sha256").hexdigest()
