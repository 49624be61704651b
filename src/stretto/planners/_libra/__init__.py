"""LIBRA's optimization problem and three searches for it: literal, grid, Pareto."""
