"""Which ranks train together, after losses too (experimental).

`view` is a membership and `ballots` decides the next one; both are pure. `keeper` is
the process on a host that starts ranks and sees them end. `peers` are its connections
to those of other hosts: `meeting` has where and with whom they begin, `proofs` who may
take part, `connections` how they connect, and `beats` their datagrams. `launchers` are
those that start keepers or ranks, and what a loss does under each. `client` is a rank's
connection to its keeper, `progress` what a rank shows it, and `wire` their messages.
Nothing here imports torch; what a model does when views change is in
`stretto.runtime.regroup`.
"""
