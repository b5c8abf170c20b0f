"""The store adapter for an etcd cluster, whose data outlives every machine of the job."""
