# SPDX-License-Identifier: Apache-2.0
"""What a program would run with, for the checks of units and chart."""
import json
import re
import subprocess

SECONDS = {'ms': 0.001, 's': 1, 'm': 60, 'min': 60, 'h': 3600, '': 1}
# What a process does after its patience: ends calls, closes listeners, frees the transport.
STOP_MARGIN_SECONDS = 15


def seconds(text):
    """"1m30s", "90s", "3min" as both systemd and our config write them."""
    parts = re.findall(r'(\d+(?:\.\d+)?)\s*([a-z]*)', text)
    return sum(float(number) * SECONDS[unit] for number, unit in parts)


def effective_config(program, *arguments):
    """The whole configuration under these arguments, or None and a finding in words."""
    run = subprocess.run([program, *arguments, '--print-config'], check=False, capture_output=True,
                         text=True, timeout=60)
    if run.returncode != 0:
        return None, run.stderr.strip()
    return json.loads(run.stdout), None
