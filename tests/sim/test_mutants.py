"""Planted faults fit the source, and a trial tells faults that are found from others."""

from __future__ import annotations

import pytest

from tests.sim.mutants.catalogue import CATALOGUE, Mutant
from tests.sim.mutants.trial import ROOT, try_mutants

FATAL = Mutant(
    "coordinator/machine.py",
    "        self._number += 1\n",
    "        self._number += 0\n",
    "numbers never grow",
)
HARMLESS = FATAL._replace(
    replacement="        self._number += 1 if self._number else 2\n",
    breaks="nothing: the first one is number 2",
)


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda m: m.breaks)
def test_a_planted_fault_fits_the_source(mutant: Mutant) -> None:
    planted = mutant.plant((ROOT / "elastic/core" / mutant.file).read_text())
    compile(planted, mutant.file, "exec")


def test_trial_raises_an_error_if_the_source_lacks_the_place_of_a_fault() -> None:
    with pytest.raises(ValueError, match="0 times"):
        list(
            try_mutants(
                [FATAL._replace(find="never there")], histories=1, tries=1, jobs=1, unit_tests=False
            )
        )


@pytest.mark.long
def test_trial_finds_a_fault_that_breaks_a_promise_and_a_harmless_one_survives() -> None:
    found, survived = try_mutants([FATAL, HARMLESS], histories=5, tries=5, jobs=1, unit_tests=False)
    assert found.found
    assert found.history
    assert not survived.found
    assert survived.histories == 5
