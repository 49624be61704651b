"""What Horovod's interface raises."""

from __future__ import annotations

from stretto.errors import StrettoError


class HorovodInternalError(StrettoError, RuntimeError):
    """A collective failed: ranks asked for different things, or a rank is gone.

    The state of model and optimizer may be half updated; `elastic.run` restores what
    was committed last.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts joined or left; nothing is lost.

    Args:
        skip_sync: State needs not be sent to other ranks again, for no rank is new.
    """

    def __init__(self, skip_sync: bool = False) -> None:  # noqa: FBT001, FBT002
        super().__init__("the job's hosts have changed")
        self.skip_sync = skip_sync
