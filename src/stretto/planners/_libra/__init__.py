"""LIBRA's optimisation problem and three searches for it: literal, grid, Pareto."""
