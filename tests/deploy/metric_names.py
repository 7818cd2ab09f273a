#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that what dashboards, rules and the runbook name is exported, and the other way round.

  metric_names.py METRICS...

METRICS are the texts of /metrics of the three processes; with the headers that list the metrics
they say what exists. Prints one line per finding; exit 1 when there is one.
"""
import json
import pathlib
import re
import sys

import yaml

HEADERS = ('router/router_metrics.h', 'services/worker/worker_metrics.h')
RULES = 'deploy/prometheus/isthmus.rules.yml'
RUNBOOK = 'deploy/runbook.md'
# What nobody has to look at all the time.
UNWATCHED = {
    'isthmus_prefill_prompts_total', 'isthmus_prefill_failures_total',  # As the router's requests.
    'isthmus_prefill_push_seconds', 'isthmus_decode_verified_page_groups_total',
    'isthmus_decode_early_ends_total',  # As the router's failures.
    'isthmus_worker_step_sequences', 'isthmus_worker_transfers',
    'isthmus_worker_prefix_tokens', 'isthmus_worker_registered_routers'}
NAME = re.compile(r'\bisthmus_(?:router|prefill|decode|worker|build)_[a-z0-9_]+')
SPEC = re.compile(r'constexpr MetricSpec k\w+ = \{\s*\.name\s*=\s*"([a-z0-9_]+)",\s*'
                  r'\.kind\s*=\s*MetricKind::k(\w+).*?\.labels\s*=\s*(\{\}|\w+)', re.DOTALL)
SUFFIX = {'histogram': ('_bucket', '_sum', '_count'), 'counter': ('',), 'gauge': ('',)}


def in_headers():
    """Names of all series, and of those without labels, which exist from the start."""
    names, plain = {'isthmus_build_info'}, set()
    for header in HEADERS:
        text = pathlib.Path(header).read_text(encoding='utf-8')
        specs = SPEC.findall(text)
        if len(specs) != text.count('constexpr MetricSpec k'):
            raise ValueError(f'{header}: not every MetricSpec has name, kind and labels')
        for name, kind, labels in specs:
            series = {name + suffix for suffix in SUFFIX[kind.lower()]}
            names |= series
            if labels == '{}':
                plain |= series
    return names, plain


def bases():
    """Names as the headers have them."""
    return {name for header in HEADERS
            for name, _, _ in SPEC.findall(pathlib.Path(header).read_text(encoding='utf-8'))}


def exported(paths):
    names = set()
    for path in paths:
        for line in pathlib.Path(path).read_text(encoding='utf-8').splitlines():
            if line.startswith('# TYPE isthmus_'):
                _, _, name, kind = line.split()
                names |= {name + suffix for suffix in SUFFIX[kind]}
    return names


def expressions():
    """(place, expression) of everything that is asked of Prometheus."""
    for group in yaml.safe_load(pathlib.Path(RULES).read_text(encoding='utf-8'))['groups']:
        for rule in group['rules']:
            yield f"{RULES} {rule['alert']}", rule['expr']
    for board in sorted(pathlib.Path('deploy/grafana').glob('*.json')):
        for panel in json.loads(board.read_text(encoding='utf-8'))['panels']:
            for target in panel.get('targets', []):
                yield f"{board} \"{panel['title']}\"", target['expr']


def findings(known, plain, paths):
    for place, expression in expressions():
        found = NAME.findall(expression)
        if not found and 'up{' not in expression:
            yield f'{place}: asks for no metric of ours: {expression}'
        for name in found:
            if name not in known:
                yield f'{place}: no metric {name}'
    runbook = pathlib.Path(RUNBOOK).read_text(encoding='utf-8')
    for name in set(NAME.findall(runbook)) - {name.rsplit('_bucket')[0] for name in known}:
        # Histograms are named there without their suffixes.
        if name + '_count' not in known:
            yield f'{RUNBOOK}: no metric {name}'
    for group in yaml.safe_load(pathlib.Path(RULES).read_text(encoding='utf-8'))['groups']:
        for rule in group['rules']:
            if f"### {rule['alert']}" not in runbook:
                yield f"{RUNBOOK}: says nothing about the alert {rule['alert']}"
    asked = {name for _, expression in expressions() for name in NAME.findall(expression)}
    asked |= set(NAME.findall(runbook))
    for name in sorted(bases() - UNWATCHED):
        if not asked & {name + suffix for suffix in SUFFIX['histogram'] + ('',)}:
            yield f'{name} is on no board, in no rule and not in the runbook'
    here = exported(paths)
    for name in sorted(plain - here):
        yield f'{name} is in a header and no process exports it'
    for name in sorted(here - known):
        yield f'{name} is exported and in no header'


def main():
    known, plain = in_headers()
    found = list(findings(known, plain, sys.argv[1:]))
    print('\n'.join(found) if found else f'{len(known)} series; what is asked for exists')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
