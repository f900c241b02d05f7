"""Dashboards as code: one module a dashboard, and the JSON that Grafana reads made from it.

`python -m grafana` writes `grafana/dashboards/*.json`; `--check` compares.
"""
