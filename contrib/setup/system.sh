#!/usr/bin/env bash
# Installs the programs that Fallow's tests and demo start: Slurm's daemons and commands, munge and Redis.
# Where the commands are there already, from packages or built by the site, nothing is touched. SYSTEM=no skips this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=contrib/setup/common.sh
. ./common.sh

# Ordinary users have no sbin on PATH, where the daemons are.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
packages=(slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge redis-server hostname iproute2 procps)
# Only some tests use it, and are skipped without it.
test_packages=(g++)

missing_commands() {
    local name missing=()
    for name in slurmctld slurmd sbatch srun squeue scontrol munged redis-server hostname ip ps; do
        command -v "$name" >/dev/null || missing+=("$name")
    done
    echo "${missing[*]}"
}

if [ "${SYSTEM:-yes}" = no ]; then
    say "leaving system packages alone (SYSTEM=no)"
    exit 0
fi
if { [ -n "$(missing_commands)" ] || ! command -v g++ >/dev/null; } && command -v apt-get >/dev/null; then
    apt_install "${packages[@]}" "${test_packages[@]}" || say "apt-get did not install everything"
fi
missing=$(missing_commands)
if [ -n "$missing" ]; then
    die "commands missing: $missing. Install them with this system's package manager (Debian and Ubuntu call the" \
        "packages ${packages[*]}), then run make setup again; or go on without Slurm: make setup SYSTEM=no"
fi
