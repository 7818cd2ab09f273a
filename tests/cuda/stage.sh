# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# shellcheck disable=SC2154,SC2317  # tests/run sets the variables; checks run by name.
# The stage `cuda` of tests/run: nvcc compiles every kernel for both architectures, what ptxas says
# is compared with the record, and the tests of kernels run where a device is. Sourced by tests/run.

cuda_minutes=25  # For all .cu files on two cores, without a cache.

# in_wheels PATH: where that file of NVIDIA's wheels lies in .venv, or nothing.
in_wheels() { find "$root/.venv" -path "*/nvidia/$1" 2>/dev/null | head -n 1; }

# install_wheels PREFIX: those of tests/cuda/requirements.txt that begin so, into .venv.
install_wheels() {
  [ "$install" = yes ] && [ -x "$root/.venv/bin/pip" ] || return 1
  grep "^$1" tests/cuda/requirements.txt >"$scratch/wheels.txt"
  "$root/.venv/bin/pip" install --quiet --disable-pip-version-check --no-deps \
    --requirement "$scratch/wheels.txt" >"$logs/wheels.log" 2>&1 || echo "PyPI cannot be reached"
}

is_nvcc() { [[ $("$1" --version 2>/dev/null) == *"release 13.0,"* ]]; }

# Leaves nvcc 13.0 in `nvcc`: an installed one, else PyPI's. ISTHMUS_NVCC names one, or is "wheels".
find_nvcc() {
  local candidates=("$(command -v nvcc)" /usr/local/cuda-13.0/bin/nvcc /usr/local/cuda/bin/nvcc)
  [ -z "${ISTHMUS_NVCC:-}" ] || candidates=("$ISTHMUS_NVCC")
  for nvcc in "${candidates[@]}" "$(in_wheels cu13/bin/nvcc)"; do
    ! is_nvcc "$nvcc" || return 0
  done
  install_wheels 'nvidia-\(cuda\|nvvm\)' || return 1
  nvcc=$(in_wheels cu13/bin/nvcc)
  is_nvcc "$nvcc"
}

# Leaves a folder with NCCL in `nccl`, or nothing where nvcc's toolkit or the system has its own.
find_nccl() {
  local header toolkit
  nccl=""
  toolkit=$("$nvcc" -v --dryrun none.cu 2>&1 | sed -n 's/^#. TOP=//p')
  for header in "$toolkit/include/nccl.h" /usr/include/nccl.h; do
    [ ! -f "$header" ] || return 0
  done
  [ -n "$(in_wheels nccl/include/nccl.h)" ] || install_wheels nvidia-nccl || return 0
  nccl=$(in_wheels nccl)
}

# Every .cu file for both architectures, warnings as errors.
compile_kernels() {
  local begin seconds
  begin=$(date +%s)
  build build/cuda cuda_objects || return 1
  seconds=$(($(date +%s) - begin))
  echo "all .cu files: $(minutes "$seconds") min with $jobs jobs and ccache"
  [ "$seconds" -le $((cuda_minutes * 60)) ] || { echo "the limit is $cuda_minutes min"; return 1; }
}

stage_cuda() {
  local failed=0 targets
  if ! find_nvcc; then
    if [ "${CI:-}" = true ]; then count failed "no nvcc 13.0"; return 1; fi
    count skipped "no nvcc 13.0: none is installed and PyPI cannot be reached"
    return 0
  fi
  find_nccl
  echo "nvcc: $nvcc"
  configure build/cuda -DISTHMUS_CUDA=nvcc -DISTHMUS_CUDA_ARCHS="90a;120a" -DISTHMUS_WITH_RPC=OFF \
    -DISTHMUS_NVCC="$nvcc" -DISTHMUS_NCCL_ROOT="$nccl" || return 1
  one_case "compile kernels" compile_kernels || return 1
  one_case "compile facts are read" tests/cuda/compile_facts_test.py || failed=1
  tests/cuda/compile_facts.py --tally "$tally" build/cuda "$nvcc" || failed=1
  targets=$(ctest_names build/cuda cuda)
  # shellcheck disable=SC2086  # One word per target.
  one_case "build with nvcc" build build/cuda isthmus-diag $targets || return 1
  # One after another: there is one device, or none, which each case that needs it says.
  run_label build/cuda cuda 1 || failed=1
  return "$failed"
}
