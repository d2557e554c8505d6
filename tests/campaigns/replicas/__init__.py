"""Replicas against one pipeline that has all micro-batches, and on threads against worker processes.

``cases.py`` has the table of all combinations, and draws random cases from seeds; ``campaign.py`` runs and judges them.
"""
