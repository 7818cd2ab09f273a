#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the three programs as a service manager would, and keeps what they export.

  servers.py BIN CHECKPOINT OUT

Each program gets a notify socket. It must say that it is ready, then that it is alive; together
they answer a chat; each serves /metrics (kept as OUT/<program>.metrics), says that it stops after
SIGTERM and exits with 0. Prints one line per finding; exit 1 when there is one. Every wait is
bounded.
"""
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request

PROGRAMS = ('isthmus-router', 'isthmus-prefill', 'isthmus-decode')
PATIENCE_SECONDS = 30


class Server:
    """One program, its notify socket and what it has said there."""

    def __init__(self, folder, name, assignments):
        self.name = name
        self.said = []
        self.metrics_port = free_port()
        self.folder = folder
        path = str(folder / f'{name}.notify')
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(path)
        command = [binary_of(name), '--set', 'listen=127.0.0.1:0',
                   '--set', f'address_file={folder / name}.address', '--set', 'stop_patience=5s',
                   '--set', f'metrics_listen=127.0.0.1:{self.metrics_port}']
        for assignment in assignments:
            command += ['--set', assignment]
        self.log = folder / f'{name}.log'
        with open(self.log, 'wb') as log:
            self.child = subprocess.Popen(command, stderr=log, stdout=log,
                                          env={**os.environ, 'NOTIFY_SOCKET': path})

    def hear(self, wanted, seconds=PATIENCE_SECONDS):
        """Whether a message that starts with `wanted` comes in time; the dead say nothing more."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.child.poll() is None:
            self.socket.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                self.said.append(self.socket.recv(4096).decode())
                if self.said[-1].startswith(wanted):
                    return True
        return False

    def address(self):
        return (self.folder / f'{self.name}.address').read_text(encoding='utf-8').strip()

    def end(self):
        self.socket.close()
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()


def binary_of(name):
    return str(pathlib.Path(sys.argv[1]) / name)


def free_port():
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def metrics_of(port):
    with urllib.request.urlopen(f'http://127.0.0.1:{port}/metrics', timeout=10) as reply:
        return reply.read().decode()


def findings_of_start(server):
    if not server.hear('READY=1'):
        yield f'{server.name}: not ready within {PATIENCE_SECONDS} s, said {server.said[-3:]}'
        return
    if not server.hear('WATCHDOG=1', 10):
        yield f'{server.name}: no word that it is alive within 10 s, said {server.said[-3:]}'


def control(router, *arguments):
    return subprocess.run([binary_of('isthmusctl'), '--server', router.address(), *arguments],
                          check=False, capture_output=True, text=True, timeout=60)


def findings_of_use(router):
    """One chat, so that the metrics have seen a request."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while '"is_ready":true' not in control(router, 'status', '--json').stdout.replace(' ', ''):
        if time.monotonic() > deadline or router.child.poll() is not None:
            yield f'{router.name}: not ready {PATIENCE_SECONDS} s after its workers'
            return
        time.sleep(0.05)
    run = control(router, 'chat', '--message', 'Hello.')
    if run.returncode != 0 or not run.stdout.strip():
        yield f'isthmusctl chat: exit {run.returncode}, {run.stdout} {run.stderr}'


def findings_of_metrics(server, out):
    try:
        text = metrics_of(server.metrics_port)
    except OSError as error:
        yield f'{server.name}: no metrics: {error}'
        return
    (out / f'{server.name}.metrics').write_text(text, encoding='utf-8')


def findings_of_stop(server):
    server.child.send_signal(signal.SIGTERM)
    if not server.hear('STOPPING=1'):
        yield f'{server.name}: SIGTERM, and no STOPPING=1; said {server.said[-3:]}'
    try:
        code = server.child.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        yield f'{server.name}: still runs {PATIENCE_SECONDS} s after SIGTERM'
        return
    if code != 0:
        yield f'{server.name}: exit {code} after SIGTERM'


def main():
    checkpoint = pathlib.Path(sys.argv[2]).resolve()
    out = pathlib.Path(sys.argv[3])
    found = []
    servers = []
    try:
        for name in PROGRAMS:
            assignments = [f'checkpoint={checkpoint}']
            if servers:  # The router came first; workers register with it.
                assignments += [f'routers={servers[0].address()}', 'cache_tokens=4096']
            servers.append(Server(out, name, assignments))
            found += findings_of_start(servers[-1])
            if found:
                break
        if not found:
            found += findings_of_use(servers[0])
            for server in servers:
                found += findings_of_metrics(server, out)
        for server in reversed(servers):
            found += findings_of_stop(server)
    finally:
        for server in servers:
            server.end()
    for server in servers if found else []:
        print(f'{server.name}: {server.log.read_text(encoding="utf-8")[-2000:]}')
    print('\n'.join(found) if found else f'{len(servers)} servers start, serve metrics and stop')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
