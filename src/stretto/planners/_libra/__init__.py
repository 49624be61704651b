"""LIBRA's optimization problem and three searches for it: literal, grid, Pareto.

- `problem`: the problem; `search`: chooses a search (for `libra` and `libra_m`).
- `literal`: the algorithm as printed; `grid`: its dynamic program; `pareto`: exact,
  without a grid; `bound`: lower bounds for both.
"""
