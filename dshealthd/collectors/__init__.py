"""One module per source of samples; each is found by being here. See `dshealthd.collector` for what a module holds."""
