"""One module per source of samples; every module in this package is registered.

See `dshealthd.core.collector` for what a module holds.
"""
