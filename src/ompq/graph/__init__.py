"""From a network to its units: what runs, in which order, on which shapes."""
