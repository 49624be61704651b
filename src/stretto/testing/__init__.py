"""Strategies and suites for tests; the library never imports them."""
