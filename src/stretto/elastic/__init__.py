"""Training that loses and gains ranks (experimental): `stretto.Elastic`.

Keepers and memberships are in `stretto.members`, groups in `stretto.runtime.regroup`.

- `training`: run a failed step again, or take the state of a rank that has ended it
  (for programs).
- `batches`: give each rank its share of a batch (for `training` and
  `testing.elastic_replay`).
- `digests`: compare the ranks' parameters (for `training`).
- `undo`: set back what a lost step has changed (for `training`).
- `draining`: note that a rank is to leave (for `training`).
- `hanging`: show the keeper whether a rank computes or waits (for `training`).
"""
