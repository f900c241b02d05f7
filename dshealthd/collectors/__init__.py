"""One module per source of samples; each is found by being here.

See `dshealthd.core.collector` for what a module holds.
"""
