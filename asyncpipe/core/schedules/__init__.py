"""The built-in schedules, one family a file."""
