"""Cuts any module into stages, by tracing it with ``torch.export``; start with ``trace``, which names the steps."""
