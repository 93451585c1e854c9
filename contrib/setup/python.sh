#!/usr/bin/env bash
# Makes the virtual environment named by $1 and installs Fallow into it, editable, with everything its tests need.
# PYTHON=/path/to/python3.x chooses the interpreter. pip's own configuration chooses the index and the build of torch;
# TORCH_INDEX=URL names an index with another build of the same version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=contrib/setup/common.sh
. contrib/setup/common.sh

venv=$1
# An index that hangs must not hang CI; a CUDA build of torch is several GB.
pip=(timeout 1800 "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-input)

# A name on PATH may be a shim without an interpreter behind it, and Debian ships venv without ensurepip: try it.
usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if usable "$name"; then
            echo "$name"
            return
        fi
    done
    return 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! python=$(find_python) && [ "${SYSTEM:-yes}" != no ] && command -v apt-get >/dev/null; then
        apt_install python3 python3-venv || say "apt-get did not install everything"
    fi
    [ -n "${python:-}" ] || python=$(find_python) ||
        die "found no Python >= 3.11 with venv. Install one (Debian and Ubuntu: python3 and python3-venv)" \
            "or name it: make setup PYTHON=/path/to/python3.12"
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi

# torch first: it is by far the largest, and everything after it finds it in place.
say "installing Python packages into $venv (minutes at first)"
"${pip[@]}" -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
"${pip[@]}" -c constraints.txt -e ".[torch,tui,sim,dev]"
say "done"
