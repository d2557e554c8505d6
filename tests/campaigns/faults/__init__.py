"""Faults, cancellations and hung tasks at random points of real small pipelines: the next step must be right."""
