"""The search of `stretto.planners.joint`: space, moves and hill climbing."""
