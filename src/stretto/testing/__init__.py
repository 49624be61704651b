"""Strategies and suites for tests, stretto's and others'; the library never imports
them.
"""
