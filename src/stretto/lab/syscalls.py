"""The few system calls that Python 3.11 does not provide."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process (for NEWPID: its children) into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Move this process into the namespace behind ``fd``."""
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount ``source`` on ``target`` in the mount namespace of this process."""
    arguments = [part.encode() for part in (source, target, kind)]
    result = _libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None)
    _check(result, f"mount {target}")


def unmount(target: str, flags: int) -> None:
    """Unmount the topmost mount of ``target``."""
    _check(_libc.umount2(target.encode(), flags), f"umount {target}")


def set_host_name(name: str) -> None:
    """Set the host name of this process's UTS namespace."""
    encoded = name.encode()
    _check(_libc.sethostname(encoded, ctypes.c_size_t(len(encoded))), "sethostname")


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends.

    The setting holds for the thread that forked, and is lost on a change of
    credentials. It does not cover a parent that ended before the call: callers check
    for that.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def die_with(parent: int) -> None:
    """Make the kernel kill this forked process when a parent ends, or has ended.

    Between the fork and this call the parent may have been killed.

    Args:
        parent: its process id, from before the fork.
    """
    die_with_parent()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent ends."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def set_time_slice_s(slice_s: float) -> None:
    """Set how long this process and its children run before a waiting one may.

    Linux 6.12 and later apply it to ordinary scheduling; shares stay fair. Other
    systems ignore it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return
    # struct sched_attr: size, policy (0: ordinary), flags, nice, priority, runtime
    # in nanoseconds, deadline, period.
    attributes = struct.pack(
        "=IIQiIQQQ", 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0), 0,
        round(slice_s * 1e9), 0, 0,
    )  # fmt: skip
    _check(_libc.syscall(number, 0, attributes, 0), "sched_setattr")
