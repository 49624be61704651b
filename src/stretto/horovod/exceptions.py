"""Exceptions of Horovod's API."""

from __future__ import annotations

from stretto.errors import StrettoError


class HorovodInternalError(StrettoError, RuntimeError):
    """A collective failed: ranks made different calls, or a rank is lost.

    The state of model and optimizer may be partly updated; `elastic.run` restores the
    last commit.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts joined or left; no state is lost.

    Args:
        skip_sync: Whether state need not be sent again, because no rank is new.
    """

    def __init__(self, skip_sync: bool = False) -> None:  # noqa: FBT001, FBT002
        super().__init__("the job's hosts have changed")
        self.skip_sync = skip_sync
