"""The place of the script that other members are told."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from elastic.worker.script_place import place_of_main_thread


@pytest.mark.parametrize("folder", ["/job", "/srv/lib/python3-jobs", "/srv/elastic/worker"])
def test_a_place_of_the_script_is_short_and_found_in_any_folder(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__file__ = f"{folder}/train.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    script = "def tell(place):\n    return place()\n"
    exec(compile(script, f"{folder}/train.py", "exec"), main.__dict__)
    assert main.tell(place_of_main_thread) == ("train.py:2", False)
