"""A cluster of jobs: one pure core, and engines that execute its commands.

`ledger` holds all decisions: events in, commands out. `events` and `commands` are its
vocabulary, `views` what its policies see, `policies` choose where jobs run. `store`
keeps the events, and `coordinator` joins ledger, store and clock for an engine.
`engine_sim` executes commands in virtual time, for traces that `traces` reads. None of
these imports torch.
"""
