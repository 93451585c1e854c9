"""A private, real Slurm on one host: for tests, for the demonstration and for trying things out.

Slurm's daemons and MUNGE must be installed, but neither configured nor running. On Debian and Ubuntu:
`slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge`. Works for an ordinary user and for root, without
systemd, without accounting and without touching a Slurm that the host may have.
"""
