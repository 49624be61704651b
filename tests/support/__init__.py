"""What several test modules share: ranks, nets, plans, workloads, clusters, logs."""
