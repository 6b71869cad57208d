"""Files for other runtimes, run and compared before they appear."""
