"""The store in an etcd cluster: outlives every machine of the job."""
