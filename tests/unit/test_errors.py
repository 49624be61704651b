from __future__ import annotations

import inspect

from stretto import errors


def raised():
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }


def test_every_error_is_a_stretto_error():
    assert all(issubclass(error, errors.StrettoError) for error in raised().values())


def test_the_tree_in_the_docstring_is_the_whole_tree():
    drawn = errors.__doc__ or ""
    assert [name for name in raised() if name not in drawn] == []


def test_a_spec_error_is_a_value_error_with_a_place():
    error = errors.SpecError("hosts must be >= 1, got 0", place=".hosts")
    assert isinstance(error, ValueError)
    assert error.place == ".hosts"
    assert str(error) == "hosts must be >= 1, got 0"
    assert errors.SpecError("no place").place == ""
