"""Which devices of which hosts are free, and the choice of some for a gang.

# Note [Bit masks]
The devices of a host are the bits of an integer. `DeviceMap` keeps the hosts with each
number of free devices in sorted lists, so that a choice is quick on thousands of hosts
and depends on the state alone, not on its history.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Device(NamedTuple):
    """One device of a cluster."""

    host: str
    number: int


EMPTY, NO_FOREGROUND = 0, 1
"""Which devices to choose from: those that no job has, or no foreground."""


@final
class _Counts:
    """Hosts by their number of free devices."""

    def __init__(self) -> None:
        self.hosts: list[list[int]] = [[]]
        self.total = 0

    def copy(self) -> _Counts:
        same = _Counts()
        same.hosts = [list(row) for row in self.hosts]
        same.total = self.total
        return same

    def change(self, host: int, before: int, after: int) -> None:
        if before == after:
            return
        while len(self.hosts) <= after:
            self.hosts.append([])
        if before:
            row = self.hosts[before]
            del row[bisect_left(row, host)]
        if after:
            insort(self.hosts[after], host)
        self.total += after - before

    def tightest(self, need: int) -> int | None:
        """Return the host with the fewest free devices that suffice."""
        for row in self.hosts[need:]:
            if row:
                return row[0]
        return None

    def fullest(self) -> tuple[int, int]:
        """Return the most free devices of a host, and that host."""
        for free in range(len(self.hosts) - 1, 0, -1):
            if self.hosts[free]:
                return free, self.hosts[free][0]
        raise AssertionError("no device is free")


@final
class DeviceMap:
    """Free and occupied devices. A policy tries choices on a copy."""

    def __init__(self) -> None:
        self.devices: list[tuple[Device, ...]] = []
        self.numbers: dict[str, int] = {}
        self.memory_bytes: list[Sequence[int]] = []
        self.usable: list[int] = []
        self.foreground: list[int] = []
        self.background: list[int] = []
        self.counts = (_Counts(), _Counts())
        self.num_usable = 0
        """Devices of open hosts."""

    def copy(self) -> DeviceMap:
        """Return a map whose changes leave this one as it is."""
        same = DeviceMap.__new__(DeviceMap)
        same.devices = self.devices
        same.numbers = self.numbers
        same.memory_bytes = self.memory_bytes
        same.usable = self.usable
        same.foreground = list(self.foreground)
        same.background = list(self.background)
        same.counts = (self.counts[0].copy(), self.counts[1].copy())
        same.num_usable = self.num_usable
        return same

    def is_usable(self, device: Device) -> bool:
        """Return whether a device exists and may be given to jobs."""
        host = self.numbers.get(device.host)
        return host is not None and bool(self.usable[host] >> device.number & 1)

    def may_get_foreground(self, device: Device) -> bool:
        """Return whether a device may be given to jobs and no foreground has it."""
        if not self.is_usable(device):
            return False
        return not self.foreground[self.numbers[device.host]] >> device.number & 1

    def devices_of(self, host: str) -> tuple[Device, ...]:
        """Return a host's devices."""
        return self.devices[self.numbers[host]]

    def num_free(self, among: int = EMPTY, memory_bytes: int = 0) -> int:
        """Return how many devices are free; see `EMPTY`, `NO_FOREGROUND`.

        Args:
            among: which devices count.
            memory_bytes: those known to have less memory do not count.
        """
        if not memory_bytes or not self._memory_differs(memory_bytes):
            return self.counts[among].total
        return sum(
            (self._free(host, among) & ~small_devices(sizes, memory_bytes)).bit_count()
            for host, sizes in enumerate(self.memory_bytes)
        )

    def num_usable_with(self, memory_bytes: int) -> int:
        """Return how many devices of open hosts are not known to have less memory."""
        if not memory_bytes or not self._memory_differs(memory_bytes):
            return self.num_usable
        return sum(
            (self.usable[host] & ~small_devices(sizes, memory_bytes)).bit_count()
            for host, sizes in enumerate(self.memory_bytes)
        )

    def pick(
        self, need: int, among: int = EMPTY, memory_bytes: int = 0
    ) -> tuple[Device, ...] | None:
        """Return free devices, or ``None`` if there are fewer.

        They are on one host if one has enough, on the one with the fewest free.
        Otherwise the hosts with most free devices are used up, and the rest is on the
        host with the fewest that suffice. Ties go to the host that joined first, and on
        a host the lowest numbers. With `NO_FOREGROUND`, devices without a background
        come first on each host.
        """
        if memory_bytes and self._memory_differs(memory_bytes):
            return self._pick_with_memory(need, among, memory_bytes)
        counts = self.counts[among]
        if need > counts.total:
            return None
        host = counts.tightest(need)
        if host is not None:
            return self._lowest(host, need, among)
        counts = counts.copy()
        found: list[Device] = []
        while need:
            host = counts.tightest(need)
            free = need
            if host is None:
                free, host = counts.fullest()
                counts.change(host, free, 0)
            found += self._lowest(host, free, among)
            need -= free
        return tuple(found)

    def free_on(self, host: str, memory_bytes: int = 0) -> tuple[Device, ...]:
        """Return the devices of a host that no job has, but none that is too small."""
        at = self.numbers[host]
        free = self._free(at, EMPTY) & ~small_devices(
            self.memory_bytes[at], memory_bytes
        )
        return tuple(device for device in self.devices[at] if free >> device.number & 1)

    def _free(self, host: int, among: int) -> int:
        taken = self.foreground[host]
        if among == EMPTY:
            taken |= self.background[host]
        return self.usable[host] & ~taken

    def _lowest(self, host: int, need: int, among: int) -> tuple[Device, ...]:
        devices = self.devices[host]
        free = self._free(host, among)
        found: list[Device] = []
        for part in (free & ~self.background[host], free & self.background[host]):
            while part and len(found) < need:
                bit = part & -part
                part ^= bit
                found.append(devices[bit.bit_length() - 1])
        return tuple(found)

    def _memory_differs(self, min_bytes: int) -> bool:
        return any(
            0 < size < min_bytes for sizes in self.memory_bytes for size in sizes
        )

    def _pick_with_memory(
        self, need: int, among: int, min_bytes: int
    ) -> tuple[Device, ...] | None:
        some = DeviceMap()
        for host, devices in enumerate(self.devices):
            if not devices:
                continue
            sizes = self.memory_bytes[host]
            large = self.usable[host] & ~small_devices(sizes, min_bytes)
            some.set_host(devices[0].host, [0] * len(devices), large)
            for masks, foreground in (self.foreground, True), (self.background, False):
                taken = [d for d in devices if masks[host] >> d.number & 1]
                some.take(taken, foreground=foreground)
        return some.pick(need, among)

    # Changes: on a policy's own copy, or by the ledger.

    def take(self, devices: Iterable[Device], *, foreground: bool) -> None:
        """Occupy devices."""
        masks = self.foreground if foreground else self.background
        for host, bits in self._bits(devices).items():
            before = self._counted(host)
            masks[host] |= bits
            self._recount(host, before)

    def release(self, devices: Iterable[Device], *, foreground: bool) -> None:
        """Free devices."""
        masks = self.foreground if foreground else self.background
        for host, bits in self._bits(devices).items():
            before = self._counted(host)
            masks[host] &= ~bits
            self._recount(host, before)

    def _bits(self, devices: Iterable[Device]) -> dict[int, int]:
        found: dict[int, int] = {}
        last, bits = -1, 0
        for name, number in devices:
            host = self.numbers[name]
            if host != last:  # fast: devices of a host come together
                if bits:
                    found[last] = found.get(last, 0) | bits
                last, bits = host, 0
            bits |= 1 << number
        if bits:
            found[last] = found.get(last, 0) | bits
        return found

    def set_host(self, name: str, memory_bytes: Sequence[int], usable: int) -> None:
        """Add a host, or change which of its devices may be used.

        Args:
            name: the host's.
            memory_bytes: by device; 0 if unknown.
            usable: bits of the devices that may be given to jobs.
        """
        host = self.numbers.get(name)
        if host is None:
            host = self.numbers[name] = len(self.usable)
            self.devices.append(())
            self.memory_bytes.append(())
            for masks in (self.usable, self.foreground, self.background):
                masks.append(0)
        before = self._counted(host)
        if len(memory_bytes) > len(self.devices[host]):
            self.devices[host] = tuple(
                Device(name, i) for i in range(len(memory_bytes))
            )
        self.memory_bytes[host] = tuple(memory_bytes)
        self.num_usable += usable.bit_count() - self.usable[host].bit_count()
        self.usable[host] = usable
        self._recount(host, before)

    def _counted(self, host: int) -> tuple[int, int]:
        free = self.usable[host] & ~self.foreground[host]
        return (free & ~self.background[host]).bit_count(), free.bit_count()

    def _recount(self, host: int, before: tuple[int, int]) -> None:
        after = self._counted(host)
        self.counts[0].change(host, before[0], after[0])
        self.counts[1].change(host, before[1], after[1])


def small_devices(memory_bytes: Sequence[int], min_bytes: int) -> int:
    """Return the bits of devices known to have less memory."""
    return sum(1 << i for i, size in enumerate(memory_bytes) if 0 < size < min_bytes)


def are_text(number: int) -> str:
    """Return ``1 is`` or ``3 are``."""
    return "1 is" if number == 1 else f"{number} are"
