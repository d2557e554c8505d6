"""asyncio and threads, no torch: executors run tasks, the driver feeds them, the portal lends a loop."""
