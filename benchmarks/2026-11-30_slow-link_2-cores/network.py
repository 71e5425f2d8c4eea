"""Processes on slow links: one network namespace each, joined by a switch. Linux, root, util-linux and iproute2.

    this process's namespace                    the namespace of rank r
      switch, a bridge -- port{r} ============= wire, 10.77.0.{r + 1}
                          shaped towards r      shaped away from r

No namespace has a name, so none can be left behind: this process moves into one of its own, every rank is started in
another, and the kernel takes a namespace and its devices away with its last process. A rank is killed with its
parent, however that ends, and what it has started itself is killed with it: it is the first process of a namespace
of processes, too.

Shaping is tc's token bucket (tbf): rate, a bucket of 32 kB, a queue of 50 ms; no added latency. Segmentation is done
by TCP, not by a device, so that every packet has its headers, in the rate and in the kernel's counters. Congestion
control is cubic, Linux's own choice, whatever this machine is set to.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

DEVICE = "wire"
HEADER_BYTES = 66  # of a packet of TCP over IPv4 over Ethernet: 14 + 20 + 20, and 12 for time stamps
MTU_BYTES = 1500
PAYLOAD_SHARE = (MTU_BYTES + 14 - HEADER_BYTES) / (MTU_BYTES + 14)  # of the rate, in full packets
_INSIDE = "THINWIRE_BENCHMARK_NAMESPACE"
_SHAPING = ("burst", "32kb", "latency", "50ms")
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")


class UnavailableError(Exception):
    """These links cannot be made here; the text says why."""


def enter_namespace() -> None:
    """Go on in a namespace of this process's own, by starting the same command again inside it.

    Raises:
        UnavailableError: no such namespaces and links on this machine, or not for this user.
    """
    if os.environ.get(_INSIDE):
        _try("ip", "link", "add", "switch", "type", "bridge", "mcast_snooping", "0")
        _try("ip", "link", "set", "switch", "up")
        _try("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "1gbit", *_SHAPING)
        _try("tc", "qdisc", "del", "dev", "lo", "root")
        signal.signal(signal.SIGTERM, _stop)
        return
    if sys.platform != "linux":
        raise UnavailableError(f"network namespaces are Linux's, this is {sys.platform}")
    if os.geteuid() != 0:
        raise UnavailableError("network namespaces need root")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise UnavailableError(f"no {', '.join(missing)} here; install iproute2 and util-linux")
    _try("unshare", "--net", "true")
    os.environ[_INSIDE] = "yes"
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.orig_argv[1:]])


class Ranks:
    """Processes, each alone in a namespace at its own link. Use as a context: whatever still runs at its end is killed.

    Args:
        commands: one per rank. It is started at once and reads a line from standard input when its link is up.
        rate: of every link in both directions, as tc reads it ("100mbit"); None leaves them as fast as the kernel is.
    """

    def __init__(self, commands: list[list[str]], rate: str | None) -> None:
        self.commands = commands
        self.rate = rate
        self.processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Ranks:
        try:
            for rank, command in enumerate(self.commands):
                self._start(rank, command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, rank: int, command: list[str]) -> None:
        apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        tied = ["setpriv", "--pdeathsig", "KILL", *apart, *command]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(tied, stdin=subprocess.PIPE, text=True, env=environment)
        self.processes.append(process)
        pid = process.pid
        _await_namespace(pid)
        port = f"port{rank}"
        inside = ("nsenter", "--net", f"--target={pid}")
        _try("ip", "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(pid))
        _try("ip", "link", "set", port, "master", "switch")
        for place, device in (((), port), (inside, DEVICE)):
            _try(*place, "ip", "link", "set", device, "mtu", str(MTU_BYTES), "gso_max_segs", "1", "addrgenmode", "none")
            if self.rate is not None:
                _try(*place, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", self.rate, *_SHAPING)
        _try(*inside, "ip", "address", "add", f"{address(rank)}/24", "dev", DEVICE)
        for place, device in (((), port), (inside, DEVICE), (inside, "lo")):
            _try(*place, "ip", "link", "set", device, "up")
        _try(*inside, "ip", "route", "replace", "10.77.0.0/24", "dev", DEVICE, "congctl", "cubic")

    def wait(self) -> None:
        """Let them go, and wait for all; the first that fails ends the others and raises its exit status."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("up\n")
            process.stdin.flush()
        running = dict(enumerate(self.processes))
        while running:
            for rank, process in list(running.items()):
                status = process.poll()
                if status:
                    raise RuntimeError(f"rank {rank} of {len(self.processes)} ended with status {status}")
                if status == 0:
                    del running[rank]
            time.sleep(0.05)

    def dropped_packets(self) -> int:
        """Packets that the queues of the shaped ports have thrown away since the ranks were started."""
        text = _try("tc", "-s", "qdisc", "show")
        return sum(int(line.split("dropped ")[1].split(",")[0]) for line in text.splitlines() if "dropped " in line)

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for rank, process in enumerate(self.processes):
            process.wait()
            # The kernel would do it, but later than the next ranks want the name.
            subprocess.run(["ip", "link", "delete", f"port{rank}"], capture_output=True, check=False)


def address(rank: int) -> str:
    """Of a rank, on its link."""
    return f"10.77.0.{rank + 1}"


def sent() -> tuple[int, int]:
    """Bytes and packets that this process's own link has carried away from it, as the kernel counts them.

    The same counters as /sys/class/net/wire/statistics, which shows the namespace of whoever mounted it.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        device, _, counts = line.partition(":")
        if device.strip() == DEVICE:
            numbers = counts.split()
            return int(numbers[8]), int(numbers[9])
    raise RuntimeError(f"no device {DEVICE!r} in this process's network namespace")


def _await_namespace(pid: int) -> None:
    """Until `unshare` has done its work in that process."""
    mine = os.readlink("/proc/self/ns/net")
    for _ in range(500):
        try:
            if os.readlink(f"/proc/{pid}/ns/net") != mine:
                return
        except OSError:
            break
        time.sleep(0.01)
    raise UnavailableError(f"process {pid} did not get a network namespace of its own")


def _try(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"`{' '.join(command)}` says: {' '.join(done.stderr.split())}")
    return done.stdout


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
