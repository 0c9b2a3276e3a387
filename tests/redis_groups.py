"""Real servers in company: a master with replicas under Sentinel, and a Cluster. Each is a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import redis
from log_server import binary
from redis.crc import key_slot
from server import free_port

NOT_KEPT = ("--save", "", "--appendonly", "no")
PATIENCE_S = 60.0
"""On a machine with much else to do; when all is well none of it is used."""


def until(what: str, condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    """Ask until it is so. Servers that are not up (yet) make no condition true."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError, OSError):
            if condition():
                return
        time.sleep(0.02)
    raise TimeoutError(f"{what}: not within {patience_s:g} s")


class Node:
    """One server. It listens on one port over all its starts; ``kill`` is SIGKILL."""

    def __init__(self, directory: Path, *arguments: str, mode: str = "") -> None:
        self.port = free_port()
        self.directory = directory / f"{mode or 'server'}-{self.port}"
        self.directory.mkdir()
        self.admin = redis.Redis(port=self.port, socket_timeout=5)
        self._arguments = arguments
        self._sentinel = mode == "sentinel"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start and wait until it answers."""
        config = self.directory / "server.conf"
        config.touch()
        arguments = ["--port", str(self.port), "--dir", str(self.directory), "--bind", "127.0.0.1", *self._arguments]
        command = [binary(), str(config), *arguments, *(["--sentinel"] if self._sentinel else [])]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        until(f"{self.directory.name} answers", self.admin.ping)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self.admin.close()

    def freeze(self) -> None:
        """Let it neither answer nor die."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def cut_off_replicas(self) -> None:
        """From now on nothing that is written here reaches a replica; Sentinel and clients notice nothing."""
        self.admin.execute_command("ACL", "SETUSER", "default", "-psync", "-sync")
        self.admin.client_kill_filter(_type="replica")

    def replicas_in_step(self, count: int) -> bool:
        info = self.admin.info("replication")
        offset = info["master_repl_offset"]
        return [info.get(f"slave{n}", {}).get("offset") for n in range(count)] == [offset] * count


class _Group(ABC):
    """Servers that begin and end together."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes

    def node(self, port: int) -> Node:
        return next(node for node in self.nodes if node.port == port)

    @abstractmethod
    def _begin(self) -> None:
        """Start the servers and make them one group."""

    def __enter__(self) -> Self:
        try:
            self._begin()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()


class SentinelGroup(_Group):
    """A master, its replicas and three Sentinels that agree within a second or two that it is gone."""

    name = "main"

    def __init__(self, directory: Path, *, replicas: int = 1) -> None:
        self.servers = [Node(directory, *NOT_KEPT, "--repl-diskless-sync-delay", "0") for _ in range(replicas + 1)]
        self.sentinels = [Node(directory, mode="sentinel") for _ in range(3)]
        super().__init__([*self.servers, *self.sentinels])
        places = ",".join(f"127.0.0.1:{node.port}" for node in self.sentinels)
        self.url = f"redis+sentinel://{places}/{self.name}"

    @property
    def master(self) -> Node:
        """The one that Sentinel names now."""
        for sentinel in self.sentinels:
            if sentinel.running:
                (_, port) = sentinel.admin.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
                return self.node(int(port))
        raise RuntimeError("no Sentinel runs")

    def in_step(self) -> bool:
        """Every server that runs and is no master has all that the master has."""
        return self.master.replicas_in_step(sum(node.running for node in self.servers) - 1)

    def _begin(self) -> None:
        first, *replicas = self.servers
        first.start()
        for node in replicas:
            node.start()
            node.admin.execute_command("REPLICAOF", "127.0.0.1", first.port)
        for node in self.sentinels:
            node.start()
            sentinel = node.admin.execute_command
            sentinel("SENTINEL", "MONITOR", self.name, "127.0.0.1", first.port, 2)
            for option, value in (("down-after-milliseconds", 1000), ("failover-timeout", 10_000)):
                sentinel("SENTINEL", "SET", self.name, option, value)
        until("the replicas are in step", self.in_step)
        for node in self.sentinels:
            until("the Sentinels know each other", lambda node=node: self._knows_all(node))

    def _knows_all(self, sentinel: Node) -> bool:
        state = sentinel.admin.sentinel_master(self.name)
        known = int(state["num-other-sentinels"]), int(state["num-slaves"])
        return known == (len(self.sentinels) - 1, len(self.servers) - 1)

    def fail_over(self, gone: Node) -> None:
        """Wait until Sentinel names another master than the one that is gone, which it may have done by now."""
        until("another master is named", lambda: self.master is not gone)


class Cluster(_Group):
    """Three masters with equal shares of the slots, and ``replicas`` (0 or 1) of each."""

    def __init__(self, directory: Path, *, replicas: int = 0) -> None:
        arguments = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500", "--repl-diskless-sync-delay", "0")
        # What is not lost is served on.
        arguments += (*NOT_KEPT, "--cluster-require-full-coverage", "no")

        self._bus_ports: dict[int, int] = {}

        def node() -> Node:
            # By default the nodes speak to each other on the port and 10,000, which may be none.
            bus_port = free_port()
            made = Node(directory, *arguments, "--cluster-port", str(bus_port), mode="cluster")
            self._bus_ports[made.port] = bus_port
            return made

        self.masters = [node() for _ in range(3)]
        self.replicas = [node() for _ in range(3 * replicas)]
        super().__init__([*self.masters, *self.replicas])
        self.url = f"redis+cluster://127.0.0.1:{self.masters[0].port},127.0.0.1:{self.masters[1].port}"

    def _begin(self) -> None:
        for node in self.nodes:
            node.start()
        share = 16384 // 3 + 1
        for number, node in enumerate(self.masters):
            last = min((number + 1) * share, 16384) - 1
            node.admin.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
            # An epoch for each, so that none has to be fought for.
            node.admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        first = self.nodes[0]
        for other in self.nodes[1:]:
            other.admin.execute_command("CLUSTER", "MEET", "127.0.0.1", first.port, self._bus_ports[first.port])
        for node in self.nodes:
            until("all nodes know each other", lambda node=node: self._knows_all(node))
        for master, replica in zip(self.masters, self.replicas, strict=False):
            identity = master.admin.execute_command("CLUSTER", "MYID")
            until("the replica knows its master", lambda r=replica, i=identity: self._replicate(r, i))
        for node in self.nodes:
            until("the Cluster is whole", lambda node=node: self._is_whole(node))
        if self.replicas:
            for master in self.masters:
                until("the replica is in step", lambda node=master: node.replicas_in_step(1))

    def _knows_all(self, node: Node) -> bool:
        return int(self._state(node)["cluster_known_nodes"]) == len(self.nodes)

    @staticmethod
    def _state(node: Node) -> dict[str, str]:
        lines = node.admin.execute_command("CLUSTER", "INFO").decode().split()
        return dict(line.split(":") for line in lines)

    @staticmethod
    def _replicate(replica: Node, identity: bytes) -> bool:
        replica.admin.execute_command("CLUSTER", "REPLICATE", identity)
        return True

    def _is_whole(self, node: Node) -> bool:
        state = self._state(node)
        return (state["cluster_state"], state["cluster_slots_ok"]) == ("ok", "16384")

    def slots(self, asked: Node | None = None) -> list[tuple[int, int, int]]:
        """First slot, last slot and master's port, as a node that runs says."""
        node = asked or next(node for node in self.nodes if node.running)
        ranges = node.admin.execute_command("CLUSTER", "SLOTS")
        return [(first, last, master[1]) for first, last, master, *_ in ranges]

    def holder(self, key: str) -> Node:
        """The master that serves a key."""
        slot = key_slot(key.encode())
        return self.node(next(port for first, last, port in self.slots() if first <= slot <= last))

    def moving(self, tag: str) -> SlotMove:
        """Begin to move the slot of a hash tag to another node."""
        source = self.holder(tag)
        return SlotMove(self, int(key_slot(tag.encode())), source, next(n for n in self.masters if n is not source))

    def flush(self) -> None:
        for node in self.masters:
            node.admin.flushall()


class SlotMove:
    """A slot on its way from one node to another: in between, its keys are in part here and in part there."""

    def __init__(self, cluster: Cluster, slot: int, source: Node, target: Node) -> None:
        self._cluster = cluster
        self._slot = slot
        self._source = source
        self._target = target
        self._to = target.admin.execute_command("CLUSTER", "MYID")
        target.admin.execute_command(
            "CLUSTER", "SETSLOT", slot, "IMPORTING", source.admin.execute_command("CLUSTER", "MYID")
        )
        source.admin.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self._to)

    def key(self, name: str | bytes) -> None:
        """Move one key."""
        self._source.admin.execute_command("MIGRATE", "127.0.0.1", self._target.port, name, 0, 5000)

    def rest(self) -> None:
        """Move all keys that are left, and the slot with them."""
        while keys := self._source.admin.execute_command("CLUSTER", "GETKEYSINSLOT", self._slot, 10):
            for key in keys:
                self.key(key)
        for node in (self._target, *self._cluster.masters):
            node.admin.execute_command("CLUSTER", "SETSLOT", self._slot, "NODE", self._to)
