"""Readers of the kernel's interfaces: `/proc`, `/sys`, netlink, its log, processes' files."""
