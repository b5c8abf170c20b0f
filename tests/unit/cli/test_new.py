"""`elastic new` refuses what it cannot write."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.cli.new import write_script
from elastic.errors import ConfigurationError


def test_a_new_script_does_not_take_the_place_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    write_script(file)
    compile(file.read_text(), file, "exec")
    file.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"train\.py exists already; give another name"):
        write_script(file)
    assert file.read_text() == "mine"
    with pytest.raises(ConfigurationError, match=r"cannot write .*: No such file"):
        write_script(tmp_path / "nope" / "train.py")
