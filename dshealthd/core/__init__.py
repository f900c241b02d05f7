"""The engine that everything else is built on."""
