"""A private RabbitMQ node."""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING

from amqp import Connection

from tests.servers import programs
from tests.servers.process import Process, Server, free_port, wait_until

if TYPE_CHECKING:
    from pathlib import Path

CONFIGURATION = """\
listeners.tcp.1 = 127.0.0.1:{port}
log.console = true
log.console.level = warning
log.file = false
"""

DISK_LIMIT = 50_000_000  # RabbitMQ's own default, in bytes
MORE_THAN_ANY_DISK = 10**18

# The match on ok makes everything else an error here.
ADD_VHOST = """\
ok = rabbit_vhost:add(<<"{name}">>, <<"test">>),
ok = rabbit_auth_backend_internal:set_permissions(
    <<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>)"""
PERMIT_WRITING = """\
ok = rabbit_auth_backend_internal:set_permissions(
    <<"guest">>, <<"{name}">>, <<"^$">>, <<".*">>, <<"^$">>, <<"test">>)"""
RESET = """\
rabbit_networking:close_all_connections("test"),
lists:foreach(fun(Name) -> ok = rabbit_vhost:delete(Name, <<"test">>) end, rabbit_vhost:list_names())"""


class RabbitMQ(Server):
    """A RabbitMQ node with a port mapper (epmd), a cookie and a home of its own."""

    need = programs.RABBITMQ

    def __init__(self, base: Path, *, port: int | None = None, configuration: str = "") -> None:
        """`configuration` stands in the node's rabbitmq.conf, too: lines such as `consumer_timeout = 5000`."""
        super().__init__(base, port=port)
        self._configuration = configuration
        self._mapper = Process(base / "epmd.log")
        self._mapper_port = free_port()
        self._distribution_port = free_port()
        self._cookie = secrets.token_hex(16)

    @property
    def url(self) -> str:
        """URL of the default vhost."""
        return f"pyamqp://guest:guest@127.0.0.1:{self.port}//"

    def prepare(self) -> None:
        """Write the cookie and the configuration."""
        self.data.mkdir()
        cookie = self.base / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)
        (self.base / "rabbitmq.conf").write_text(CONFIGURATION.format(port=self.port) + self._configuration)
        (self.base / "enabled_plugins").write_text("[].\n")

    def environment(self) -> dict[str, str]:
        """A home of its own, and Erlang's own ports on loopback as well."""
        on_loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        return {
            "HOME": str(self.base),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_LOG_BASE": str(self.base),
            "RABBITMQ_CONFIG_FILE": str(self.base / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.base / "rabbitmq-env.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.base / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.base / "enabled_plugins"),
            "RABBITMQ_CTL_ERL_ARGS": on_loopback,
            # Few schedulers: a test node shares its machine with the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{on_loopback} +S 2:2 +sbwt none",
        }

    def command(self) -> list[str]:
        """The node in the foreground."""
        return [programs.path("rabbitmq-server")]

    def start(self) -> None:
        """Start the port mapper if need be, then the node."""
        if not self.container and not self._mapper.running:
            # Started here, and not as a daemon by the node, so that its address and its end are certain.
            mapper = [programs.path("epmd"), "-port", str(self._mapper_port), "-address", "127.0.0.1"]
            self._mapper.start(mapper, cwd=self.base, environment=self.environment(), user=None)
        super().start()

    def kill(self) -> None:
        """SIGKILL the node and its port mapper."""
        super().kill()
        self._mapper.kill()

    def stop(self) -> None:
        """Stop the node gracefully, and then its port mapper."""
        super().stop()
        self._mapper.kill()

    def close(self) -> None:
        """End everything for good."""
        super().close()
        self._mapper.kill()

    def pids(self) -> list[int]:
        """The node's processes and its port mapper's."""
        return [*super().pids(), *self._mapper.pids()]

    def check(self) -> None:
        """Log in."""
        connecting = Connection(f"127.0.0.1:{self.port}", connect_timeout=5, read_timeout=5)
        with closing(connecting) as connection:
            connection.connect()

    def create_vhost(self, name: str) -> str:
        """Create a vhost that guest may use, and return its URL."""
        self.evaluate(ADD_VHOST.format(name=name))
        return f"pyamqp://guest:guest@127.0.0.1:{self.port}/{name}"

    def permit_to_write_alone(self, name: str) -> None:
        """Take the rights to configure and to read in a vhost from its user."""
        self.evaluate(PERMIT_WRITING.format(name=name))

    def delete_vhost(self, name: str) -> None:
        """Delete a vhost with all that is in it, connections too."""
        self.evaluate(f'ok = rabbit_vhost:delete(<<"{name}">>, <<"test">>)')

    def reset(self) -> None:
        """End the alarms, close every connection, and make every vhost anew."""
        self.clear_memory_alarm()
        self.clear_disk_alarm()
        self.evaluate(RESET)
        self.create_vhost("/")

    def raise_memory_alarm(self) -> None:
        """Let the node believe that its memory is full: it blocks whoever publishes. Returns once it does."""
        self._set_memory_limit("0.00001")
        wait_until(lambda: "memory" in self.alarms(), "the memory alarm is raised")

    def clear_memory_alarm(self) -> None:
        """End the alarm. Returns once it has ended."""
        self._set_memory_limit("0.4")
        wait_until(lambda: "memory" not in self.alarms(), "the memory alarm is cleared")

    def raise_disk_alarm(self) -> None:
        """Let the node believe that its disk is full: it blocks whoever publishes. Returns once it does."""
        self._set_disk_limit(MORE_THAN_ANY_DISK)
        wait_until(lambda: "disk" in self.alarms(), "the disk alarm is raised")

    def clear_disk_alarm(self) -> None:
        """End the alarm. Returns once it has ended."""
        self._set_disk_limit(DISK_LIMIT)
        wait_until(lambda: "disk" not in self.alarms(), "the disk alarm is cleared")

    def alarms(self) -> str:
        """The node's alarms as an Erlang term."""
        return self.evaluate("rabbit_alarm:get_alarms()")

    def evaluate(self, expression: str) -> str:
        """Evaluate Erlang inside the node, in milliseconds where rabbitmqctl takes seconds; returns the term."""
        if self.container:
            return self.container.run("rabbitmqctl", "eval", f"{expression}.").strip()
        call = [programs.path("erl_call"), "-sname", self._node, "-c", self._cookie, "-e"]
        done = subprocess.CompletedProcess(call, 1, "", "")

        def answered() -> bool:
            nonlocal done
            done = subprocess.run(
                call,
                input=f"{expression}.\n",
                check=False,
                capture_output=True,
                text=True,
                env={**os.environ, **self.environment()},
            )
            # A busy node may be late for the handshake; then nothing was evaluated.
            return "failed to connect to node" not in done.stderr + done.stdout or not self._may_answer()

        wait_until(answered, "the node lets erl_call in")
        if done.returncode or not done.stdout.startswith("{ok, "):
            raise RuntimeError(f"{expression} failed:\n{done.stdout}{done.stderr}")
        return done.stdout.removeprefix("{ok, ").rstrip().removesuffix("}")

    def _may_answer(self) -> bool:
        """Whether the node runs, as far as can be seen: a copy in another process does not watch it."""
        return self.running if hasattr(self, "process") else True

    def ctl(self, *arguments: str) -> str:
        """Run rabbitmqctl against this node and return what it says; takes about two seconds."""
        if self.container:
            return self.container.run("rabbitmqctl", *arguments)
        command = [programs.path("rabbitmqctl"), "--node", self._node, *arguments]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env={**os.environ, **self.environment()}
        )
        if done.returncode:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def _set_memory_limit(self, share: str) -> None:
        self.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark({share})")

    def _set_disk_limit(self, free_bytes: int) -> None:
        self.evaluate(f"rabbit_disk_monitor:set_disk_free_limit({free_bytes})")

    @property
    def _node(self) -> str:
        # The port makes it unique, for whoever looks at the processes.
        return f"idemp-test-{self.port}@localhost"
