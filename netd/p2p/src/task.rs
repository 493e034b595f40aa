//! Tasks of the runtime.

use futures::future::FutureExt;
use tokio::task::JoinHandle;

/// Starts a task, as [`tokio::spawn`] does. The runtime's code around a task is compiled once for each
/// type of its result, not once for each future.
pub fn spawn<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    tokio::spawn(future.boxed())
}
