"""The search of `stretto.planners.joint`: its space, its moves, its climbing."""
