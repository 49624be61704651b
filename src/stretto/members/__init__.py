"""Which ranks train together, after losses too (experimental).

`view` is a membership and `ballots` decides the next one; both are pure. `keeper` is
the process on a host that starts ranks and sees them end, `peers` its connections to
those of other hosts, `client` a rank's connection to it, `progress` what a rank shows
it, and `wire` their messages. Nothing here imports torch; what a model does when
views change is in `stretto.runtime.regroup`.
"""
