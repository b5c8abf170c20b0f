"""What `elastic wrap` refuses to run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic.cli.wrap import wrap
from elastic.errors import ConfigurationError
from elastic.settings.sources import DeviceCounts


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ([], "no command is given; .* elastic wrap accelerate launch"),
        (["no-such-command"], "'no-such-command' is not on the PATH"),
        (["ls", "-l"], "is not a Python script, .* a file named torchrun before it on the PATH"),
    ],
)
def test_what_is_no_python_script_is_refused_with_the_remedy(
    command: Sequence[str], told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        wrap(command, lambda: DeviceCounts(gpu=0, cpu=1, hidden=""))
