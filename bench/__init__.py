"""Benchmarks: `python -m bench.NAME`, or all with `./dev bench`; results in bench/README.md."""
