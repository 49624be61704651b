"""A cluster of jobs: one pure core, and engines that execute its commands.

In this package *cluster* means the hosts on which jobs run. A measured
`schema.Cluster`, for which plans are made, is called *network* here. Only `ray_gateway`
imports Ray, and nothing imports torch.

The core, which does no I/O:

- `ledger`: all decisions: events in, commands out (for `engine_sim` and `server`).
- `events`: what the ledger is given (shared, for instance by `ledger` and `state`).
- `commands`: what it gives to hosts (shared, for instance by `agent` and `wire`).
- `state`: what follows from the events so far (for `decisions`, `engine_sim` and
  `ledger`).
- `records`: a job, its attempts and their parts on hosts (shared, for instance by
  `state` and `consequences`).
- `devices`: which devices are free, and the choice of some for a gang (shared, for
  instance by `policies.deeppool` and `state`).
- `views`: what policies see of the state (shared, for instance by `speeds` and
  `job_plans`).
- `policies`: choose where jobs run.
- `decisions`: a policy's decisions, checked and as events (for `ledger`).
- `consequences`: the next event that follows from the past ones (for `ledger`).
- `outstanding`: the commands that follow from the state (for `ledger`).
- `reports`: check what agents send (for `coordinator`).

The coordinator and its store:

- `server`: the coordinator's process, behind a socket (for `engine_local`).
- `coordinator`: ledger, store and clock together (for `server`).
- `store`: keep the events in SQLite (for `engine_local` and `server`).
- `store_release`: refuse the store of a later release (for `engine_local` and `store`).
- `step_thinning`: remove old reports of steps (for `store`).
- `tables`: the state as rows (for `store`).
- `wire`: events and commands as JSON (shared, for instance by `store` and `job_plans`).
- `queries`: what commands of users see (for `server`).

A cluster on this machine:

- `engine_local`: start a cluster's processes, keep them running, end them (shared, for
  instance by `cli._cluster_jobs` and `cli._cluster_engine`).
- `roles`: processes of which one each should run (shared, for instance by
  `engine_local` and `agent`).
- `folders`: where a cluster's files are (shared, for instance by `engine_local` and
  `engine_ray`).
- `local_devices`: find this machine's devices (for `cli._cluster_engine`).
- `job_files`: read what users write (for `cli._cluster_jobs`).

A host and its ranks:

- `agent`: a host's process, which starts and ends its parts of jobs (for `engine_local`
  and `ray_actor`).
- `coordinator_link`: its connection to the coordinator (for `agent`).
- `part_start`: from a command to what a supervisor runs (for `agent`).
- `part_spec`: that as data (shared, for instance by `agent` and `supervisor`).
- `supervisor_start`: start a supervisor (for `agent`).
- `supervisor`: the process above an attempt's ranks (for `supervisor_start`).
- `rank_process`: one rank's process, and its log (for `supervisor`).
- `step_reports`: read the ranks' steps (for `supervisor`).
- `memory_use`: the memory of a process and all that it has started (for `supervisor`).
- `attempt_ends`: end attempts by the locks that their processes hold (for `agent` and
  `engine_local`).
- `processes`: find and end trees of processes (shared, for instance by `engine_local`
  and `agent`).
- `loop`: wait for descriptors, timers and ended children (shared, for instance by
  `engine_local` and `supervisor`).
- `channel`: lines of JSON over sockets (shared, for instance by `supervisor` and
  `server`).

Plans of profiled jobs:

- `job_plans`: plan a job before it starts (for `job_replan` and `server`).
- `replanning`: when a running job is measured and planned again (for `job_replan` and
  `plan_changes`).
- `job_replan`: plan a running job (for `plan_changes`).
- `plan_changes`: ask its ranks to change the plan (for `supervisor`).

A cluster on Ray:

- `engine_ray`: its settings (for `cli._cluster_engine`).
- `ray_head`: the process that runs Ray (for `cli._cluster_engine`, `engine_local` and
  `ray_gateway`).
- `ray_gateway`: Ray's client, beside the coordinator (for `engine_local`).
- `ray_actor`: keep the agent of a node running (for `ray_gateway` and `ray_relay`).
- `ray_relay`: from these actors to the coordinator (for `ray_gateway`).

A cluster in virtual time:

- `replay`: a trace under several policies (for `cli._cluster_simulate`).
- `traces`: read traces of real clusters (for `cli._cluster_simulate`).
- `engine_sim`: execute commands in virtual time (for `replay`).
- `speeds`: how fast jobs run on numbers of devices (for `replay`).
"""
