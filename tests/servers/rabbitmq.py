"""A private RabbitMQ node, with a port mapper, a cookie and a home of its own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import trustme
from amqp import Connection

from tests.servers.process import Server, find, free_port, wait_until

BIN = Path("/usr/lib/rabbitmq/bin")  # not the wrappers on the path, which change the user


class Rabbitmq(Server):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.tls_port, self.authority = free_port(), base / "ca.pem"
        self._mapper_port, self._distribution_port = free_port(), free_port()
        self._mapper: subprocess.Popen[bytes] | None = None
        self._cookie = secrets.token_hex(16)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def prepare(self) -> None:
        find("rabbitmq-server", "rabbitmq-server", str(BIN))
        cookie = self.base / ".erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)
        authority, certificate = trustme.CA(), self.base / "certificate.pem"
        authority.cert_pem.write_to_path(self.authority)
        authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(certificate)
        settings = {
            "listeners.tcp.1": f"127.0.0.1:{self.port}",
            "listeners.ssl.1": f"127.0.0.1:{self.tls_port}",
            "ssl_options.cacertfile": self.authority,
            "ssl_options.certfile": certificate,
            "ssl_options.keyfile": certificate,
            "log.console": "true",
            "log.console.level": "warning",
            "log.file": "false",
        }
        (self.base / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        (self.base / "enabled_plugins").write_text("[].\n")

    def environment(self) -> dict[str, str]:
        loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
        return {
            "HOME": str(self.base),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._mapper_port),
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.base / "data"),
            "RABBITMQ_LOG_BASE": str(self.base),
            "RABBITMQ_CONFIG_FILE": str(self.base / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.base / "none"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.base / "none.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.base / "enabled_plugins"),
            "RABBITMQ_CTL_ERL_ARGS": loopback,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{loopback} +S 2:2 +sbwt none",
        }

    def start(self) -> None:
        if self._mapper is None:  # as a daemon of the node, it would outlive it
            command = [str(find("epmd", "rabbitmq-server")), "-port", str(self._mapper_port), "-address", "127.0.0.1"]
            self._mapper = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        super().start()

    def command(self) -> Sequence[str]:
        return [str(BIN / "rabbitmq-server")]

    def check(self) -> object:
        with closing(Connection(f"127.0.0.1:{self.port}", connect_timeout=5, read_timeout=5)) as connection:
            return connection.connect()

    def create_vhost(self) -> str:
        """Create a virtual host, and return its URL."""
        name = f"test{secrets.token_hex(6)}"
        self.evaluate(
            f'ok = rabbit_vhost:add(<<"{name}">>, <<"test">>), ok = rabbit_auth_backend_internal:set_permissions('
            f'<<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"test">>)'
        )
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{name}"

    def delete_vhost(self, url: str) -> str:
        """Delete a virtual host with its connections."""
        return self.evaluate(f'ok = rabbit_vhost:delete(<<"{url.rpartition("/")[2]}">>, <<"test">>)')

    def close_connections(self, url: str) -> str:
        """Close all connections to a virtual host, as a broker does that restarts."""
        ours = f'rabbit_reader:info(Each, [vhost]) =:= [{{vhost, <<"{url.rpartition("/")[2]}">>}}]'
        return self.evaluate(
            f'[rabbit_networking:close_connection(Each, "test") || Each <- rabbit_networking:connections(), {ours}]'
        )

    def add_user(self, name: str, configure: str) -> str:
        """Create a user who may read and write everything, and configure what matches a pattern."""
        return self.evaluate(
            f'ok = rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"{name}">>, <<"test">>), '
            f'ok = rabbit_auth_backend_internal:set_permissions(<<"{name}">>, <<"/">>, <<"{configure}">>, <<".*">>, <<".*">>, '
            '<<"test">>)'
        )

    def consumer_timeout(self, milliseconds: int) -> str:
        """Limit how long new channels wait for an acknowledgement."""
        return self.evaluate(
            f"application:set_env(rabbit, consumer_timeout, {milliseconds}), application:set_env(rabbit, channel_tick_interval, 200)"
        )

    def alarm(self, raised: str) -> str:
        """Raise or clear the memory alarm."""
        share = "0.00001" if raised == "on" else "0.4"
        self.evaluate(f"vm_memory_monitor:set_vm_memory_high_watermark({share})")
        wait_until(lambda: ("memory" in self.evaluate("rabbit_alarm:get_alarms()")) == (raised == "on"), "the alarm")
        return ""

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl."""
        environment = {**os.environ, **self.environment()}
        done = subprocess.run(
            [str(BIN / "rabbitmqctl"), *arguments], capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return done.stdout

    def evaluate(self, expression: str) -> str:
        """Evaluate Erlang in the node, in milliseconds where rabbitmqctl takes seconds."""
        call = [str(find("erl_call", "rabbitmq-server")), "-sname", f"test{self.port}@localhost", "-c", self._cookie, "-e"]
        answer = ""

        def answered() -> bool:
            nonlocal answer
            environment = {**os.environ, **self.environment()}
            done = subprocess.run(call, input=f"{expression}.\n", capture_output=True, text=True, env=environment, check=False)
            answer = done.stdout + done.stderr
            return "failed to connect" not in answer

        wait_until(answered, "an answer of the node")
        if not answer.startswith("{ok, "):
            raise RuntimeError(f"{expression}: {answer}")
        return answer.removeprefix("{ok, ").rstrip().removesuffix("}")

    def kill(self) -> None:
        super().kill()
        if self._mapper is not None:
            self._mapper.send_signal(signal.SIGKILL)
            self._mapper.wait(60)
            self._mapper = None
