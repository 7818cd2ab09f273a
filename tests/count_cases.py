#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the GoogleTest cases of one ctest run.

  count_cases.py JUNIT_XML GTEST_DIR TALLY_FILE

JUNIT_XML is what ctest wrote (one entry per binary), GTEST_DIR holds what the binaries wrote (one
entry per case). Appends `passed`, `failed NAME` and `skipped REASON` lines to TALLY_FILE. A binary
that died before it could report, and a test that is not GoogleTest, count as one case.
"""
import pathlib
import sys
import xml.etree.ElementTree as ElementTree


def cases_of(path):
    """One (state, text) per case of a GoogleTest report."""
    for case in ElementTree.parse(path).iter('testcase'):
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find('skipped')
        if case.find('failure') is not None:
            yield 'failed', name
        elif skipped is not None or case.get('result') == 'skipped':
            message = skipped.get('message', '') if skipped is not None else ''
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            # The first line is the source's place; the reason follows.
            reason = ' '.join(lines[1:] if len(lines) > 1 else lines) or 'no reason given'
            yield 'skipped', reason
        elif case.get('status') == 'run':
            yield 'passed', name


def main():
    junit, folder, tally = sys.argv[1:]
    reports = {path.stem: path for path in sorted(pathlib.Path(folder).glob('*.xml'))}
    lines = []
    for path in reports.values():
        for state, text in cases_of(path):
            lines.append(state if state == 'passed' else f'{state} {text}')
    reported_failures = any(line.startswith('failed') for line in lines)
    for entry in ElementTree.parse(junit).iter('testcase'):
        # A nightly entry runs the binary of its daily test with other settings.
        name = entry.get('name').replace('_nightly', '_test')
        failed = entry.get('status') not in ('run', 'notrun', 'disabled')
        if entry.get('status') in ('notrun', 'disabled'):
            lines.append(f'failed {name} (not run)')
        elif name not in reports:
            lines.append(f'failed {name} (no report)' if failed else 'passed')
        elif failed and not any(state == 'failed' for state, _ in cases_of(reports[name])):
            lines.append(f'failed {name} (died or leaked after its cases)')
    with open(tally, 'a', encoding='utf-8') as out:
        out.writelines(line + '\n' for line in lines)
    return 1 if reported_failures or any(line.startswith('failed') for line in lines) else 0


if __name__ == '__main__':
    sys.exit(main())
