"""The commands `dshealthd probe` and `dshealthd keys`."""
