"""Collectives in an order that ranks agree on while they run."""
