"""Readers of the Linux kernel's interfaces.

`/proc`, `/sys`, netlink, the kernel log, and files of processes.
"""
