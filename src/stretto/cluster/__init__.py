"""A cluster of jobs: one pure core, and engines that execute its commands.

In this package *cluster* means the hosts on which jobs run. A measured
`schema.Cluster`, for which plans are made, is called *network* here.

`ledger` holds all decisions: events in, commands out. `events` and `commands` are its
vocabulary, `views` what its policies see, `policies` choose where jobs run. `store`
keeps the events, and `coordinator` joins ledger, store and clock for an engine.
`state`, `records` and `devices` are what the ledger holds, `consequences` and
`outstanding` what follows from it, `decisions` what a policy's decisions become, and
`reports` checks what agents send. `tables` and `wire` are rows and JSON of all that;
`step_thinning` removes old rows, and `store_release` refuses a later release's store.
`engine_sim` executes commands in virtual time, for traces that `traces` reads and
`replay` runs, with speeds of `speeds`. None of these imports torch.

`engine_local` keeps the processes of a cluster on this machine running (`roles`):
`server`, the coordinator behind a socket, and an `agent` per host with its
`coordinator_link`. An agent makes a `part_spec` of each command (`part_start`) and
starts a `supervisor` for it (`supervisor_start`), which runs the ranks (`rank_process`)
and reads their steps (`step_reports`) and memory (`memory_use`). All wait in a `loop`
and exchange lines of JSON (`channel`); `folders` says where their files are,
`processes` finds and ends trees of processes, `attempt_ends` ends attempts that nothing
else can end. `job_plans` plans a profiled job, and for
one that runs `replanning` decides, `job_replan` plans, and `plan_changes` asks the
ranks to change. `job_files` reads what users write, `queries` is what they see, and
`local_devices` finds this machine's devices.

`engine_ray` has the settings of a cluster on Ray. `ray_head` runs Ray, `ray_gateway` is
its client, with a `ray_actor` on each node, which keeps the host's agent running, and a
`ray_relay` to each. `ray_gateway` alone imports Ray.
"""
