"""The collectors, a module for each source, registered by being here; see `core.collector`."""
