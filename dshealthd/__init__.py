"""Cluster health for GPU training: one page that names the node, GPU or link."""

__version__ = "0.1.0"
