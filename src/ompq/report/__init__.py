"""The report: one HTML page about a plan and what came of it."""
