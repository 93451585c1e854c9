# Shared by the set-up scripts; sourced, not run.

say() {
    printf 'setup: %s\n' "$*" >&2
}

die() {
    say "$*"
    exit 1
}

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

# Runs a command as root. sudo asks for a password on the terminal itself; in CI nobody would answer.
as_root() {
    if [ "$(id -u)" -eq 0 ]; then
        "$@"
    elif ! command -v sudo >/dev/null; then
        say "not root, and there is no sudo: cannot run: $*"
        return 1
    elif [ -n "${CI:-}" ]; then
        sudo -n "$@"
    else
        sudo "$@"
    fi
}

# Debian's packages may start services of their own. Fallow starts private ones on other ports and sockets and
# leaves those alone, so whether they come up here does not matter.
apt_install() {
    local apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)
    say "installing $*"
    as_root "${apt[@]}" update || say "apt-get update failed; trying with the package lists at hand"
    as_root "${apt[@]}" install -y --no-install-recommends "$@"
}
