"""Which ranks train together, after losses too (experimental).

Nothing here imports torch; what a model does when views change is in
`stretto.runtime.regroup`.

- `view`: a membership, as pure data (shared, for instance by `ballots` and `keeper`).
- `ballots`: decide the next view, without I/O (shared, for instance by `wire` and
  `keeper`).
- `keeper`: the process on a host that starts ranks and sees them end (for
  `cli._elastic`).
- `peers`: its connections to the keepers of other hosts (for `keeper`).
- `meeting`: where and with whom these begin (for `cli._elastic`, `keeper` and `peers`).
- `proofs`: who may take part (for `peers`).
- `connections`: how keepers connect (for `peers`).
- `beats`: datagrams between keepers (for `peers`).
- `launchers`: what starts keepers or ranks, and what a loss does under each (for
  `cli._elastic`, `elastic.training` and `keeper`).
- `client`: a rank's connection to its keeper (for `elastic.training` and
  `horovod.torch.regrouping`).
- `progress`: what a rank shows its keeper (for `elastic.hanging` and `keeper`).
- `wire`: messages of ranks and keepers (for `client`, `keeper` and `peers`).
"""
