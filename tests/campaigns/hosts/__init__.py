"""Hosts that are lost, at any instant and at each kind of task: the job goes on by itself, and ends bit-equal."""
