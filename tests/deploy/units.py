#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the systemd units of a staged root against the example configs beside them.

  units.py ROOT

`systemd-analyze verify` knows what a unit may say; this knows what ours must say: that the manager
is told ready and alive, that stopping is patient enough, and that each program accepts its example.
Prints one line per finding; exit 1 when there is one.
"""
import pathlib
import sys

from effective_config import STOP_MARGIN_SECONDS, effective_config, seconds

UNITS = {
    'isthmus-router.service': ('isthmus-router', 'router.json'),
    'isthmus-prefill@.service': ('isthmus-prefill', 'prefill-0.json'),
    'isthmus-decode@.service': ('isthmus-decode', 'decode-0.json'),
}


def settings_of(path):
    """All assignments of a unit; a key may come more than once."""
    settings = {}
    for line in path.read_text(encoding='utf-8').splitlines():
        if line and line[0] not in '#[':
            key, value = line.split('=', 1)
            settings.setdefault(key, []).append(value)
    return settings


def findings_of(root, unit):
    program, example = UNITS[unit]
    settings = settings_of(root / 'usr/lib/systemd/system' / unit)
    wanted = {'Type': 'notify', 'KillSignal': 'SIGTERM', 'Restart': 'on-failure',
              'RestartPreventExitStatus': '2', 'User': 'isthmus', 'NoNewPrivileges': 'yes',
              'ProtectSystem': 'strict', 'WantedBy': 'multi-user.target'}
    for key, value in wanted.items():
        if settings.get(key) != [value]:
            yield f'{unit}: {key} is {settings.get(key)}, want {value}'
    config_name = example.replace('-0.', '-%i.')
    command = f'/usr/bin/{program} --config /etc/isthmus/{config_name}'
    if settings.get('ExecStart') != [command]:
        yield f"{unit}: ExecStart is {settings.get('ExecStart')}, want {command}"

    path = root / 'usr/share/isthmus/examples' / example
    config, problem = effective_config(root / 'usr/bin' / program, '--config', path)
    if problem is not None:
        yield f'{path}: {problem}'
        return
    patience = seconds(config['stop_patience'])
    stop = seconds(settings['TimeoutStopSec'][0])
    if stop < patience + STOP_MARGIN_SECONDS:
        yield (f'{unit}: TimeoutStopSec is {stop:g} s, want {STOP_MARGIN_SECONDS} s more than '
               f'stop_patience of {example}, {patience:g} s')
    stuck = seconds(config.get('liveness_timeout', '0'))
    watchdog = seconds(settings['WatchdogSec'][0])
    if not 5 <= watchdog <= 600:
        yield f'{unit}: WatchdogSec is {watchdog:g} s'
    if stuck > 600:
        yield f'{example}: liveness_timeout is {stuck:g} s; a stuck worker stays for so long'


def main():
    root = pathlib.Path(sys.argv[1])
    found = [finding for unit in UNITS for finding in findings_of(root, unit)]
    print('\n'.join(found) if found else f'{len(UNITS)} units agree with their examples')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
