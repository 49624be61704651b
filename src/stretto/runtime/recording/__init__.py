"""Recording of steps, on one rank and across ranks."""
