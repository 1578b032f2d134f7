"""Faults on the cable between two hosts (`namespaces.two_hosts`): slow, lossy, resetting, cut.

The kernel does them: `tc` (Debian's iproute2) holds packets back, `nft` (nftables) drops or answers
them. All of it goes with the namespaces. Delay is not among them: few kernels have `netem`; see
`relay.py`.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from support.namespaces import Host, program


class Cable:
    """The cable between the two hosts; faults are made at both ends."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self._hosts = hosts
        self._slow = False

    def slow(self, mbit: int) -> None:
        """No more than so many megabits a second in each direction."""
        for host in self._hosts:
            rate = ["rate", f"{mbit}mbit", "burst", "16kb", "latency", "400ms"]
            _in(host, "tc", "qdisc", "replace", "dev", host.interface, "root", "tbf", *rate)
        self._slow = True

    def lose(self, percent: int) -> None:
        """Drop so many of a hundred TCP packets, at random."""
        self._rule(f"meta l4proto tcp numgen random mod 100 < {percent} counter drop")

    def reset(self) -> None:
        """Answer each TCP packet with a reset."""
        self._rule("meta l4proto tcp counter reject with tcp reset")

    def only_port(self, port: int) -> None:
        """A firewall: no TCP but to and from this port."""
        self._rule(f"tcp dport {port} accept", f"tcp sport {port} accept", "meta l4proto tcp drop")

    def cut(self) -> None:
        """Take the second host's link down."""
        self._link("down")

    def cut_one_way(self) -> None:
        """Drop all TCP packets that the second host sends; those of the first one arrive."""
        self._rule("meta l4proto tcp counter drop", at=self._hosts[1:])

    def heal(self) -> None:
        """End all faults."""
        self._link("up")
        for host in self._hosts:
            _in(host, "nft", "flush ruleset")
            if self._slow:
                _in(host, "tc", "qdisc", "delete", "dev", host.interface, "root")
        self._slow = False

    def held_back(self) -> int:
        """How often the slow cable made a packet wait."""
        said = [_in(host, "tc", "-s", "qdisc", "show", "dev", "veth0") for host in self._hosts]
        return sum(int(count) for text in said for count in re.findall(r"overlimits (\d+)", text))

    def hit(self) -> int:
        """Packets that were dropped or reset."""
        said = [_in(host, "nft", "list ruleset") for host in self._hosts]
        return sum(int(count) for text in said for count in re.findall(r"packets (\d+)", text))

    def _link(self, state: str) -> None:
        host = self._hosts[1]
        _in(host, "ip", "link", "set", host.interface, state)

    def _rule(self, *rules: str, at: Sequence[Host] | None = None) -> None:
        for host in self._hosts if at is None else at:
            _in(host, "nft", "flush ruleset")
            _in(host, "nft", "add table inet fault")
            chain = "add chain inet fault out { type filter hook output priority 0 ; }"
            _in(host, "nft", chain)
            for rule in rules:
                _in(host, "nft", f"add rule inet fault out oifname {host.interface} {rule}")


def _in(host: Host, name: str, *words: str) -> str:
    """Output of a program, run on one of the hosts."""
    argv = [program("ip") or "ip", "netns", "exec", host.namespace, program(name) or name, *words]
    return subprocess.run(argv, capture_output=True, check=True, timeout=10, text=True).stdout
