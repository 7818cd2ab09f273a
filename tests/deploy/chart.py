#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks helm/isthmus with the real helm and the real programs.

  chart.py HELM BIN SCRATCH

Lints, renders each file of ci/, and holds what comes out against what the values promise: kinds,
names, replica counts, ports, probes, patience; each rendered config file must be accepted by its
program under the very arguments of its container. Wrong values must be refused. Prints one line per
finding; exit 1 when there is one.
"""
import json
import os
import pathlib
import subprocess
import sys

import yaml
from effective_config import STOP_MARGIN_SECONDS, effective_config, seconds

CHART = pathlib.Path('helm/isthmus')
ROLES = ('router', 'prefill', 'decode')
PORTS = {'router': (7100, 7200), 'prefill': (7101, 7201), 'decode': (7102, 7202)}
MINIMAL = str(CHART / 'ci' / 'minimal-values.yaml')
# Values that must be refused, and a word of the reason.
REFUSED = {
    'a missing image': ([], 'has no default'),
    'a missing volume': (['--set', 'image.repository=a,image.tag=b'], 'checkpoint.volume'),
    'an unknown value': (['-f', MINIMAL, '--set', 'prefil.replicas=3'], 'prefil'),
    'an unknown config key':
        (['-f', MINIMAL, '--set', 'prefill.config.chunk_token=3'], 'chunk_token'),
    'a config value out of range':
        (['-f', MINIMAL, '--set', 'prefill.config.page_tokens=100'], '/prefill/config/page_tokens'),
    'a config key of the chart': (['-f', MINIMAL, '--set', 'decode.config.listen=a'], 'listen'),
    'two routers': (['-f', MINIMAL, '--set', 'router.replicas=2'], '/router/replicas'),
}


class Chart:
    def __init__(self, helm, scratch):
        self.helm = helm
        # Whatever helm keeps stays out of the user's folders.
        self.env = {**os.environ, **{f'HELM_{kind}_HOME': f'{scratch}/helm-{kind.lower()}'
                                     for kind in ('CACHE', 'CONFIG', 'DATA')}}

    def run(self, *arguments):
        return subprocess.run([self.helm, *arguments], check=False, capture_output=True, text=True,
                              timeout=120, env=self.env)

    def render(self, *options):
        """Manifests by (kind, name), or a finding in words."""
        run = self.run('template', 'trial', str(CHART), '--namespace', 'serving', *options)
        if run.returncode != 0:
            return {}, run.stderr.strip()
        found = [one for one in yaml.safe_load_all(run.stdout) if one is not None]
        return {(one['kind'], one['metadata']['name']): one for one in found}, None


def expect(what, got, wanted):
    if got != wanted:
        yield f'{what} is {got}, want {wanted}'


def findings_of_probes(what, container, grpc_port):
    for probe, service in (('startupProbe', 'liveness'), ('livenessProbe', 'liveness'),
                           ('readinessProbe', 'readiness')):
        yield from expect(f'{what} {probe}', container.get(probe, {}).get('grpc'),
                          {'port': grpc_port, 'service': service})


def findings_of_program(what, role, pod, config, binary, scratch):
    """The program under its container's arguments, with the rendered file and an address."""
    container = pod['containers'][0]
    path = scratch / f'{role}.json'
    path.write_text(config, encoding='utf-8')
    arguments = [one.replace('$(POD_IP)', '10.1.2.3') for one in container['args']]
    arguments = [one.replace(f'/etc/isthmus/{role}.json', str(path)) for one in arguments]
    effective, problem = effective_config(binary, *arguments)
    if problem is not None:
        yield f'{what}: {problem}'
        return
    mount = container['volumeMounts'][1]['mountPath']
    wanted = {'listen': f'0.0.0.0:{PORTS[role][0]}', 'checkpoint': mount,
              'metrics_listen': f'0.0.0.0:{PORTS[role][1]}'}
    if role != 'router':
        wanted['routers'] = ['trial-isthmus-registration.serving.svc:7100']
        wanted['advertise'] = f'10.1.2.3:{PORTS[role][0]}'
    for key, value in wanted.items():
        yield from expect(f'{what}: {key}', effective[key], value)
    for key, value in json.loads(config).items():
        if not isinstance(value, dict) and key != 'reservation_lease':
            got = effective[key]
            if got != value and not (isinstance(value, str) and seconds(value) == seconds(got)):
                yield f'{what}: {key} is {got}, want {value} as in the values'
    grace = pod['terminationGracePeriodSeconds']
    patience = seconds(effective['stop_patience'])
    if grace < patience + STOP_MARGIN_SECONDS:
        yield (f'{what}: terminationGracePeriodSeconds is {grace}, want {STOP_MARGIN_SECONDS} s '
               f'more than stop_patience, {patience:g} s')


def findings_of_role(what, role, manifests, values, bin_folder, scratch):
    deployment = manifests.get(('Deployment', f'trial-isthmus-{role}'))
    config_map = manifests.get(('ConfigMap', f'trial-isthmus-{role}'))
    if deployment is None or config_map is None:
        yield f'{what}: no Deployment or no ConfigMap of that name'
        return
    yield from expect(f'{what}: replicas', deployment['spec']['replicas'],
                      values.get(role, {}).get('replicas', 1 if role == 'router' else 2))
    pod = deployment['spec']['template']['spec']
    container = pod['containers'][0]
    labels = deployment['spec']['template']['metadata']['labels']
    yield from expect(f'{what}: selector', deployment['spec']['selector']['matchLabels'], labels)
    yield from expect(f'{what}: command', container['command'], [f'isthmus-{role}'])
    yield from expect(f'{what}: ports', [(one['name'], one['containerPort'])
                                         for one in container['ports']],
                      list(zip(('grpc', 'metrics'), PORTS[role])))
    yield from findings_of_probes(what, container, PORTS[role][0])
    yield from expect(f'{what}: runAsNonRoot', pod['securityContext'].get('runAsNonRoot'), True)
    security = container['securityContext']
    yield from expect(f'{what}: rights',
                      (security.get('readOnlyRootFilesystem'), security['capabilities']['drop'],
                       security.get('allowPrivilegeEscalation')), (True, ['ALL'], False))
    if 'checksum/config' not in deployment['spec']['template']['metadata']['annotations']:
        yield f'{what}: a changed config would restart nothing'
    yield from findings_of_program(what, role, pod, config_map['data'][f'{role}.json'],
                                   bin_folder / f'isthmus-{role}', scratch)


def findings_of_services(what, manifests):
    """Both services reach the router's pods; the workers' one does not wait for readiness."""
    router = manifests[('Deployment', 'trial-isthmus-router')]
    labels = router['spec']['template']['metadata']['labels']
    for name in ('trial-isthmus-router', 'trial-isthmus-registration'):
        service = manifests.get(('Service', name))
        if service is None:
            yield f'{what}: no service {name}'
            continue
        yield from expect(f'{what}: {name} selects', service['spec']['selector'], labels)
        yield from expect(f'{what}: {name} port', service['spec']['ports'][0]['port'], 7100)
    registration = manifests.get(('Service', 'trial-isthmus-registration'), {'spec': {}})['spec']
    yield from expect(f'{what}: registration', (registration.get('clusterIP'),
                                                registration.get('publishNotReadyAddresses')),
                      ('None', True))


def findings_of_values(chart, values_file, bin_folder, scratch):
    what = values_file.name
    values = yaml.safe_load(values_file.read_text(encoding='utf-8'))
    lint = chart.run('lint', '--strict', str(CHART), '-f', str(values_file))
    if lint.returncode != 0:
        yield f'{what}: {lint.stdout}{lint.stderr}'
    manifests, problem = chart.render('-f', str(values_file))
    if problem is not None:
        yield f'{what}: {problem}'
        return
    for role in ROLES:
        yield from findings_of_role(f'{what} {role}', role, manifests, values, bin_folder, scratch)
    yield from findings_of_services(what, manifests)
    kinds = sorted(kind for kind, _ in manifests)
    wanted = ['ConfigMap'] * 3 + ['Deployment'] * 3 + ['Service'] * 2
    if values.get('podDisruptionBudget', {}).get('enabled', True):
        wanted += ['PodDisruptionBudget'] * 3
    if values.get('podMonitor', {}).get('enabled', False):
        wanted += ['PodMonitor']
    yield from expect(f'{what}: kinds', kinds, sorted(wanted))


def findings_of_refusals(chart):
    for what, (options, word) in REFUSED.items():
        _, problem = chart.render(*options)
        if problem is None:
            yield f'{what} was accepted'
        elif word not in problem:
            yield f'{what}: the reason does not say "{word}": {problem}'


def main():
    helm, bin_folder, scratch = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    chart = Chart(helm, scratch)
    found = []
    lint = chart.run('lint', '--strict', str(CHART))
    if lint.returncode != 0:
        found.append(lint.stdout + lint.stderr)
    values_files = sorted((CHART / 'ci').glob('*-values.yaml'))
    for values_file in values_files:
        found += findings_of_values(chart, values_file, bin_folder, scratch)
    scaled, _ = chart.render('-f', MINIMAL, '--set', 'prefill.replicas=7,decode.replicas=0')
    for role, replicas in (('prefill', 7), ('decode', 0)):
        deployment = scaled.get(('Deployment', f'trial-isthmus-{role}'), {'spec': {}})
        found += expect(f'{role} with --set', deployment['spec'].get('replicas'), replicas)
    found += findings_of_refusals(chart)
    print('\n'.join(found) if found else
          f'{len(values_files)} sets of values render, {len(REFUSED)} are refused')
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
