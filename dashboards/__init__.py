"""What an operator watches asyncpipe with: Grafana dashboards, Prometheus rules, and the runbook that they link to.

``python -m dashboards.build`` writes the JSON and YAML files of this folder from the Python ones.
"""
