# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by deploy/demo and tests/run: installs the Debian packages of deploy/packages that are
# missing. The caller has set `root` to the project's folder.

# packages_of GROUP...: the names in those groups.
packages_of() {
  local group
  : "${root:?set by the caller}"
  for group in "$@"; do
    awk -v group="$group" '$1 == group { print $2 }' "$root/deploy/packages"
  done
}

# missing_packages NAME...: those that dpkg does not know as installed.
missing_packages() {
  local name
  for name in "$@"; do
    dpkg-query -W -f='${db:Status-Abbrev}' "$name" 2>/dev/null | grep -q '^ii' || echo "$name"
  done
}

# install_packages yes|no GROUP...: with "no" it only says what is missing. Needs no network and
# no rights when everything is there.
install_packages() {
  local allowed=$1 missing sudo=""
  shift
  if ! command -v dpkg-query >/dev/null; then
    echo "isthmus: no dpkg here; other distributions than Debian 12 are untested" >&2
    return 0
  fi
  # shellcheck disable=SC2046  # One word per package.
  missing=$(missing_packages $(packages_of "$@") | tr '\n' ' ')
  [ -n "$missing" ] || return 0
  [ "$(id -u)" -eq 0 ] || sudo=sudo
  echo "isthmus: missing packages; the line to install them:"
  echo "  ${sudo:+sudo }apt-get install -y --no-install-recommends $missing"
  [ "$allowed" = yes ] || { echo "isthmus: not installing (--no-install)"; return 0; }
  if [ -n "$sudo" ] && ! command -v sudo >/dev/null; then
    echo "isthmus: neither root nor sudo; run the line above as root" >&2
    return 1
  fi
  $sudo apt-get update -q
  # shellcheck disable=SC2086  # One word per package.
  $sudo env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends $missing
}

# A number of parallel jobs that fits memory: g++ on a gRPC unit takes about 1 GB.
build_jobs() {
  local cores gigabytes
  cores=$(nproc)
  gigabytes=$(awk '/MemAvailable/ { print int($2 / 1000000) }' /proc/meminfo)
  [ "$gigabytes" -ge 1 ] || gigabytes=1
  echo $((cores < gigabytes ? cores : gigabytes))
}
