"""Names that are too long for a file are shortened, and stay distinct."""

from __future__ import annotations

import itertools

from elastic.runtime.file_names import MIN_LENGTH, shortened_name


def test_a_name_that_fits_stays() -> None:
    assert shortened_name("job@n1", 6) == "job@n1"


def test_a_long_name_keeps_its_begin_and_its_end() -> None:
    short = shortened_name("a" * 100 + "-end-of-this-one", 60)
    assert len(short) == 60
    assert short.startswith("a" * 20)
    assert short.endswith("~-end-of-this-one")
    assert short == shortened_name("a" * 100 + "-end-of-this-one", 60)


def test_different_long_names_stay_different() -> None:
    alike = ["".join(p).ljust(90, "x") + "y" * 90 for p in itertools.product("ab", repeat=4)]
    alike += [f"{'x' * 90}{n:02}{'y' * 90}" for n in range(50)]
    for most in (MIN_LENGTH, 100):
        short = {shortened_name(name, most) for name in alike}
        assert len(short) == len(set(alike))
        assert {len(name) for name in short} == {most}
