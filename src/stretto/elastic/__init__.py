"""Training that loses and gains ranks (experimental): `stretto.Elastic`.

`training` runs a failed step again, or takes the state of a rank that has ended it;
for it, `batches` gives each rank its share of a batch, `digests` compares the ranks'
parameters, `undo` sets back what a lost step has changed, `draining` notes that a rank
is to leave, and `hanging` shows the keeper whether a rank computes or waits. Keepers
and memberships are in `stretto.members`, groups in `stretto.runtime.regroup`.
"""
