"""LIBRA's optimization problem and three searches for it: literal, grid, Pareto.

- `problem`: the problem (shared, for instance by `grid` and `pareto`).
- `search`: chooses a search (for `libra` and `libra_m`).
- `literal`: the algorithm as printed (for `search`).
- `grid`: its dynamic program (for `pareto` and `search`).
- `pareto`: exact, without a grid (for `search`).
- `bound`: lower bounds for both (for `grid` and `pareto`).
"""
