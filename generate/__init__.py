"""Tools of development: they generate the reference and the alert rules from the package."""
