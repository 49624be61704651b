"""Names of stretto's environment variables, each spelled here only.

Users set some of them, `stretto run` passes options to its ranks in some, and processes
that start ranks pass what these need. `rank_variables` reads those that launchers set.
"""

from __future__ import annotations

# Set by users, or by options of `stretto run`.

PLAN = "STRETTO_PLAN"
"""The plan of models that are given none: a file, ``auto`` or ``ddp``."""

SAVE_PLAN = "STRETTO_SAVE_PLAN"
"""The file that gets the plan that tuning settled on."""

PROFILE = "STRETTO_PROFILE"
"""The file that gets the measured workload."""

CLUSTER = "STRETTO_CLUSTER"
"""The file that gets the measured network."""

TRACE = "STRETTO_TRACE"
"""The file that gets a recorded timeline."""

REPORT = "STRETTO_REPORT"
"""The file that gets the page about tuning."""

TUNING = "STRETTO_TUNING"
"""The file that gets the record of tuning."""

PLAN_CACHE = "STRETTO_PLAN_CACHE"
"""The file of settled plans, or ``off``."""

FORMER_PLAN_CACHE = "STRETTO_MEMORY"
"""The name of `PLAN_CACHE` in earlier versions."""

TUNE_SCHEDULE = "STRETTO_TUNE_SCHEDULE"
"""``forced``: ``plan="auto"`` does everything at fixed steps, for tests."""

LANE_BACKEND = "STRETTO_LANE_BACKEND"
"""The backend of lanes; for a missing argument."""

OVERLAP = "STRETTO_OVERLAP"
"""The part of a step with which communication overlaps; for a missing argument."""

CLIPPING = "STRETTO_CLIPPING"
"""``parts``: gradients may be clipped by partial norms."""

POISON = "STRETTO_POISON"
"""``1``: what is pending is NaN until it is finished, for tests."""

RESUME = "STRETTO_RESUME"
"""Whether an elastic job resumes from its snapshots: ``auto`` or ``never``."""

CONVERT = "STRETTO_CONVERT"
"""Set by `stretto run --convert`: scripts for one device are converted first."""

HANG_S = "STRETTO_HANG_S"
"""Shortest time after which an elastic rank counts as hanging; 0: never."""

JAX_CALLBACKS = "STRETTO_JAX_CALLBACKS"
"""``io``: `stretto.jax` gets copies that JAX makes."""

# Of jobs that share a device.

FOREGROUND = "STRETTO_FOREGROUND"
"""The device on which this script is the foreground."""

BACKGROUND = "STRETTO_BACKGROUND"
"""The device in whose idle time this script trains."""

BACKGROUND_SEGMENTS = "STRETTO_BACKGROUND_SEGMENTS"
"""Whether a lease is for a micro-batch or for a segment of it."""

BACKGROUND_MAX_LOSS = "STRETTO_BACKGROUND_MAX_LOSS"
"""The share of its speed that the foreground may lose."""

BACKGROUND_COLLOCATION = "STRETTO_BACKGROUND_COLLOCATION"
"""The file of measured pairs of jobs."""

BACKGROUND_NAMES = "STRETTO_BACKGROUND_NAMES"
"""The names of foreground and background in that file."""

BACKGROUND_OWNER = "STRETTO_BACKGROUND_OWNER"
"""Process id and device of the background that has started this process."""

RUNTIME_DIR = "STRETTO_RUNTIME_DIR"
"""The folder of boards and locks of devices."""

# From a process that starts ranks.

STEP_COUNTS = "STRETTO_STEP_COUNTS"
"""The file in which a rank counts its steps."""

PLAN_REQUESTS = "STRETTO_PLAN_REQUESTS"
"""The folder of requests to change a plan."""

KEEPER = "STRETTO_KEEPER"
"""The socket of the rank's keeper; set under ``stretto run --elastic``."""

MEMBER = "STRETTO_MEMBER"
"""The rank's number as a member of its keeper."""

JOINS = "STRETTO_JOINS"
"""Set for a rank that joins a job which trains already: how many ranks it has."""

MIN_RANKS = "STRETTO_MIN_RANKS"
"""With fewer ranks the job ends; not set where it waits for other hosts instead."""

HOST_ADDRESS = "STRETTO_HOST_ADDRESS"
"""The address of this host for other hosts' ranks."""

PROGRESS = "STRETTO_PROGRESS"
"""The file in which a rank reports to its keeper what it is doing."""

ELASTIC_TOKEN = "STRETTO_ELASTIC_TOKEN"
"""A secret that all keepers of a job share."""

ELASTIC_DIR = "STRETTO_ELASTIC_DIR"
"""The folder of commits of Horovod's elastic training."""

# Of `stretto lab`.

LAB = "STRETTO_LAB"
"""Set in emulated ranks."""

LAB_MODE = "STRETTO_LAB_MODE"
"""How the network is emulated."""

LAB_HOSTS = "STRETTO_LAB_HOSTS"
"""The number of emulated hosts."""

LAB_ADDRESSES = "STRETTO_LAB_ADDRESSES"
"""The hosts' addresses."""

LAB_LINK_BYTES_PER_S = "STRETTO_LAB_LINK_BYTES_PER_S"
"""The rate of a host's link."""

LAB_FLOW_BYTES_PER_S = "STRETTO_LAB_FLOW_BYTES_PER_S"
"""The rate of one flow; empty without a limit."""

LAB_PACING_BYTES_PER_S = "STRETTO_LAB_PACING_BYTES_PER_S"
"""The rate to which a rank's sockets are paced."""

# Of `stretto cluster`.

CLUSTER_PREFIX = "STRETTO_CLUSTER_"
"""Begins the names of variables that a cluster sets for jobs."""

CLUSTER_DIR = "STRETTO_CLUSTER_DIR"
"""The folder of the cluster, unless ``--folder`` names one."""

CLUSTER_JOB = "STRETTO_CLUSTER_JOB"
"""The job's name."""

CLUSTER_FILES = "STRETTO_CLUSTER_FILES"
"""The folder of the job's own files."""

CLUSTER_RESUME = "STRETTO_CLUSTER_RESUME"
"""Set where the job has been started before."""

CLUSTER_BATCH = "STRETTO_CLUSTER_BATCH"
"""Samples of a step, where the policy chooses them."""

CLUSTER_PLAN = "STRETTO_CLUSTER_PLAN"
"""The burst plan that the policy chose."""

CLUSTER_ATTEMPT = "STRETTO_CLUSTER_ATTEMPT"
"""The folder of an attempt: marks its processes."""

CLUSTER_RAY = "STRETTO_CLUSTER_RAY"
"""Marks the processes of the cluster's Ray."""

DEVICE = "STRETTO_DEVICE"
"""A rank's device in a cluster, also for what the rank starts."""
