"""A switch between network namespaces in user space, whose cables are long: it needs no `netem`.

    host 0  eth0 ──┐             What a host sends through eth0, a TUN device, the kernel hands to
    host 1  eth0 ──┤ a thread    this process. A thread holds each packet for half of a round trip
    host 2  eth0 ──┘             and gives it to the device of the host to which it is addressed.

Packets are the kernel's large ones (up to 64 KiB, not cut or summed by the sender, as a network
card with these offloads gets them), so one thread passes on more than 1 Gbit/s.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress

_DEVICE = "/dev/net/tun"
_SET_INTERFACE, _SET_OFFLOADS = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD
_FLAGS = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
_OFFLOADS = 0x01 | 0x02 | 0x08  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO_ECN
_HEADER = 10  # bytes of virtio_net_hdr before each packet; it goes to the receiver as it is
_RECEIVER = slice(_HEADER + 16, _HEADER + 20)  # the address in an IPv4 header
_LARGEST = 65_535 + _HEADER
_BATCH = 32  # packets read from one device before others are looked at
_TICK_S = 0.004  # what passes in it may pass at once, as with `tbf` here
_LONGEST_QUEUE_S = 0.4  # what would wait longer for its turn is dropped, as by `tbf` here


class _Port:
    """The way to one host: packets that wait for their time, and how full the line is."""

    def __init__(self, tun: int) -> None:
        self.tun = tun
        self.waiting: deque[tuple[float, bytes]] = deque()
        self._busy_until = 0.0

    def take(self, packet: bytes, now: float, delay_s: float, seconds_per_byte: float) -> None:
        """Hold `packet` until the line is free for it, and for `delay_s`."""
        if max(self._busy_until - now, 0.0) > _LONGEST_QUEUE_S:
            return
        self._busy_until = max(self._busy_until, now) + len(packet) * seconds_per_byte
        self.waiting.append((max(now, self._busy_until - _TICK_S) + delay_s, packet))

    def pass_on(self) -> float | None:
        """Give the host what is due; returns how long the next packet has to wait, seconds."""
        waiting = self.waiting
        while waiting:
            left = waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, packet = waiting.popleft()
            with suppress(OSError):  # an interface that is down loses it, as a cable would
                os.write(self.tun, packet)
        return None


class DelayingSwitch:
    """The switch: `add` every host, then `start`."""

    def __init__(self) -> None:
        self._ports: dict[bytes, _Port] = {}
        self._delay_s = self._seconds_per_byte = 0.0
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="delaying-switch")

    def add(self, address: str) -> str:
        """Make the device of the host with this IPv4 address; returns its name, by which it can be
        moved into the host's namespace.

        Raises:
            OSError: the kernel refuses it.
        """
        tun = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._ports[socket.inet_aton(address)] = _Port(tun)
        request = struct.pack("16sH22x", b"gradsync%d", _FLAGS)
        name = fcntl.ioctl(tun, _SET_INTERFACE, request)[:16].rstrip(b"\0").decode()
        fcntl.ioctl(tun, _SET_OFFLOADS, _OFFLOADS)
        return name

    def set(self, *, round_trip_s: float, rate_mbit: float | None = None) -> None:
        """Change how long a packet and its answer are held, and how much each host receives
        (megabits a second; None: all that comes)."""
        self._delay_s = round_trip_s / 2
        self._seconds_per_byte = 8 / (rate_mbit * 1e6) if rate_mbit else 0.0

    def start(self) -> None:
        """Begin to pass packets on, between the hosts added until now."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started, and take the devices away."""
        if self._thread.ident is not None:
            os.eventfd_write(self._end, 1)
            self._thread.join()
        for fd in (self._end, *(port.tun for port in self._ports.values())):
            os.close(fd)

    def _run(self) -> None:
        ports = [port.tun for port in self._ports.values()]
        while True:
            left = [port.pass_on() for port in self._ports.values()]
            soonest = min((each for each in left if each is not None), default=None)
            ready, _, _ = select.select([self._end, *ports], [], [], soonest)
            if self._end in ready:
                return
            for tun in ready:
                self._read(tun)

    def _read(self, tun: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(_BATCH):
                packet = os.read(tun, _LARGEST)
                if port := self._ports.get(packet[_RECEIVER]):
                    port.take(packet, time.monotonic(), self._delay_s, self._seconds_per_byte)
