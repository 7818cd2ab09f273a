#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Facts about kernels that no device is needed for: registers, spills, stack and shared memory.

  compile_facts.py [--record] [--tally FILE] BUILD_FOLDER NVCC

BUILD_FOLDER was built with ISTHMUS_CUDA=nvcc, so that it holds what ptxas reported for each object.
A spill, and more static shared memory than a block of sm_120 has, is always a finding. When NVCC
has the version that compile_facts.json was recorded with, so are kernels that it lacks or has too
many, a stack or shared memory that grew, and more than 8 registers more; with another version that
comparison is skipped.
Prints one line per finding; --tally appends `passed`, `failed ...` and `skipped ...` lines to FILE.
Exits 0 without findings. --record writes compile_facts.json from this build instead.
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = pathlib.Path(__file__).with_name('compile_facts.json')
MAX_SHARED_BYTES = 101376  # kMaxSharedBytes of kernels/core/launch.cuh.
MAX_MORE_REGISTERS = 8

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
PROPERTIES = re.compile(r'Function properties for (\S+)')
FRAME = re.compile(
    r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads')
REGISTERS = re.compile(r'Used (\d+) registers')
SHARED = re.compile(r'(\d+) bytes smem')


def facts_of(text):
    """{(mangled name, architecture): facts} of one report."""
    facts = {}
    current = None
    # Functions that were not inlined have properties of their own, between those of kernels.
    described = None
    for line in text.splitlines():
        if match := ENTRY.search(line):
            current = match.groups()
            facts[current] = {'registers': 0, 'stack': 0, 'spills': 0, 'shared': 0}
        elif match := PROPERTIES.search(line):
            described = match.group(1)
        elif current is None:
            continue
        elif match := FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            facts[current]['spills'] += stores + loads
            if described == current[0]:
                facts[current]['stack'] = stack
        elif match := REGISTERS.search(line):
            facts[current]['registers'] = int(match.group(1))
            if match := SHARED.search(line):
                facts[current]['shared'] = int(match.group(1))
    return facts


def readable(mangled):
    """Names without parameters and without what all kernels have in common."""
    if not mangled:
        return []
    said = subprocess.run(['c++filt', '-p'], input='\n'.join(mangled), text=True, check=True,
                          stdout=subprocess.PIPE).stdout.splitlines()
    return [re.sub(r'isthmus::|kernels::|\(anonymous namespace\)::', '', name) for name in said]


def read_build(folder):
    """{source: {kernel: {architecture: facts}}} of all objects of the libraries."""
    kernels = {}
    for line in (folder / 'ptxas_reports').read_text(encoding='utf-8').splitlines():
        source, report = line.split()
        facts = facts_of(pathlib.Path(report).read_text(encoding='utf-8'))
        names = readable([mangled for mangled, _ in facts])
        of_source = {}
        for (name, (mangled, arch)) in zip(names, facts):
            by_arch = of_source.setdefault(name, {})
            if arch in by_arch:
                sys.exit(f'{source}: two kernels are called {name}')
            by_arch[arch] = facts[mangled, arch]
        kernels[str(pathlib.Path(source).relative_to(ROOT))] = of_source
    return kernels


def rows(kernels):
    """{(source, kernel, architecture): facts}."""
    return {(source, name, arch): facts
            for source, names in kernels.items()
            for name, by_arch in names.items()
            for arch, facts in by_arch.items()}


def title(row):
    source, name, arch = row
    return f'{source}: {name} on {arch}'


def by_kernel(found):
    """One ("source: kernel", "architectures") per kernel."""
    archs = {}
    for source, name, arch in sorted(found):
        archs.setdefault(f'{source}: {name}', []).append(arch)
    return [(kernel, ' and '.join(of_kernel)) for kernel, of_kernel in archs.items()]


def limits_broken(built):
    """What no kernel may have."""
    for row, facts in built.items():
        if facts['spills']:
            yield f"{title(row)} spills {facts['spills']} bytes"
        if facts['shared'] > MAX_SHARED_BYTES:
            yield f"{title(row)} has {facts['shared']} bytes of shared memory, over " \
                  f'{MAX_SHARED_BYTES}'


def differences(built, recorded):
    """What calls for a new record, or for another look at the kernel."""
    for kernel, archs in by_kernel(recorded.keys() - built.keys()):
        yield f'{kernel} on {archs} is recorded and was not built'
    for kernel, archs in by_kernel(built.keys() - recorded.keys()):
        yield f'{kernel} on {archs} is not recorded'
    for row in sorted(built.keys() & recorded.keys()):
        now, then = built[row], recorded[row]
        if now['registers'] > then['registers'] + MAX_MORE_REGISTERS:
            yield f"{title(row)} has {now['registers']} registers, recorded {then['registers']}"
        if now['stack'] > then['stack']:
            yield f"{title(row)} has {now['stack']} bytes of stack, recorded {then['stack']}"
        if now['shared'] > then['shared']:
            yield f"{title(row)} has {now['shared']} bytes of shared memory, recorded " \
                  f"{then['shared']}"


def version_of(nvcc):
    said = subprocess.run([nvcc, '--version'], text=True, check=True, stdout=subprocess.PIPE).stdout
    return re.search(r'V(\d+\.\d+\.\d+)', said).group(1)


def write_record(kernels, version):
    """One line per kernel, so that a change reads well in a diff. There are no spills to record."""
    lines = []
    for source, names in sorted(kernels.items()):
        kept = {name: {arch: {key: facts[key] for key in ('registers', 'stack', 'shared')}
                       for arch, facts in sorted(by_arch.items())}
                for name, by_arch in names.items()}
        inner = [f'      {json.dumps(name)}: {json.dumps(by_arch)}'
                 for name, by_arch in sorted(kept.items())]
        lines.append(f'    {json.dumps(source)}: {{\n' + ',\n'.join(inner) + '\n    }')
    RECORD.write_text(f'{{\n  "nvcc": {json.dumps(version)},\n  "kernels": {{\n' +
                      ',\n'.join(lines) + '\n  }\n}\n', encoding='utf-8')


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split('\n\n')[1].strip())
    parser.add_argument('--record', action='store_true')
    parser.add_argument('--tally')
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('nvcc')
    args = parser.parse_args()

    kernels = read_build(args.folder)
    built = rows(kernels)
    version = version_of(args.nvcc)
    findings = list(limits_broken(built))
    tally = ['failed ' + finding for finding in findings] or ['passed']
    if args.record:
        write_record(kernels, version)
    else:
        record = json.loads(RECORD.read_text(encoding='utf-8')) if RECORD.exists() else {}
        if record.get('nvcc') == version:
            found = list(differences(built, rows(record['kernels'])))
            tally += ['failed ' + finding for finding in found] or ['passed']
            findings += found
        else:
            tally.append(f"skipped compile facts are recorded for nvcc {record.get('nvcc')}, "
                         f'this is {version}')
    for finding in findings:
        print(finding)
    print(f'compile facts: {len(built)} of kernel and architecture, {len(findings)} findings')
    if args.tally:
        with open(args.tally, 'a', encoding='utf-8') as out:
            out.writelines(line + '\n' for line in tally)
    return 1 if findings else 0


if __name__ == '__main__':
    sys.exit(main())
