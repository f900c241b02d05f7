"""Dashboards as code: one module per dashboard, from which the JSON for Grafana is generated.

`python -m grafana` writes `grafana/dashboards/*.json`; `--check` compares.
"""
