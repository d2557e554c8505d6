"""The live page of a run: its state as one message for all, over HTTP."""
