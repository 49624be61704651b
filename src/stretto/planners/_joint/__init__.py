"""The search of `stretto.planners.joint`: space, moves and hill climbing.

- `space`: the open choices; `starts`: drafts from which to search.
- `search`: simulates drafts and climbs, with `neighborhood` (changes of one bucket),
  `moves` (the changes themselves) and `anneal` (at the end).
- `launch`: launch orders for overlap ``forward``.
"""
