"""The search of `stretto.planners.joint`: space, moves and hill climbing.

- `space`: the open choices (for `search`, `exhaustive` and `joint`).
- `starts`: drafts from which to search (for `joint`).
- `search`: simulates drafts and climbs (for `starts` and `joint`).
- `neighborhood`: the changes of one bucket (for `search` and `joint`).
- `moves`: the changes themselves (for `anneal`, `neighborhood` and `search`).
- `anneal`: simulated annealing at the end (for `search`).
- `launch`: launch orders for overlap ``forward`` (shared, for instance by
  `neighborhood` and `joint`).
"""
