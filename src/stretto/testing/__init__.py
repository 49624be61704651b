"""Strategies and suites for tests, ours and others'; the library never imports them."""
