//! Jobs: what netd asks of a worker.
