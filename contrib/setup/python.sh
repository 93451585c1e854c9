#!/usr/bin/env bash
# Makes the virtual environment named by $1 and installs Fallow into it, editable, with everything its tests need.
# PYTHON=/path/to/python3.x chooses the interpreter. pip's own configuration chooses the index and the build of torch;
# TORCH_INDEX=URL names the one index from which torch itself comes: another build of the same version.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=contrib/setup/common.sh
. contrib/setup/common.sh

venv=$1
# An index that hangs must not hang CI; a CUDA build of torch is several GB.
pip=(timeout 1800 "$venv/bin/python" -m pip --disable-pip-version-check install -q --no-input)

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
torch=$(grep '^torch==' constraints.txt)
if [ -n "${TORCH_INDEX:-}" ]; then
    # pip takes a build for processors without a word if that is the one it finds, and an --index-url on its command
    # line leaves the further places of its configuration in use. The variables replace those places.
    PIP_INDEX_URL=$TORCH_INDEX PIP_EXTRA_INDEX_URL=$TORCH_INDEX PIP_FIND_LINKS=$TORCH_INDEX "${pip[@]}" --no-deps "$torch" ||
        die "pip got no $torch from $TORCH_INDEX, see above. TORCH_INDEX=URL names another index"
fi
# What torch depends on may be on its index alone.
"${pip[@]}" -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch"
"${pip[@]}" -c constraints.txt -e ".[torch,tui,dev]"
say "done"
