"""Frames on edges and control connections that somebody on the path has changed: nothing of them is used."""
