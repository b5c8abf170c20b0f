"""Leaves it to elastic, and not to torch's NCCL watchdog, to end what waits for a lost member."""

from __future__ import annotations

from collections.abc import MutableMapping

from elastic.errors import ConfigurationError

# Read by ProcessGroupNCCL when it is built (torch 2.13). The watchdog would end the whole process
# when a peer dies. Its monitor would do so 8 minutes after any error, and both would hold on to a
# group that was aborted, and to the gradients in it, until a flight record had had its time.
_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# With any of these on, the survivors of a lost member end with it.
_REFUSED = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_DESYNC_DEBUG",
)
_OFF = ("0", "")


def turn_off(environment: MutableMapping[str, str]) -> None:
    """Set what is not set; raise ConfigurationError for settings that would end survivors.

    Before the first group of a process is built. Everything else that is set is left as it is.
    """
    for name in _REFUSED:
        value = environment.get(name, "0")
        if value.strip() not in _OFF:
            raise ConfigurationError(
                f"{name}={value}: torch's watchdog would end every worker that waits for a lost "
                f"one, before the group can form again; unset it, or set it to 0"
            )
    for name, value in _OURS.items():
        environment.setdefault(name, value)
