#!/usr/bin/env bash
# Stops where there is no GPU, before gigabytes are downloaded for nothing, and says what torch.compile lacks.
# $1: the virtual environment, which need not be there yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=contrib/setup/common.sh
. contrib/setup/common.sh

lacks() {
    say "$1 is missing: tests and benchmarks with torch.compile will fail. Install it (Debian and Ubuntu: $2)"
}

if [ ! -e /proc/driver/nvidia/version ] && [ ! -e /dev/kfd ] && ! command -v nvidia-smi >/dev/null; then
    die "this machine has no driver for a GPU: no nvidia-smi, /proc/driver/nvidia/version or /dev/kfd." \
        "make test runs the same tests on a stand-in; make setup-gpu prepares the environment without a GPU"
fi
# Triton builds a small extension of Python when it first runs.
[ -n "${CC:-}" ] || command -v gcc >/dev/null || command -v clang >/dev/null || lacks "a C compiler" gcc
python=$1/bin/python
if [ -x "$python" ] || python=$(find_python); then
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("INCLUDEPY"))')/Python.h
    [ -e "$header" ] || lacks "$header" python3-dev
fi
